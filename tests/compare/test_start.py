"""Start: the same law is no difference however it is written; another law is one, at its role and depth."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from made import DEPTH, WIDTH, Options, made, place_of
from torch import nn

from normscope.anatomy import Anatomy
from normscope.compare import start
from normscope.compare.align import align
from normscope.compare.draws import Draw, start_of
from normscope.compare.outcome import Outcome
from normscope.compare.start import compare
from normscope.compare.types import Pair

Change = Callable[[nn.Module], None]
SEEDS = range(4)
NOTHING = Anatomy(())


def plainly(model: nn.Module) -> None:
    """GPT-2's law: normal 0.02, biases 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def backwards(model: nn.Module) -> None:
    """The same, drawn in the other order."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def build(way: str, *changes: Change, options: Options | None = None) -> Callable[[int], nn.Module]:
    def made_at(seed: int) -> nn.Module:
        model = made(way, options or Options(), seed)
        for change in changes:
            change(model)
        return model

    return made_at


def rows(a: Callable[[int], nn.Module], b: Callable[[int], nn.Module]) -> Pair:
    return align(place_of(a(0)), place_of(b(0)))


def outcome(a: Callable[[int], nn.Module], b: Callable[[int], nn.Module], b_seeds: range = SEEDS) -> Outcome:
    return compare(start_of(a, NOTHING, SEEDS), start_of(b, NOTHING, b_seeds), rows(a, b))


@pytest.mark.parametrize("way", ["plain", "fused", "flat"])
@pytest.mark.parametrize("other", [plainly, backwards])
def test_one_law_is_no_difference(way: str, other: Change) -> None:
    found = outcome(build("plain", plainly), build(way, other), range(100, 104))
    assert found.differences == (), [each.message for each in found.differences]
    assert found.compared.how == "whole"
    assert found.compared.figures["roles"] >= 12


def test_a_law_and_itself_at_forty_pairs_of_seeds_do_not_differ() -> None:
    a = build("plain", plainly)
    aligned = rows(a, a)
    starts = [start_of(a, NOTHING, range(4 * n, 4 * n + 4)) for n in range(41)]
    for x, y in itertools.pairwise(starts):
        assert compare(x, y, aligned).differences == ()


def copied(model: nn.Module) -> None:
    """The law of `nn.TransformerEncoder`: all layers are copies of the first one."""
    layers = model.get_submodule("layers")
    for layer in layers.children():
        layer.load_state_dict(next(layers.children()).state_dict())


def test_copied_layers_are_no_further_evidence() -> None:
    built = build("plain", plainly, copied, options=Options(depth=8))
    drawn = [start_of(built, NOTHING, range(4 * n, 4 * n + 4)) for n in range(10)]
    pair = rows(built, built)
    for one, other in itertools.pairwise(drawn):
        found = compare(one, other, pair).differences
        assert found == (), [each.message for each in found]


@pytest.mark.parametrize("number", [3, 4, 8, 30, 1000])
@pytest.mark.parametrize("uniform", [False, True])
def test_errors_of_few_values_hold_the_rate(
    number: int, uniform: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At three standard errors, 0.27 % of the pairs of one law may be beyond; twice that is allowed here."""
    monkeypatch.setattr(start, "SIGMAS", 3.0)
    monkeypatch.setattr(start, "LEAST_MEAN", 0.0)
    torch.manual_seed(0)
    pairs, apart, off = 4000, 0, 0
    for _ in range(pairs):
        a, b = (drawn_of(torch.rand(number) if uniform else torch.randn(number)) for _ in range(2))
        group = start._Group(("", ""), ("", ""), (0.0, 0.0), a, b)
        ratio, error = start._log_ratio(group)
        apart += abs(ratio) > 3 * error
        off += start._mean_differs(group)
    assert apart <= 2 * 0.0027 * pairs
    assert off <= 2 * 0.0027 * pairs


def drawn_of(values: torch.Tensor) -> Draw:
    """Values of a parameter at one seed."""
    x = values.double()
    sums = tuple(float((x**k).sum()) for k in (1, 2, 3, 4))
    low, high = float(x.min()), float(x.max())
    return Draw(len(x), sums, low, high, 0, None, values, False)  # type: ignore[arg-type]


def test_default_laws_of_pytorch_fused_and_apart() -> None:
    """nn.Linear draws by its inputs alone, so fusing q, k and v changes nothing."""
    aligned = rows(build("plain"), build("fused"))
    for first in range(0, 80, 8):
        a = start_of(build("plain"), NOTHING, range(first, first + 4))
        b = start_of(build("fused"), NOTHING, range(first + 4, first + 8))
        assert compare(a, b, aligned).differences == ()


def scaled(role: str, factor: float) -> Change:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if role in name and parameter.dim() > 1:
                    parameter.mul_(factor)

    return change


def test_another_deviation_is_one_difference_with_all_its_sites() -> None:
    found = outcome(build("plain", plainly), build("plain", plainly, scaled("attn.out", 0.5)))
    (each,) = found.differences
    assert each.name == "init-scale"
    assert each.sites == tuple((f"layers.{n}.attn", f"layers.{n}.attn") for n in range(DEPTH))
    assert each.a == pytest.approx(0.02, rel=0.05)
    assert each.b == pytest.approx(0.01, rel=0.05)


def test_a_scale_by_depth_is_named_so() -> None:
    def by_depth(model: nn.Module) -> None:
        for n in range(DEPTH):
            scaled(f"layers.{n}.mlp.down", 1 / math.sqrt(2 * (n + 1)))(model)

    (each,) = outcome(build("plain", plainly), build("plain", plainly, by_depth)).differences
    assert each.name == "init-depth"
    assert len(each.b) == DEPTH
    assert each.b[0] > each.b[1] > each.b[2]


def test_roles_with_the_same_difference_are_one() -> None:
    def uniformly(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.uniform_(parameter, -0.02 * math.sqrt(3), 0.02 * math.sqrt(3))

    (each,) = outcome(build("plain", plainly), build("plain", plainly, uniformly)).differences
    assert (each.name, each.a, each.b) == ("init-law", "normal", "uniform")
    assert len(each.sites) == 1 + 2 * DEPTH
    assert each.message.startswith(
        "The law of the fresh weights of token embeddings; fresh weights of position"
    )
    assert each.message.endswith(" is normal in A and uniform in B.")


def test_one_layer_only() -> None:
    (each,) = outcome(
        build("plain", plainly), build("plain", plainly, scaled("layers.1.mlp.up", 2.0))
    ).differences
    assert each.sites == (("layers.1.mlp", "layers.1.mlp"),)


def drawn(role: str, law: Callable[[torch.Tensor], object]) -> Change:
    def change(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if role in name and parameter.dim() > 1:
                law(parameter.data)

    return change


@pytest.mark.parametrize(
    ("law", "words"),
    [
        (lambda w: nn.init.uniform_(w, -0.02 * math.sqrt(3), 0.02 * math.sqrt(3)), "uniform"),
        (
            lambda w: nn.init.trunc_normal_(w, std=0.02 / 0.88, a=-0.04 / 0.88, b=0.04 / 0.88),
            "truncated normal",
        ),
        (lambda w: nn.init.orthogonal_(w, gain=0.02 * math.sqrt(WIDTH)), "orthogonal"),
        (nn.init.zeros_, "constant 0"),
    ],
)
def test_another_law_of_the_same_deviation(law: Callable[[torch.Tensor], object], words: str) -> None:
    found = outcome(build("plain", plainly), build("plain", plainly, drawn("attn.out", law))).differences
    each = found[0]
    assert (each.name, each.a, each.b) == ("init-law", "normal", words)
    assert len(each.sites) == DEPTH
    assert {d.name for d in found} <= {"init-law", "init-scale"}


def test_gains_that_start_elsewhere() -> None:
    def zero_gains(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.weight)

    found = outcome(build("plain", plainly), build("plain", plainly, zero_gains)).differences
    assert {each.name for each in found} == {"init-mean"}
    assert {(each.a, each.b) for each in found} == {(1.0, 0.0)}


def test_a_padding_row_of_zeros() -> None:
    def padded(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("tokens.weight")[0] = 0

    (each,) = outcome(build("plain", plainly), build("plain", plainly, padded)).differences
    assert (each.name, each.a, each.b) == ("init-zeros", 0, 1)


def test_given_weights_beside_drawn_ones_are_not_compared() -> None:
    fresh = build("plain", plainly)
    found = outcome(fresh, lambda seed: fresh(7))
    assert found.compared.how == "not"
    assert "the weights of B are the same at every seed" in found.compared.why[0]
    both = outcome(lambda seed: fresh(3), lambda seed: fresh(7))
    assert (both.compared.how, both.differences) == ("not", ())
    assert "the weights of A and of B" in both.compared.why[0]


def test_one_weight_that_was_lost_leaves_the_others_given() -> None:
    fresh = build("plain", plainly)

    def with_a_lost_weight(seed: int) -> nn.Module:
        model, other = fresh(7), fresh(seed)
        model.get_submodule("layers.0.mlp.up").load_state_dict(
            other.get_submodule("layers.0.mlp.up").state_dict()
        )
        return model

    assert outcome(with_a_lost_weight, fresh).compared.how == "not"
