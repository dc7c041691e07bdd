"""`Monitor`: its rows against dense references, what it leaves as it was, faults, a monitor that fails."""

import contextlib
import copy
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import normscope
from normscope.anatomy import capture, read_anatomy
from normscope.errors import UsageError
from normscope.monitor import Monitor, RunReader, forwards
from normscope.monitor import monitor as monitor_module
from normscope.monitor.alarms import is_measured
from normscope.monitor.plan import plan_of
from normscope.monitor.reductions import LARGE, local, norms
from normscope.monitor.sites import _adam_states
from normscope.monitor.turns import TURNS
from normscope.monitor.wrong.held import wrong_in_optimizers
from normscope.probes.sums import rms
from normscope.subjects import call_model, load, untouched
from normscope.subjects.feed import tensors_in

SPECS = (
    "nn:decoder,scheme=pre,depth=3,width=32,heads=2",
    "nn:decoder,scheme=post,depth=2,width=32,heads=2",
    "nn:decoder,scheme=peri,depth=2,width=32,heads=2",
    "nn:decoder,scheme=deepnorm,depth=2,width=32,heads=2",
    "nn:encoder,scheme=post,depth=2,width=32,heads=2",
    "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=64",
    "hf:bert,num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=64",
    "hf:llama,num_hidden_layers=2,hidden_size=32,num_attention_heads=2,num_key_value_heads=2,"
    "intermediate_size=64,vocab_size=64",
    "hf:t5,num_layers=2,d_model=32,num_heads=2,d_ff=64,d_kv=16,vocab_size=64",
)


class Loop:
    """A loop on a subject, with a step that tests may wrap."""

    def __init__(self, spec: str, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        self.subject = load(spec)
        self.model = self.subject.model
        self.model.train()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3, **options)
        self.batches = self.subject.batches()

    def step(self, monitor: Monitor | None = None) -> float:
        loss = self.subject.loss(next(self.batches))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)
        return float(loss.detach())


def stored(path: Path, quantity: str, site: str = "") -> np.ndarray:
    with RunReader(path) as reader:
        return reader.series(quantity, site)[1]


@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_those_of_dense_references(spec: str, tmp_path: Path) -> None:
    loop, path = Loop(spec, torch.optim.SGD), tmp_path / "run.db"
    model = loop.model
    for module in model.modules():  # the reference runs in eval mode
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name in ("attention_dropout", "dropout"):
        for module in model.modules():
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    batch = next(loop.subject.batches())
    plan = plan_of(model, batch)
    anatomy = read_anatomy(model, batch)
    places = {stream.site: stream.place for stream in plan.streams if stream.kind == "stream"}
    with untouched(model):
        model.eval()
        loss, found = capture(model, lambda: loop.subject.loss(batch), places.values())
        loss.backward()
        squares = {
            block: sum(
                float(p.grad.double().square().sum())
                for i, p in enumerate(plan.groups.parameters)
                if plan.groups.blocks[plan.groups._block_of[i]] == block and p.grad is not None
            )
            for block in plan.groups.blocks
        }
        expected = {site: rms(found[place]) for site, place in places.items()}
    with Monitor(model, loop.optimizer, store=path) as monitor:
        loop.batches = iter([batch])
        value = loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    assert len(places) == len(anatomy.blocks) + 2 * len(anatomy.stacks), "every stream has a tap"
    assert stored(path, "loss") == pytest.approx([value])
    assert value == pytest.approx(float(loss.detach()), rel=1e-4)
    for site, figure in expected.items():
        assert stored(path, "stream/rms", site) == pytest.approx([figure], rel=1e-4), site
        largest = float(found[places[site]].detach().abs().max())
        assert stored(path, "stream/max", site) == pytest.approx([largest], rel=1e-4), site
    for block, square in squares.items():
        assert stored(path, "gradient/block", block) == pytest.approx([math.sqrt(square)], rel=1e-4), block
    assert stored(path, "gradient/norm") == pytest.approx([math.sqrt(sum(squares.values()))], rel=1e-4)


def test_updates_and_lag_are_those_of_the_weights(tmp_path: Path) -> None:
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    plan = plan_of(loop.model, loop.subject.batch)
    numbers = [i for i, p in enumerate(plan.groups.parameters) if plan.groups.kind(i) == "feed-forward"]
    parameters = [plan.groups.parameters[i] for i in numbers]
    before = [p.detach().clone() for p in parameters]
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        loop.step(monitor)
    change = math.sqrt(
        sum(float((p.detach() - b).square().sum()) for p, b in zip(parameters, before, strict=True))
    )
    size = math.sqrt(sum(float(b.square().sum()) for b in before))
    assert stored(path, "update/ratio", "feed-forward") == pytest.approx([change / size], rel=5e-2), (
        "a sample"
    )
    assert stored(path, "update/lost", "feed-forward") == pytest.approx([0.0])
    assert stored(path, "adam/lag", "feed-forward") == pytest.approx([1.0], rel=1e-4), "v̂ = g² at step 1"
    after = math.sqrt(sum(float(p.detach().square().sum()) for p in parameters))
    assert stored(path, "weight/norm", "feed-forward") == pytest.approx([after], rel=1e-4)


def test_weights_and_gradients_of_zero_are_no_alarm(tmp_path: Path) -> None:
    loop, path = Loop("nn:decoder,scheme=rezero,depth=2,width=32,heads=2"), tmp_path / "run.db"
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        loop.step(monitor)
    assert not monitor.alarms, "at the start no branch has a gradient, and the scales of the joins are 0"
    assert np.isnan(stored(path, "adam/lag", "attention"))


def test_updates_that_round_to_nothing_are_counted(tmp_path: Path) -> None:
    loop, path = Loop(SPECS[0], torch.optim.SGD), tmp_path / "run.db"
    loop.optimizer.param_groups[0]["lr"] = 1e-30
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        loop.step(monitor)
    assert stored(path, "update/lost", "attention") > 0.9, "all but the biases, which are 0"
    with RunReader(path) as reader:
        assert reader.notes()["facts"]["weights"] == "float32"


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_is_the_same_to_the_bit_with_and_without_a_monitor(spec: str, tmp_path: Path) -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(3)
        loop = Loop(spec)
        monitor = Monitor(loop.model, loop.optimizer, store=tmp_path / "run.db", every=2) if watched else None
        with monitor or contextlib.nullcontext():
            losses = [loop.step(monitor) for _ in range(4)]
        if monitor is not None:
            assert monitor.failure is None, monitor.failure
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.model.modules())
        ends.append((losses, [p.detach().clone() for p in loop.model.parameters()], torch.get_rng_state()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
    assert torch.equal(ends[0][2], ends[1][2])


def wrong_weight(loop: Loop, value: float) -> str:
    weight = next(p for name, p in loop.model.named_parameters() if "blocks.1" in name and p.ndim == 2)
    with torch.no_grad():
        weight[0, 0] = value
    return "blocks.1"


def wrong_activation(loop: Loop, value: float) -> str:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.index_fill(0, torch.tensor(0), value)

    loop.model.blocks[1].feed_forward.register_forward_hook(hook)
    return "blocks.1.feed_forward"


def wrong_gradient(loop: Loop, value: float) -> str:
    def hook(module: nn.Module, given: Any, taken: Any) -> Any:
        return tuple(None if each is None else torch.full_like(each, value) for each in given)

    loop.model.blocks[1].feed_forward.up.register_full_backward_hook(hook)
    return "blocks.1.feed_forward"


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("fault", [wrong_weight, wrong_activation, wrong_gradient])
def test_a_wrong_value_is_an_alarm_at_its_step_with_its_origin(
    fault: Callable[[Loop, float], str], value: float, tmp_path: Path
) -> None:
    loop, path, alarms = Loop(SPECS[0]), tmp_path / "run.db", []
    with Monitor(loop.model, loop.optimizer, store=path, on_alarm=alarms.append) as monitor:
        for _ in range(3):
            loop.step(monitor)
        assert not alarms
        module = fault(loop, value)
        loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    assert alarms
    assert {raised.step for raised in monitor.alarms} == {4}
    with RunReader(path) as reader:
        (event,) = reader.events("first-wrong-value")
        assert [raised.step for raised in reader.alarms()] == [4] * len(alarms)
    assert event.step == 4
    assert event.data["module"].startswith(module) or event.data["tensor"].startswith(module), event.data


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False)


def test_recomputed_blocks_micro_batches_and_evaluations_count_once(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    loop = Loop(SPECS[0], torch.optim.SGD)
    plain = Loop(SPECS[0], torch.optim.SGD)
    first, second = next(loop.batches), next(loop.batches)
    loop.model.blocks[1] = Checkpointed(loop.model.blocks[1])
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        for batch in (first, second):
            (loop.subject.loss(batch) / 2).backward()
        with torch.no_grad():
            loop.subject.loss(first)
        loop.optimizer.step()
        monitor.step(1.0)
    for batch in (first, second):
        (plain.subject.loss(batch) / 2).backward()
    whole = math.sqrt(
        sum(float(p.grad.square().sum()) for p in plain.model.parameters() if p.grad is not None)
    )
    assert stored(path, "gradient/norm") == pytest.approx([whole], rel=1e-4)
    exits = []
    for batch in (first, second):
        with untouched(plain.model):
            place = read_anatomy(plain.model, batch).blocks[0].exit
            _, found = capture(plain.model, lambda b=batch: call_model(plain.model, b), [place])
            exits.append(found[place])
    assert stored(path, "stream/rms", "blocks.0") == pytest.approx([rms(torch.cat(exits))], rel=1e-3)


def test_a_step_without_update_is_noted_as_skipped(tmp_path: Path) -> None:
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        loop.step(monitor)
        monitor.step(loop.subject.loss(next(loop.batches)))
    assert stored(path, "skipped").tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of PyTorch, where it resumes a frame
def test_a_compiled_model_says_which_hooks_did_not_fire() -> None:
    torch.compiler.reset()  # of code that other tests compiled
    loop = Loop(SPECS[0])
    compiled = torch.compile(loop.model, backend="eager")
    with Monitor(compiled, loop.optimizer) as monitor:
        loss = loop.subject.loss_fn(call_model(compiled, loop.subject.batch), loop.subject.batch)
        loss.backward()
        loop.optimizer.step()
        monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    said = " ".join(monitor.notes)
    assert "did not fire" in said


def test_a_monitor_that_fails_does_not_end_the_run(tmp_path: Path, caplog) -> None:
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        loop.step(monitor)
        monitor._instruments._turns.look = None  # type: ignore[assignment]
        losses = [loop.step(monitor) for _ in range(2)]
    assert all(map(math.isfinite, losses))
    assert "not callable" in str(monitor.failure)
    assert "the run goes on" in caplog.text
    with RunReader(path) as reader:
        (event,) = reader.events("monitor-failed")
    assert "not callable" in event.data["error"]


def test_hooks_of_others_survive_a_monitor_that_fails(tmp_path: Path) -> None:
    """A dict of hooks that PyTorch walks through must not change."""
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        loop.optimizer.register_step_pre_hook(lambda *_: None)
        loop.optimizer.register_step_post_hook(lambda *_: None)
        loop.step(monitor)
        monitor._instruments._sites.before_step = None  # type: ignore[assignment]
        monitor._instruments._turns.look = None  # type: ignore[assignment]
        monitor._every = 1
        for _ in range(2):
            loop.step(monitor)
    assert monitor.failure is not None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.model.modules())
    with RunReader(path) as reader:
        assert reader.last_step == 1, "the steps before the failure are stored"
        (rank,) = reader.ranks()
        assert rank.state == "ended", "the run itself has ended well"


def test_gradients_of_the_outputs_are_freed_while_a_loss_is_kept() -> None:
    loop = Loop(SPECS[0])
    with Monitor(loop.model, loop.optimizer) as monitor:
        loss = loop.subject.loss(next(loop.batches))
        loss.backward()
        kept = [weakref.ref(each) for each in monitor._now.forwards._kept[-1].cotangents.values()]
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        monitor.step(loss)
    assert kept
    assert [each() for each in kept] == [None] * len(kept)


def test_weights_that_train_later_are_noted_once(tmp_path: Path) -> None:
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    frozen = dict(loop.model.blocks[0].named_parameters(prefix="blocks.0"))
    for each in frozen.values():
        each.requires_grad_(False)
    with Monitor(loop.model, loop.optimizer, store=path, every=2) as monitor:
        loop.step(monitor)
        before = list(monitor.notes)
        for each in frozen.values():
            each.requires_grad_(True)
        for _ in range(5):
            loop.step(monitor)
    (note,) = [each for each in monitor.notes if each not in before]
    assert note == (
        "weights that train since a later step than the first one are not watched: "
        f"{next(iter(frozen))} and {len(frozen) - 1} more"
    )
    with RunReader(path) as reader:
        assert reader.notes()["notes"] == monitor.notes


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_run_is_kept_after_its_end(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last forward raised in its head, and the step before was not ended."""
    monkeypatch.setattr(monitor_module, "is_on_device", lambda model: True)
    loop, kept = Loop(SPECS[0]), []

    def streams(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        kept.append(weakref.ref(args[0]))
        raise RuntimeError("a head that raises")

    with Monitor(loop.model, loop.optimizer, every=100) as monitor:
        for _ in range(2):
            loop.step(monitor)
        batch = next(loop.batches)
        loss = loop.subject.loss(batch)
        loss.backward()
        kept += [weakref.ref(each) for each in monitor._now.forwards._kept[-1].cotangents.values()]
        monitor._before_update(loop.optimizer, (), {})
        kept += [weakref.ref(each) for each in monitor._weights._kept]
        with loop.model.blocks[-1].register_forward_pre_hook(streams), contextlib.suppress(RuntimeError):
            loop.subject.loss(batch)
        kept += [weakref.ref(each.tensor) for each in monitor._instruments.streams._each._held.values()]
        kept += [weakref.ref(each) for each in tensors_in(monitor._looker._inputs)]
        assert len(kept) > 5
        assert any(each() is not None for each in kept)
        if fails:
            monitor._fail(ValueError("put in"))
    assert [each() for each in kept] == [None] * len(kept)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by dynamo
@pytest.mark.parametrize("part", ["model", "blocks"])
def test_what_is_compiled_in_place_is_watched(part: str, tmp_path: Path) -> None:
    """`module.compile()` of the whole model, or of each block; rows are those of the model as it was."""
    rows = {}
    for kind in ("plain", "compiled"):
        loop, path = Loop(SPECS[0]), tmp_path / f"{kind}.db"
        parts = [loop.model] if part == "model" else list(loop.model.blocks)
        for each in parts if kind == "compiled" else ():
            each.compile(backend="eager")
        before = [each._compiled_call_impl for each in parts]
        with Monitor(loop.model, loop.optimizer, store=path, every=2) as monitor:
            for _ in range(4):
                loop.step(monitor)
        assert monitor.failure is None
        assert [each._compiled_call_impl for each in parts] == before
        with RunReader(path) as reader:
            rows[kind] = reader.table("stream/rms"), reader.table("gradient/norm")
    (steps, sites, values), (_, _, norms) = rows["plain"]
    (same_steps, same_sites, found), (_, _, same_norms) = rows["compiled"]
    np.testing.assert_array_equal(steps, same_steps)
    np.testing.assert_array_equal(norms, same_norms)
    assert sites == same_sites
    borders = [i for i, site in enumerate(sites) if site.startswith("blocks.")]
    seen = borders if part == "blocks" else []
    assert len(borders) == 3
    np.testing.assert_allclose(found[:, seen], values[:, seen], rtol=1e-6)


@pytest.mark.parametrize("kept", [0, forwards.KEPT_BYTES])
def test_the_first_of_two_micro_batches_is_traced(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "KEPT_BYTES", kept)  # at 0 all forwards but the last are dropped
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    good, bad = next(loop.batches), next(loop.batches)
    ids = []
    loop.model.embedding.register_forward_pre_hook(lambda module, args: ids.append(args[0]))
    wrong = next(iter(tensors_in(bad)))

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * (math.nan if torch.equal(ids[-1], wrong) else 1.0)

    loop.model.blocks[0].attention.register_forward_hook(hook)
    with Monitor(loop.model, loop.optimizer, store=path, on_alarm=lambda _: None) as monitor:
        for batch in (bad, good):
            loss = loop.subject.loss(batch)
            loss.backward()
        loop.optimizer.step()
        monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    with RunReader(path) as reader:
        (event,) = reader.events("first-wrong-value")
    assert event.data["module"].startswith("blocks.0.attention"), event.data


def test_wrong_steps_in_a_row_are_traced_once_and_again_after_sound_ones(tmp_path: Path) -> None:
    loop, path = Loop(SPECS[0], torch.optim.SGD), tmp_path / "run.db"
    weights = [p.detach().clone() for p in loop.model.parameters()]
    with Monitor(loop.model, loop.optimizer, store=path, on_alarm=lambda _: None) as monitor:
        for _ in range(2):
            wrong_weight(loop, math.nan)
            for _ in range(5):
                loop.step(monitor)
            with torch.no_grad():
                for p, before in zip(loop.model.parameters(), weights, strict=True):
                    p.copy_(before)
            for _ in range(TURNS):
                loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    with RunReader(path) as reader:
        assert [event.step for event in reader.events("first-wrong-value")] == [1, 6 + TURNS]


def test_what_watch_says_of_a_run_is_noted(tmp_path: Path) -> None:
    loop = Loop(SPECS[0])
    with Monitor(loop.model, loop.optimizer, store=tmp_path / "run.db", every=7, steps=90, entropy=2.5):
        pass
    with RunReader(tmp_path / "run.db") as reader:
        noted = reader.notes()
    assert (noted["every"], noted["steps"], noted["entropy"], noted["model"]) == (7, 90, 2.5, "Decoder")


def test_a_run_that_is_resumed_tests_its_hooks_at_a_step_with_all_figures() -> None:
    loop = Loop(SPECS[0])
    with Monitor(loop.model, loop.optimizer, start=37) as monitor:
        for _ in range(4):
            loop.step(monitor)
    assert (monitor.failure, monitor.notes) == (None, [])


@pytest.mark.parametrize("order", [1, -1])
def test_updates_of_several_optimizers_are_measured_after_all(order: int, tmp_path: Path) -> None:
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    parameters = list(loop.model.parameters())
    pair = [torch.optim.AdamW(part, lr=1e-3) for part in (parameters[::2], parameters[1::2])]
    with Monitor(loop.model, pair[::order], store=path, on_alarm=lambda _: None) as monitor:
        for _ in range(2):
            loss = loop.subject.loss(next(loop.batches))
            loss.backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
            monitor.step(loss)
        state = pair[1].state[parameters[1]]["exp_avg"]
        state.fill_(math.nan)
        loss = loop.subject.loss(next(loop.batches))
        loss.backward()
        parameters[0].grad.fill_(math.nan)
        for optimizer in pair:
            optimizer.step()
        monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    (lost,) = stored(path, "update/lost", "attention").tolist()
    assert lost < 0.01  # a half before the second optimizer's step
    with RunReader(path) as reader:
        (event,) = reader.events("first-wrong-value")
    assert event.data["phase"] == "optimizer state", "that of the second optimizer too"


def test_a_sparse_gradients_rows_are_summed() -> None:
    table = nn.Embedding(4, 6, sparse=True)
    table(torch.tensor([1, 1, 1])).sum().backward()
    assert table.weight.grad is not None
    dense = table.weight.grad.to_dense()
    assert norms([local(table.weight.grad)]) == pytest.approx(float(dense.norm()))


class Blocks(nn.Module):
    """Residual blocks on ids, with a stream that `scale` multiplies at its begin."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(16, 8), 1.0
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scale * self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("case", ["zeros", "zeros in float16", "overflow in float16", "NaN", "empty"])
def test_a_stream_without_entries_or_of_zeros_is_no_wrong_value(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Blocks(), tmp_path / "run.db"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(model, optimizer, store=path, every=1, on_alarm=lambda _: None) as monitor:
        for step in range(2):
            ids = torch.randint(0, 16, (0 if case == "empty" and step else 2, 4))
            if step and case.startswith("zeros"):
                model.scale = 0.0
                for block in model.blocks:
                    nn.init.zeros_(block.down.weight), nn.init.zeros_(block.down.bias)
            if step and case.startswith("overflow"):
                nn.init.constant_(model.blocks[0].down.bias, 1e6)
            if step and case == "NaN":
                model.scale = math.nan
            with torch.autocast("cpu", torch.float16, enabled=case.endswith("float16")):
                loss = model(ids).float().square().sum()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    is_wrong = case.startswith(("NaN", "overflow"))
    assert {alarm.finding.code for alarm in monitor.alarms} == ({"NS801"} if is_wrong else set())
    with RunReader(path) as reader:
        _, sites, values = reader.table("stream/diversity")
        assert len(sites) == 4
        assert is_measured(values).tolist() == [[True] * 4, [is_wrong] * 4]
        if case.endswith("float16"):
            _, sites, values = reader.table("precision/float16-headroom")
            half = is_measured(values)
            assert half[0].any()
            assert half[1].tolist() == (half[0] & is_wrong).tolist()


@pytest.mark.parametrize(
    "pair",
    [
        (torch.bfloat16, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.complex64, torch.float32),
        (torch.complex128, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e5m2, torch.float64),
        (torch.complex128, torch.float64),
    ],
)
def test_norms_of_several_types_are_taken_together(pair: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    numbers = [torch.randn(5, dtype=torch.complex128 if d.is_complex else torch.float64) for d in pair * 2]
    tensors = [each.to(dtype) for each, dtype in zip(numbers, pair * 2, strict=True)]
    wide = [each.to(number.dtype) for each, number in zip(tensors, numbers, strict=True)]
    expected = [math.sqrt(float(each.abs().square().sum())) for each in wide]
    found = norms(tensors)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.dtype == (
        torch.float64 if all(d.to_real() == torch.float64 for d in pair) else torch.float32
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_norms_of_a_compressed_sparse_tensor_are_those_of_its_values() -> None:
    dense = torch.eye(3).mul(2)
    for sparse in (dense.to_sparse_csr(), dense.to_sparse_csc()):
        assert norms([local(sparse)]).tolist() == pytest.approx([math.sqrt(12)])


@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu")])
def test_norms_of_several_devices_come_to_the_cpu(devices: tuple[str, str]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        small = [torch.ones(3, device=device) for device in devices]
        found = norms([torch.ones(LARGE), *small])
    assert found.shape == (3,)
    assert found.device.type == "cpu"


class Prompted(Blocks):
    """A frozen model whose ids a prompt, which is none of its parameters, is added to."""

    def __init__(self, prompt: Tensor) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.prompts = [prompt]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.prompts[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_model_without_a_trained_parameter_is_watched_by_its_streams(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prompt, path = torch.zeros(8, requires_grad=True), tmp_path / "run.db"
    model = Prompted(prompt)
    optimizer = torch.optim.AdamW([prompt], lr=0.1)
    with Monitor(model, optimizer, store=path, every=1) as monitor:
        for _ in range(2):
            loss = model(torch.randint(0, 16, (2, 4))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    assert not monitor.alarms
    with RunReader(path) as reader:
        assert np.isfinite(reader.table("stream/rms")[2]).all()


def test_the_loss_may_be_left_out_or_be_a_number(tmp_path: Path) -> None:
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        for loss in (None, 2.5):
            loop.subject.loss(next(loop.batches)).backward()
            loop.optimizer.step()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    assert np.isnan(stored(path, "loss")[0])
    assert stored(path, "loss")[1] == 2.5
    assert not monitor.alarms, "a loss that was not given is no alarm"


class OwnRates(torch.optim.AdamW):
    """An optimizer that sets its own learning rates, as Adafactor does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 1e-3
        super().step(closure)
        self.param_groups[0]["lr"] = None
        for group in self.param_groups[1:]:
            del group["lr"]


@pytest.mark.parametrize("with_rate", [False, True])
def test_groups_without_a_learning_rate_are_left_out(with_rate: bool, tmp_path: Path) -> None:
    loop, path = Loop(SPECS[0]), tmp_path / "run.db"
    first, second, *rest = list(loop.model.parameters())
    own = OwnRates([{"params": [first]}, {"params": rest}])
    other = torch.optim.SGD([second], lr=0.5)
    optimizers = [own, other] if with_rate else [own]
    with Monitor(loop.model, optimizers, store=path, rescue=normscope.Rescue()) as monitor:
        for _ in range(2):
            loss = loop.subject.loss(next(loop.batches))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    assert not monitor.alarms
    np.testing.assert_array_equal(stored(path, "lr"), [0.5, 0.5] if with_rate else [np.nan, np.nan])
    assert np.isnan(stored(path, "adam/rate", "feed-forward"))
    assert wrong_in_optimizers(loop.model, optimizers, of_wrong=False) is None


def test_an_adam_that_has_not_stepped_has_no_mean_square() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    parameters[0].grad = torch.full((3,), math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert "exp_avg_sq" in optimizer.state[parameters[0]]
    assert _adam_states(parameters, [optimizer]) == [None]


def batches() -> Iterator[Tensor]:
    while True:
        yield torch.randint(0, 16, (2, 8))


def test_a_plain_model_without_a_stream_is_watched_by_its_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, store=tmp_path / "run.db") as monitor:
        for _, ids in zip(range(3), batches(), strict=False):
            loss = cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    assert monitor.notes
    assert np.isfinite(stored(tmp_path / "run.db", "gradient/norm")).all()


def test_the_monitor_is_part_of_the_package() -> None:
    assert normscope.Monitor is Monitor


def test_headroom_is_that_of_the_tensors_that_are_half(tmp_path: Path) -> None:
    loop, path, largest = Loop(SPECS[5], torch.optim.SGD), tmp_path / "run.db", dict[str, float]()

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.dtype == torch.float16:  # the model is read without autocast
            largest["last"] = float(output.detach().abs().max())

    for module in loop.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Monitor(loop.model, loop.optimizer, store=path, scaler=scaler) as monitor:
        loop.model.transformer.h[1].mlp.c_proj.register_forward_hook(hook)
        with torch.autocast("cpu", torch.float16):
            loss = loop.subject.loss(next(loop.batches))
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    with RunReader(path) as reader:
        _, sites, values = reader.table("precision/float16-headroom")
    bits = dict(zip(sites, values[0], strict=True))
    assert bits["transformer.h.1.mlp"] == pytest.approx(math.log2(65504 / largest["last"]), abs=1e-3)
    assert stored(path, "loss-scale").tolist() == [8.0]
    assert math.isnan(bits["transformer.h.1"]), "a stream in float32 has another range"


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "average"])
def test_a_model_may_be_copied_and_saved_while_it_is_watched(how: str, tmp_path: Path) -> None:
    loop = Loop(SPECS[0])
    with Monitor(loop.model, loop.optimizer, store=tmp_path / "run.db") as monitor:
        loop.step(monitor)
        copied = {
            "deepcopy": lambda: copy.deepcopy(loop.model),
            "pickle": lambda: pickle.loads(pickle.dumps(loop.model)),
            "save": lambda: saved_and_loaded(loop.model, tmp_path / "model.pt"),
            "average": lambda: torch.optim.swa_utils.AveragedModel(loop.model).module,
        }[how]()
        call_model(copied, loop.subject.batch)  # the copy is not watched
        loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    with RunReader(tmp_path / "run.db") as reader:
        assert len(set(reader.series("tokens")[1])) == 1


def saved_and_loaded(model: nn.Module, path: Path) -> nn.Module:
    torch.save(model, path)
    return torch.load(path, weights_only=False)


def test_a_monitor_is_used_once_and_alone() -> None:
    loop = Loop(SPECS[0])
    with Monitor(loop.model, loop.optimizer) as monitor:
        loop.step(monitor)
        with pytest.raises(UsageError, match="second Monitor"), Monitor(loop.model, loop.optimizer):
            pass
    with pytest.raises(UsageError, match="has ended"), monitor:
        pass
    with Monitor(loop.model, loop.optimizer) as again:
        loop.step(again)
    assert again.failure is None


@pytest.mark.parametrize("given", [[], "sgd", nn.Linear(2, 2), None])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="optimizer"):
        Monitor(nn.Linear(2, 2), given)


def test_a_forgotten_step_or_context_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(SPECS[0])
    with Monitor(loop.model, loop.optimizer) as monitor:
        loop.step()
    assert "call monitor.step(loss)" in monitor.notes[-1]
    bare = Monitor(loop.model, loop.optimizer)
    loop.step(bare)
    assert "write `with Monitor" in bare.notes[-1]
    assert "call monitor.step(loss)" in caplog.text
