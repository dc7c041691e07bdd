"""Attention figures of a run: against a dense reference, and what the run keeps."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from attentions import (
    BATCH,
    GROUPS,
    HEADS,
    TOKENS,
    Decoder,
    SelfAttention,
    additive,
    batches,
    bidirectional,
    boolean,
    by_group,
    causal,
    decoder,
    eager,
    earlier,
    exact_logits,
    flat,
    grouped,
    loss_of,
)
from test_monitor import SPECS, Loop
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from normscope.anatomy import Anatomy, capture, measuring, read_anatomy
from normscope.anatomy.ops import FUSED_ATTENTION
from normscope.monitor import Monitor
from normscope.monitor.alarms import is_measured
from normscope.monitor.logits import num_heads, sample, tallies
from normscope.subjects import call_model

Figures = dict[tuple[str, str], float]


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_p", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def dense(logits: Tensor) -> tuple[float, float]:
    """Largest |logit| and mean entropy over log(visible) of queries (…, S), by brute force in float64."""
    largest, entropies = 0.0, []
    for row in logits.double().flatten(0, -2):
        seen = row[row > -1e4]
        if len(seen):
            largest = max(largest, float(seen.abs().max()))
        if len(seen) > 1:
            p = torch.softmax(seen, 0)
            entropies.append(float(-(p * p.log()).sum() / np.log(len(seen))))
    return largest, float(np.mean(entropies))


def reference(model: nn.Module, anatomy: Anatomy, batch: Any) -> Figures:
    """Figures of a sample of two sequences and 8 queries, from logits that a dispatch mode captures."""
    sites = {b.site: b.attention[0].logits for b in anatomy.branches if b.attention}
    with measuring(model):
        _, found = capture(model, lambda: call_model(model, batch), sites.values())
    expected: Figures = {}
    for site, place in sites.items():
        logits = found[place].detach()
        sequences = [0, len(logits) // 2] if len(logits) > 1 else [0]
        tokens = logits.shape[2]
        step = max(1, tokens // 8)
        queries = [t for t in range(tokens) if (tokens - 1 - t) % step == 0][-8:]
        sample = logits[sequences][:, :, queries]
        expected["attention/max-logit", site], expected["attention/entropy", site] = dense(sample)
        for head in range(logits.shape[1]):
            each = f"{site}.head{head}"
            one = dense(sample[:, head])
            expected["attention/head-max-logit", each], expected["attention/head-entropy", each] = one
    return expected


def measured(loop: Loop, steps: int = 1, **options: Any) -> Figures:
    """Attention figures of the last step with all figures."""
    rows: list[Figures] = []
    with Monitor(loop.model, loop.optimizer, on_alarm=lambda _: None, **options) as monitor:
        feed = monitor._journal.judges.feed

        def heard(step: int, layout: Any, values: Any) -> Any:
            if any(quantity.startswith("attention/") for quantity, _ in layout):
                rows.append(dict(zip(layout, values, strict=True)))
            return feed(step, layout, values)

        monitor._journal.judges.feed = heard  # type: ignore[method-assign]
        for _ in range(steps):
            loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    return {key: value for key, value in rows[-1].items() if key[0].startswith("attention/")}


EAGER = tuple(
    f"{spec},_attn_implementation=eager" for spec in SPECS if spec[:6] in ("hf:gpt", "hf:ber", "hf:lla")
)
MORE = (
    "nn:decoder,scheme=pre,depth=2,width=32,heads=4,kv_heads=2,qk_norm=head",
    "nn:decoder,scheme=pre,depth=2,width=32,heads=2,softcap=5.0",
    "nn:encoder-decoder,depth=2,width=32,heads=2",
)


@pytest.mark.parametrize("spec", [*SPECS, *EAGER, *MORE])
def test_figures_are_those_of_the_dense_reference(spec: str) -> None:
    loop = Loop(spec, torch.optim.SGD)
    without_dropout(loop.model)
    batch = next(loop.batches)
    loop.batches = iter([batch])
    expected = reference(loop.model, read_anatomy(loop.model, batch), batch)
    found = measured(loop)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-5)


WAYS = {
    "causal": (causal, 0.0, HEADS),
    "dropout": (causal, 0.3, HEADS),
    "grouped": (grouped, 0.0, GROUPS),
    "grouped-dropout": (grouped, 0.3, GROUPS),
    "bidirectional": (bidirectional, 0.0, HEADS),
    "boolean": (boolean, 0.0, HEADS),
    "boolean-dropout": (boolean, 0.3, HEADS),
    "additive": (additive, 0.0, HEADS),
    "eager": (eager, 0.0, GROUPS),
    "eager-dropout": (eager, 0.3, HEADS),
    "by-group": (by_group, 0.0, GROUPS),
    "flat": (flat, 0.0, HEADS),
}


class Plain:
    """A loop on a model, with a step for `measured`."""

    def __init__(self, model: nn.Module, called: Any = None) -> None:
        self.model, self.called = model, model if called is None else called
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.ids = batches()

    def step(self, monitor: Monitor | None = None) -> None:
        loss = loss_of(self.called, self.ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)


def by_hand(model: Decoder) -> Figures:
    """Figures of the sample, from the logits that the model's own attentions keep in float64."""
    for block in model.blocks:
        block.attention.seen = []
    with torch.no_grad():
        model(batches())
    expected: Figures = {}
    for number, block in enumerate(model.blocks):
        sample = block.attention.seen[0][[0, 2]][:, :, 2::3]
        block.attention.seen = None
        site = f"blocks.{number}.attention"
        expected["attention/max-logit", site], expected["attention/entropy", site] = dense(sample)
        for head in range(HEADS):
            one = dense(sample[:, head])
            expected["attention/head-max-logit", f"{site}.head{head}"] = one[0]
            expected["attention/head-entropy", f"{site}.head{head}"] = one[1]
    return expected


DTYPES = [
    *((way, torch.float32) for way in WAYS),
    *((way, torch.bfloat16) for way in WAYS),
    *(
        (way, dtype)
        for way in ("grouped", "additive", "eager-dropout")
        for dtype in (torch.float64, torch.float16, "autocast")
    ),
]


@pytest.mark.parametrize(("way", "dtype"), DTYPES)
def test_every_way_to_write_an_attention_is_measured(way: str, dtype: Any) -> None:
    attend, p, groups = WAYS[way]
    model = decoder(attend, p, groups)
    model.to(torch.float32 if dtype == "autocast" else dtype)
    expected = by_hand(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        found = measured(Plain(model))
    assert found.keys() == expected.keys()
    assert all(value < 0.99 for (quantity, _), value in expected.items() if quantity == "attention/entropy")
    bound = {torch.float32: 1e-5, torch.float64: 1e-6}.get(dtype, 2e-2)
    assert found == pytest.approx(expected, rel=bound)


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, or blocks of `nn.MultiheadAttention` that return their weights."""

    def __init__(self, with_weights: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        layers = [nn.TransformerEncoderLayer(32, HEADS, 64, 0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 16)
        self.with_weights = with_weights

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            if self.with_weights:
                x = layer.norm1(x + layer.self_attn(x, x, x, need_weights=True)[0])
                x = layer.norm2(x + layer._ff_block(x))
            else:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("with_weights", [False, True])
def test_multihead_attention_of_torch_is_measured(with_weights: bool) -> None:
    torch.manual_seed(0)
    model = Encoder(with_weights)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight.mul_(3)
    expected: dict[str, tuple[float, float]] = {}
    x = model.embedding(batches())
    for number, layer in enumerate(model.layers):
        q, k, _ = (x @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias).chunk(3, -1)
        q, k = (t.detach().double().unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k))
        sample = (q @ k.mT / q.shape[-1] ** 0.5)[[0, 2]][:, :, 2::3]
        for head in range(HEADS):
            expected[f"{number}.head{head}"] = dense(sample[:, head])
        x = layer(x)
    found = measured(Plain(model))
    assert len(found) == 4 + 4 * HEADS
    for site, figures in expected.items():
        names = ("attention/head-max-logit", "attention/head-entropy")
        path, _, head = site.partition(".")
        got = [found[name, f"layers.{path}.self_attn.{head}"] for name in names]
        assert got == pytest.approx(figures, rel=1e-4)


def state_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_keeps_its_bits_and_its_random_numbers(way: str) -> None:
    ends = []
    for watched in (False, True):
        loop = Plain(decoder(*WAYS[way]))
        torch.manual_seed(3)
        if watched:
            measured(loop, steps=3, every=1)
        else:
            for _ in range(3):
                loop.step()
        ends.append((state_of(loop.model), torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_attentions_count_once(use_reentrant: bool) -> None:
    expected = by_hand(decoder(eager))
    model = decoder(eager)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=use_reentrant)
    loop = Plain(model)
    calls = []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda *_: calls.append(_get_current_dispatch_mode()))
    found = measured(loop)
    assert found == pytest.approx(expected, rel=1e-5)
    trained = calls[-4:]
    assert len(calls) >= 4
    assert trained == [None] * 4, "the mode is left before other hooks run, and in the backward it is off"


def test_a_mode_of_the_script_does_not_see_the_measurements() -> None:
    counts = []
    for every in (1, 3):
        loop = Plain(decoder(grouped, 0.0, GROUPS))
        with Monitor(loop.model, loop.optimizer, every=every, on_alarm=lambda _: None) as monitor:
            loop.step(monitor)  # reads the model
            with FlopCounterMode(display=False) as mode:
                loop.step(monitor)
        counts.append(mode.get_total_flops())
    assert counts[0] == counts[1] > 0, "the second step has attention figures, or has none"


def test_a_mode_that_a_hook_enters_is_left_to_that_hook() -> None:
    loop = Plain(decoder(causal))
    inner = FlopCounterMode(display=False)
    with Monitor(loop.model, loop.optimizer, every=1, on_alarm=lambda _: None) as monitor:
        loop.step(monitor)
        attention = loop.model.blocks[1].attention
        attention.register_forward_pre_hook(lambda *_: inner.__enter__() and None)
        attention.register_forward_hook(lambda *_: inner.__exit__(None, None, None))
        loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    assert inner.get_total_flops() > 0
    assert _get_current_dispatch_mode() is None


class Idle(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Around(SelfAttention):
    """An attention with a mode around its last projection, or around that and its logits."""

    def __init__(self, is_long: bool) -> None:
        super().__init__(causal, 0.0, HEADS)
        self.is_long, self.after = is_long, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k))
        if self.seen is not None:
            self.seen.append(exact_logits(causal, q.detach(), k.detach()))
        with Idle():
            v = self.v(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            out = causal(q, k, v, 0.0) if self.is_long else v
        self.after.append(_get_current_dispatch_mode())
        out = out if self.is_long else causal(q, k, v, 0.0)
        return self.o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_long", [False, True])
def test_a_mode_that_an_attention_opens_around_a_child_ends_where_it_says(is_long: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(lambda: Around(is_long))
    expected = by_hand(model)
    found = measured(Plain(model))
    assert not [mode for block in model.blocks for mode in block.attention.after if isinstance(mode, Idle)]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_forward_that_raises_leaves_no_mode_behind() -> None:
    loop = Plain(decoder(causal))
    handle = None

    def fail(*_: Any) -> None:
        raise ValueError("of the model")

    with Monitor(loop.model, loop.optimizer, every=1, on_alarm=lambda _: None) as monitor:
        loop.step(monitor)
        handle = loop.model.blocks[1].attention.o.register_forward_hook(fail)
        with pytest.raises(ValueError, match="of the model"):
            loop.step(monitor)
        assert _get_current_dispatch_mode() is None
        handle.remove()
        loop.step(monitor)
    assert monitor.failure is None, monitor.failure


def test_an_error_of_the_measurement_ends_the_monitor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Plain(decoder(causal))
    with Monitor(loop.model, loop.optimizer, every=1, on_alarm=lambda _: None) as monitor:
        loop.step(monitor)
        monkeypatch.setattr("normscope.monitor.attention.sample", None)
        loop.step(monitor)
    assert "not callable" in str(monitor.failure)
    assert _get_current_dispatch_mode() is None


def test_nan_and_infinity_are_no_masked_logits() -> None:
    model = decoder(causal)
    with torch.no_grad():
        model.blocks[1].attention.q.bias[0] = math.nan
    with Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), on_alarm=lambda _: None) as monitor:
        loss_of(model, batches())
        watch = monitor._instruments._attention
        found = dict(zip(watch.layout, watch.values(), strict=True))
    sites = ["blocks.1.attention", "blocks.1.attention.head0"]
    for (_, site), value in found.items():
        assert math.isnan(value) == (site in sites), site
        assert is_measured(np.array([value])).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_code_inside_an_attention_stays_compiled() -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = decoder(torch.compile(causal, backend=backend))
    found = measured(Plain(model), steps=3, every=2)
    assert len(graphs) == 1, "compiled once, though its first call is under the mode"
    assert np.isfinite(list(found.values())).all(), "this backend runs the operations of PyTorch"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_stays_as_it_is_and_its_attentions_are_named_as_unseen() -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = decoder(causal)
    loop = Plain(model, torch.compile(model, backend=backend))
    with Monitor(loop.called, loop.optimizer, every=2, on_alarm=lambda _: None) as monitor:
        for _ in range(3):
            loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    assert len(graphs) == 1, "hooks that come and go would have it compiled again"
    assert "the attention figures of these branches" in " ".join(monitor.notes)


@pytest.mark.parametrize("doubles_in", [80, math.inf])
def test_logits_that_grow_are_an_alarm_of_their_branches_soon_after_100(doubles_in: float) -> None:
    torch.manual_seed(0)
    loop = Plain(Decoder(lambda: SelfAttention(grouped, 0.0, GROUPS)))
    with Monitor(loop.model, loop.optimizer, on_alarm=lambda _: None) as monitor:
        for _ in range(560):
            loop.step(monitor)
            with torch.no_grad():
                for block in loop.model.blocks:
                    block.attention.q.weight.mul_(2 ** (1 / doubles_in))
    assert monitor.failure is None, monitor.failure
    found = [each for each in monitor.alarms if each.finding.evidence[0].quantity != "weight/norm"]
    if doubles_in == math.inf:
        assert found == []
        return
    assert found[0].finding.code == "NS807"
    found = [each for each in found if each.finding.code != "NS819"]  # the end of the same growth
    assert {each.finding.code for each in found} == {"NS807"}
    assert {row.quantity for each in found for row in each.finding.evidence} == {"attention/max-logit"}
    sites = {site for each in found for site in each.finding.sites}
    assert sites <= {"blocks.0.attention", "blocks.1.attention"}, "heads raise no alarms of their own"
    assert 100 < found[0].finding.evidence[0].value < 120


def arguments(func: Any, values: dict[str, Any]) -> list[Any]:
    """Arguments of an op by the names of its schema, up to its keyword-only ones."""
    names = [each.name for each in func._schema.arguments if not each.kwarg_only]
    return [values.get(name, False if name == "is_causal" else None) for name in names]


@pytest.mark.parametrize("name", sorted(FUSED_ATTENTION))
def test_fused_attentions_of_other_devices_are_read_by_their_schemas(name: str) -> None:
    """The op itself is not run; the kernels of GPUs cannot run here."""
    func = getattr(torch.ops.aten, name).default
    q, k = (torch.randn(BATCH, heads, TOKENS, 8) for heads in (HEADS, GROUPS))
    mask = torch.randn(1, HEADS, TOKENS, TOKENS)
    values = {"query": q, "key": k, "value": k, "is_causal": True}
    if any(each.name == "attn_bias" for each in func._schema.arguments):
        values |= {"attn_bias": mask, "is_causal": False}
    logits = (q @ k.repeat_interleave(HEADS // GROUPS, dim=1).mT) * 0.3
    logits = logits + mask if "attn_bias" in values else logits.masked_fill(~earlier(), -math.inf)
    taken = sample(func, arguments(func, values), {"scale": 0.3}, 1)
    assert taken is not None
    assert num_heads(func, arguments(func, values), {"scale": 0.3}, 1) == HEADS
    (found,) = tallies([taken])
    expected = [dense(logits[[0, 2]][:, head, 2::3]) for head in range(HEADS)]
    assert found[0].tolist() == pytest.approx([largest for largest, _ in expected], rel=1e-5)
    assert (found[1] / found[2]).tolist() == pytest.approx([entropy for _, entropy in expected], rel=1e-5)


def test_a_mode_is_on_from_the_last_projection_to_the_end_only() -> None:
    """Each operation under a mode costs time: here the projections, the heads and the output are none."""
    loop = Plain(decoder(causal))
    seen: list[str] = []
    with Monitor(loop.model, loop.optimizer, every=1, on_alarm=lambda _: None) as monitor:
        loop.step(monitor)
        for block in loop.model.blocks:
            for name in ("q", "k", "v", "o"):
                child = getattr(block.attention, name)
                child.register_forward_pre_hook(
                    lambda *_, name=name: seen.append(name) if _get_current_dispatch_mode() else None
                )
        loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    assert seen == ["o", "o"]
