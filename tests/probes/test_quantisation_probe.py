"""The quantisation probe against hooks and float64 rounding written here, on small models."""

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from normscope.anatomy import read_anatomy
from normscope.nn.swap import swap
from normscope.probes import Measurements, measure_quantisation
from normscope.probes.quantisation import FORMATS, GRANULARITIES, MEASURED, PARTS, Rounding
from normscope.probes.quantisation.estimate import _square, estimates
from normscope.probes.quantisation.harm import Seen, harm, output_of, see
from normscope.probes.quantisation.look import Look, once
from normscope.probes.quantisation.outliers import llm_int8_channels, outlier_channels
from normscope.subjects import Subject, load, make_subject

TOP = {"int8": 127, "int4": 7}
WIDTH, DEPTH = 12, 3


class Block(nn.Module):
    """x + W₂ gelu(W₁ LN(x)), or LN after the add."""

    def __init__(self, *, post: bool) -> None:
        super().__init__()
        self.post = post
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mix(x)) if self.post else x + self.mix(self.norm(x))


class Stack(nn.Module):
    """Embedding, blocks, final norm (Pre-LN), head."""

    def __init__(self, *, post: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block(post=post) for _ in range(DEPTH))
        self.final = nn.Identity() if post else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def subject(*, post: bool = False, loss: bool = True) -> Subject:
    torch.manual_seed(1)
    model = Stack(post=post)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.embed.weight[:, 3] *= 9  # an outlier channel
    return make_subject(model, torch.randint(40, (4, 9)), loss_fn if loss else lambda output, batch: None)


def measured(given: Subject, formats: tuple[str, ...] = ("int8",), *, every: bool = True) -> Measurements:
    return Measurements(measure_quantisation(given, read_anatomy(given), formats, every=every))


def by_hand(x: Tensor, rounding: Rounding, axis: int = -1) -> Tensor:
    """Rounding in float64, without torchao."""
    peaks = x.double().abs()
    axes = [a for a in range(x.ndim) if a != axis % x.ndim]
    scale = (peaks.amax(axes, keepdim=True) if rounding.granularity == "channel" else peaks.amax()).clamp_min(
        1e-300
    )
    if rounding.format == "fp8":
        scale = scale / 448
        return (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale
    scale = scale / TOP[rounding.format]
    return (x.double() / scale).round() * scale


Rounder = Callable[[Tensor], Tensor]


def forwards_by_hand(given: Subject, rounding: Rounding, part: str, number: int) -> tuple[Tensor, Tensor]:
    """Output with one place rounded by hooks or in a copy of the weights, and the place's tensor."""
    model, seen = copy.deepcopy(given.model), []

    def rounds(module: nn.Module, args: object, output: Tensor) -> Tensor:
        seen.append(output.detach())
        return by_hand(output, rounding).to(output.dtype)

    if part == "weights":
        linears = [m for m in model.blocks[number].mix if isinstance(m, nn.Linear)]
        for linear in linears:
            seen.append(linear.weight.detach().clone().flatten())
            linear.weight.data = by_hand(linear.weight, rounding, 0).to(linear.weight.dtype)
    else:
        modules = {
            "stream": [model.embed, *model.blocks],
            "norm": [*(block.norm for block in model.blocks), model.final],
            "branch": [block.mix for block in model.blocks],
        }
        modules[part][number].register_forward_hook(rounds)
    with torch.no_grad():
        return model(given.batch), torch.cat([each.reshape(-1) for each in seen]) if len(seen) > 1 else seen[
            0
        ]


SITES = {
    "weights": [f"blocks.{i}.mix" for i in range(DEPTH)],
    "stream": ["embed", *(f"blocks.{i}" for i in range(DEPTH))],
    "norm": [*(f"blocks.{i}.norm" for i in range(DEPTH)), "final"],
    "branch": [f"blocks.{i}.mix" for i in range(DEPTH)],
}


def site_of(found: Measurements, part: str, number: int) -> str:
    """The site in the table: the stack's input has the stack's name."""
    if part == "stream" and number == 0:
        return next(m.site for m in found if m.site.endswith(".input"))
    return SITES[part][number]


@pytest.fixture(scope="module")
def tables() -> dict[bool, tuple[Subject, Measurements]]:
    return {post: (subject(post=post), measured(subject(post=post), FORMATS)) for post in (False, True)}


@pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS)
def test_harm_and_sqnr_of_every_place_are_those_of_hooks(
    tables: dict[bool, tuple[Subject, Measurements]], format: str, granularity: str, post: bool
) -> None:
    given, found = tables[post]
    rounding, name = Rounding(format, granularity), f"{format}-{granularity}"
    with torch.no_grad():
        y = given.model(given.batch)
        before = float(loss_fn(y, given.batch))
    compared = 0
    for part, sites in SITES.items():
        for number in range(len(sites)):
            if post and sites[number] == "final":
                continue
            site = site_of(found, part, number)
            rounded, x = forwards_by_hand(given, rounding, part, number)
            change = float((rounded.double() - y.double()).norm() / y.double().norm())
            harm = found.of(f"quantisation/{part}-{name}-harm")[site]
            assert harm == pytest.approx(change, rel=2e-2), (part, site)  # a tie may fall the other way
            loss = found.of(f"quantisation/{part}-{name}-loss-change")[site]
            assert loss == pytest.approx(float(loss_fn(rounded, given.batch)) - before, rel=5e-2, abs=2e-5)
            if part != "weights":
                noise = (by_hand(x, rounding) - x.double()).square().sum()
                expected = 10 * math.log10(float(x.double().square().sum() / noise))
                assert found.of(f"quantisation/{part}-{name}-sqnr")[site] == pytest.approx(expected, abs=0.1)
            compared += 1
    assert compared == (13 if post else 14)


@pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])
def test_ranks_are_the_order_of_the_measured_harm(
    tables: dict[bool, tuple[Subject, Measurements]], post: bool
) -> None:
    _, found = tables[post]
    for format in FORMATS:
        for granularity in GRANULARITIES:
            name = f"{format}-{granularity}"
            ranked = {}
            for part in PARTS:
                harms = found.of(f"quantisation/{part}-{name}-harm")
                for site, rank in found.of(f"quantisation/{part}-{name}-rank").items():
                    assert ranked.setdefault(rank, harms[site]) == harms[site]  # one tensor, two names
            ordered = [ranked[rank] for rank in sorted(ranked)]
            assert sorted(ranked) == list(range(1, len(ranked) + 1))
            assert ordered == sorted(ordered, reverse=True)
            assert len(ranked) == (3 + 4 + 3 if post else 3 + 4 + 4 + 3)


def test_the_estimate_converges_to_the_harm() -> None:
    """With many backwards it is the harm to first order, up to the errors' correlations."""
    given = subject()
    look = Look.at(given, read_anatomy(given))
    rounding = Rounding("int8", "tensor")
    places = once(look.fit)
    found = estimates(given, look.parameters, places, [rounding], backwards=200)
    for place in places:
        harm = look.harm([place], rounding).change
        assert found[place.key, rounding] == pytest.approx(harm, rel=0.25), place


def test_four_backwards_are_enough_for_an_order() -> None:
    """The estimate of every place is near its harm for any draw: parts of a tensor count one by one."""
    given = subject()
    look = Look.at(given, read_anatomy(given))
    rounding = Rounding("int8", "tensor")
    places = once(look.fit)
    harms = {place.key: look.harm([place], rounding).change for place in places}
    for seed in range(8):
        given.seed = seed
        for (key, _), value in estimates(given, look.parameters, places, [rounding]).items():
            assert value / harms[key] == pytest.approx(1, abs=0.5), (seed, key)


def test_the_estimate_adds_within_a_token_and_within_an_output_feature() -> None:
    """Σ over parts of (g·ε)², written out for tensors whose gradient is 1."""
    torch.manual_seed(2)
    rounding, x = Rounding("int4", "tensor"), torch.randn(3, 5, 8)
    error = by_hand(x, rounding) - x.double()
    for axis, summed in ((-1, -1), (0, (1, 2)), (2, (0, 1))):
        expected = float(error.sum(summed).square().sum())
        assert _square(x, torch.ones_like(x), rounding, axis) == pytest.approx(expected, rel=1e-4)


def test_channels_of_a_weight_are_its_output_features() -> None:
    """GPT-2's Conv1D has them along the second axis, `Linear` along the first."""
    for spec, axis in (
        ("hf:gpt2,n_layer=1,n_embd=16,n_head=2,vocab_size=64", 1),
        ("nn:decoder,depth=1,width=16,heads=2", 0),
    ):
        given = load(spec, seq_len=8)
        look = Look.at(given, read_anatomy(given))
        weights = [weight for place in look.places for weight in place.weights]
        assert len(weights) >= 3
        assert {found for _, found in weights} == {axis}


def test_the_harm_is_relative_to_the_output_as_it_is() -> None:
    before, after = Seen(torch.tensor([3.0, 4.0]), 1.0), Seen(torch.tensor([6.0, 8.0]), 0.5)
    assert (harm(before, after).change, harm(before, after).loss) == (1.0, -0.5)
    for value in (math.inf, math.nan):
        assert harm(before, Seen(torch.tensor([3.0, value]), None)).change == math.inf


def test_the_output_is_the_logits_behind_a_loss() -> None:
    logits = torch.ones(2, 3)
    assert output_of((torch.tensor(1.0), torch.arange(4), logits)) is logits
    with pytest.raises(ValueError, match="no floating-point tensor"):
        output_of(torch.arange(3))


def test_a_tensor_with_two_names_has_the_first() -> None:
    """In Post-LN a block's exit is its norm's output; the stream's name comes first."""
    given = subject(post=True)
    look = Look.at(given, read_anatomy(given))
    names = [place.name for place in once(look.places)]
    assert f"stream blocks.{DEPTH - 1}" in names
    assert not any(name.startswith("norm") for name in names)
    assert names == [place.name for place in look.places if place.name in names]


def test_a_model_that_draws_numbers_in_eval_mode_draws_the_same_ones() -> None:
    class Noisy(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + torch.rand(())

    given = given_with(subject(), Noisy())
    look = Look.at(given, read_anatomy(given))
    torch.manual_seed(1)
    first = see(given, look.parameters).output
    torch.manual_seed(2)
    assert torch.equal(see(given, look.parameters).output, first)


def test_only_the_first_of_a_ranking_are_measured_unless_all_are_asked_for() -> None:
    found = measured(subject(), every=False)
    for granularity in GRANULARITIES:
        name, count = f"int8-{granularity}", 0
        for part in PARTS:
            for m in found:
                if m.quantity == f"quantisation/{part}-{name}-harm":
                    rank = found.of(f"quantisation/{part}-{name}-rank")[m.site]
                    assert m.measured == (rank <= MEASURED)
                    row = found.find(f"quantisation/{part}-{name}-rank", m.site)
                    assert row.how == f"by the {'measured harm' if m.measured else 'estimate'}"
                    assert m.measured or "--budget deep" in m.how
                    count += m.measured
        assert count == MEASURED
        chosen, others = [], []
        for part in PARTS:
            harms = found.of(f"quantisation/{part}-{name}-harm")
            for site, estimate in found.of(f"quantisation/{part}-{name}-estimate").items():
                (chosen if site in harms else others).append(estimate)
        assert min(chosen) >= max(others) > 0
        ranks = [rank for part in PARTS for rank in found.of(f"quantisation/{part}-{name}-rank").values()]
        assert sorted(ranks) == list(range(1, len(ranks) + 1))


def test_all_places_of_a_part_together() -> None:
    given = subject()
    found = measured(given)
    model, rounding = copy.deepcopy(given.model), Rounding("int8", "tensor")
    for module in [model.embed, *model.blocks]:
        module.register_forward_hook(lambda module, args, output: by_hand(output, rounding).to(output.dtype))
    with torch.no_grad():
        y, rounded = given.model(given.batch), model(given.batch)
    change = float((rounded - y).norm() / y.norm())
    assert found.of("quantisation/stream-int8-tensor-together")[""] == pytest.approx(change, rel=2e-2)
    model = copy.deepcopy(given.model)
    with torch.no_grad():
        for module in (each for block in model.blocks for each in block.mix if isinstance(each, nn.Linear)):
            module.weight.copy_(by_hand(module.weight, rounding))
        change = float((model(given.batch) - y).norm() / y.norm())
    assert found.of("quantisation/weights-int8-tensor-together")[""] == pytest.approx(change, rel=2e-2)


def test_what_a_norm_gains() -> None:
    """SQNR of its output minus that of its input."""
    given = subject()
    found = measured(given)
    norm, figures = given.model.blocks[0].norm, []
    norm.register_forward_hook(
        lambda module, args, output: figures.extend((output.detach(), args[0].detach()))
    )
    with torch.no_grad():
        given.model(given.batch)
    ratios = []
    for x in figures:
        noise = (by_hand(x, Rounding("int8", "tensor")) - x.double()).square().sum()
        ratios.append(10 * math.log10(float(x.double().square().sum() / noise)))
    gain = found.of("quantisation/norm-int8-tensor-gain")["blocks.0.norm"]
    assert gain == pytest.approx(ratios[0] - ratios[1], abs=0.1)


# Outliers.


def test_outlier_channels_by_the_ratio_rule() -> None:
    x = torch.ones(5, 8)
    x[2, 3], x[1, 6] = -6.0, 5.9
    assert outlier_channels(x) == ([3], 6.0)
    assert outlier_channels(2.0**-30 * x)[0] == [3]
    assert outlier_channels(torch.zeros(5, 8)) == ([], None)
    lone = torch.zeros(5, 8)
    lone[0, 1] = 1.0
    assert outlier_channels(lone) == ([1], None)


def test_outlier_channels_by_the_rule_of_llm_int8() -> None:
    layers = [torch.zeros(100, 5) for _ in range(4)]
    layers[0][:6, 0] = -6.0  # a quarter of the layers, 6 % of the tokens
    layers[1][:5, 1] = 6.0  # too few tokens
    layers[2][:6, 2] = 5.99  # too small
    for layer in layers:
        layer[:50, 3] = 7.0
    assert llm_int8_channels(layers) == [0, 3]
    assert llm_int8_channels([*layers, torch.zeros(100, 5)]) == [3]  # a fifth of the layers


def test_the_planted_channel_is_found_in_the_stream() -> None:
    found = measured(subject())
    rows = [m for m in found if m.quantity == "quantisation/stream-outlier-channels"]
    assert len(rows) == DEPTH + 1
    assert all(row.value == (3.0,) for row in rows)
    assert min(found.of("quantisation/stream-outlier-ratio").values()) >= 6
    assert found.find("quantisation/llm-int8-channels", rows[0].site.removesuffix(".input")).measured


# The other placement.


@pytest.mark.parametrize(("scheme", "other"), [("pre", "post"), ("post", "pre")])
def test_the_counterpart_is_the_swapped_model(scheme: str, other: str) -> None:
    given = load(f"nn:decoder,scheme={scheme},depth=2,width=16,heads=2", seq_len=16)
    found = measured(given)
    swapped = swap(given.model, other)
    there = Measurements(
        measure_quantisation(given_with(given, swapped), read_anatomy(given_with(given, swapped)), ("int8",))
    )
    for part in PARTS:
        row = found.find(f"quantisation/counterpart-{part}-int8-tensor-together")
        assert row.value == there.of(f"quantisation/{part}-int8-tensor-together")[""]
        assert f"scheme {other}" in row.how
    stream = found.of("quantisation/counterpart-stream-int8-tensor-sqnr")
    assert stream == there.of("quantisation/stream-int8-tensor-sqnr")


def given_with(given: Subject, model: nn.Module) -> Subject:
    return make_subject(model, given.batch, given.loss_fn)


def test_a_model_of_another_kind_has_no_counterpart() -> None:
    row = measured(subject()).find("quantisation/counterpart-stream-int8-tensor-together")
    assert row.value is None
    assert "only an nn: model with scheme pre or post" in row.how


# What cannot be measured, and what must stay as it is.


def rows_of(found: Measurements, begin: str) -> Iterator[str]:
    return (m.how for m in found if m.quantity.startswith(f"quantisation/{begin}") and m.value is None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_named(value: float) -> None:
    given = subject()
    with torch.no_grad():
        given.model.blocks[1].mix[0].weight[0, 0] = value
    found = measured(given)
    assert found.find("quantisation/weights-int8-tensor-sqnr", "blocks.1.mix").value is None
    assert found.find("quantisation/weights-int8-tensor-sqnr", "blocks.0.mix").measured
    for stat in ("estimate", "harm", "loss-change", "rank"):
        row = found.find(f"quantisation/weights-int8-tensor-{stat}", "blocks.0.mix")
        assert "not finite" in row.how
    assert "not finite" in found.find("quantisation/stream-int8-tensor-together").how
    assert all(math.isfinite(m.value) for m in found if isinstance(m.value, float))


def test_values_beyond_float32_are_named() -> None:
    given = subject()
    given.model.double()
    with torch.no_grad():
        given.model.embed.weight[:, 3] = 1e39
    row = measured(given).find("quantisation/stream-int8-tensor-sqnr", "blocks.0")
    assert row.value is None
    assert "beyond float32" in row.how


def test_an_output_of_zeros_has_no_relative_change() -> None:
    given = subject()
    with torch.no_grad():
        for parameter in given.model.head.parameters():
            parameter.zero_()
    found = measured(given)
    for stat in ("estimate", "harm", "rank"):
        assert found.find(f"quantisation/stream-int8-tensor-{stat}", "blocks.0").value is None
    assert found.find("quantisation/stream-int8-tensor-together").value is None


def test_zeros_have_no_ratio_and_do_no_harm() -> None:
    given = subject()
    with torch.no_grad():
        for parameter in given.model.blocks[1].mix[2].parameters():
            parameter.zero_()
    found = measured(given)
    row = found.find("quantisation/branch-int8-tensor-sqnr", "blocks.1.mix")
    assert row.value is None
    assert "every value there is zero" in row.how
    assert found.of("quantisation/branch-int8-tensor-harm")["blocks.1.mix"] == 0


def test_without_a_loss_the_output_is_what_changes() -> None:
    given = make_subject(subject().model, torch.randint(40, (4, 9)))
    given.loss_fn = None
    found = measured(given)
    assert "no loss function is known" in next(rows_of(found, "stream-int8-tensor-loss-change"))
    assert not list(rows_of(found, "stream-int8-tensor-harm"))


def test_weights_that_are_used_twice_are_rounded_once() -> None:
    given = subject()
    for block in given.model.blocks[1:]:
        block.mix = given.model.blocks[0].mix
    found = measured(given)
    gaps = list(rows_of(found, "weights-int8-tensor-harm"))
    assert len(gaps) == DEPTH - 1
    assert all("they are the weights of blocks.0.mix" in gap for gap in gaps)
    model = copy.deepcopy(given.model)
    for linear in (model.blocks[0].mix[0], model.blocks[0].mix[2]):
        linear.weight.data = by_hand(linear.weight, Rounding("int8", "tensor")).float()
    with torch.no_grad():
        y, rounded = given.model(given.batch), model(given.batch)
    change = float((rounded - y).norm() / y.norm())
    assert found.of("quantisation/weights-int8-tensor-harm")["blocks.0.mix"] == pytest.approx(
        change, rel=2e-2
    )


def test_an_output_that_overflows_is_the_worst_harm() -> None:
    class Steep(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            y = super().forward(ids)
            return torch.where((y - self.usual).abs() > 1e-9, math.inf, y) if hasattr(self, "usual") else y

    torch.manual_seed(0)
    given = subject()
    model = Steep()
    model.load_state_dict(given.model.state_dict())
    with torch.no_grad():
        model.usual = model(given.batch)
    found = measured(given_with(given, model))
    harms = found.of("quantisation/stream-int8-tensor-harm")
    assert set(harms.values()) == {math.inf}
    assert (
        found.find("quantisation/stream-int8-tensor-harm", "blocks.0").how
        == "exact; the output is not finite"
    )


def test_a_place_without_a_gradient_is_measured() -> None:
    class Cut(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.final(x).detach()) + 0 * x.sum()

    given = subject()
    model = Cut()
    model.load_state_dict(given.model.state_dict())
    found = measured(given_with(given, model), every=False)
    row = found.find("quantisation/norm-int8-tensor-estimate", "final")
    assert row.value is None
    assert "no gradient of the output reaches it" in row.how
    assert found.find("quantisation/norm-int8-tensor-harm", "final").measured


@pytest.mark.parametrize(
    "spec",
    ["nn:decoder,scheme=pre,depth=2,width=16,heads=2", "hf:gpt2,n_layer=2,n_embd=16,n_head=2,vocab_size=256"],
)
def test_the_model_stays_as_it_is(spec: str) -> None:
    given = load(spec, seq_len=16)
    given.model.train()
    given.loss().backward()
    anatomy = read_anatomy(given)
    state = copy.deepcopy(given.model.state_dict())
    pointers = {name: p.data_ptr() for name, p in given.model.named_parameters()}
    grads = {name: p.grad.clone() for name, p in given.model.named_parameters() if p.grad is not None}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in given.model.modules()]
    random = torch.get_rng_state()
    found = list(measure_quantisation(given, anatomy, FORMATS, every=False))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], value) for name, value in given.model.state_dict().items())
    assert pointers == {name: p.data_ptr() for name, p in given.model.named_parameters()}
    assert all(torch.equal(grads[n], p.grad) for n, p in given.model.named_parameters() if n in grads)
    assert hooks == [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in given.model.modules()
    ]
    again = list(measure_quantisation(given, anatomy, FORMATS, every=False))
    assert found == again


def test_weights_come_back_when_a_forward_fails() -> None:
    given = subject()
    look = Look.at(given, read_anatomy(given))
    before = copy.deepcopy(given.model.state_dict())
    given.loss_fn = lambda output, batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        see(given, look.parameters, [look.fit[0]], Rounding("int4", "tensor"))
    assert all(torch.equal(before[name], value) for name, value in given.model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    given = subject()
    given.model.to(dtype)
    found = measured(given)
    same = measured(subject())
    for part in PARTS:
        for site, value in found.of(f"quantisation/{part}-int8-tensor-sqnr").items():
            assert value == pytest.approx(same.of(f"quantisation/{part}-int8-tensor-sqnr")[site], abs=1.5)
