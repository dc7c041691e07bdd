"""A plan counts bytes that are saved, moments of the backward pass, work, and parts of a peak."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import normscope
from normscope.anatomy import Anatomy
from normscope.cli.main import run
from normscope.errors import UsageError
from normscope.planning import Held, Work, in_words, parse_bytes, plan, recompute
from normscope.planning.choosing import Moments, Option, cheapest, options_of
from normscope.planning.making import with_loss
from normscope.planning.saved import Saved
from normscope.planning.search import measured, moments_of
from normscope.planning.stand_in import fake_stand_in, with_sequences
from normscope.planning.step import Step, makes
from normscope.planning.tracker import ROUND, Storage, Tracker
from normscope.planning.units import Group, Unit, groups_of
from normscope.planning.words import ON_CPU
from normscope.planning.work import CALL, INTENSITY, _grouped
from normscope.subjects import make_subject

SPEC = "nn:decoder,depth=2,width=64,heads=2"
BLOCK, ONE, TWO = Unit("b", "block"), Unit("b.one", "attention"), Unit("b.two", "feed-forward")
GROUP = Group(BLOCK, (ONE, TWO))
LINEAR = (64 * 64 + 64) * 4
"""Bytes of the weights of one of the blocks below."""
STATE = 32 * 64 * 4
"""Bytes of the input of one."""


def linears() -> nn.Module:
    """A map into the width, and three blocks that save their input alone."""
    return nn.Sequential(nn.Linear(8, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))


def saved_by(**bytes_of: int) -> Saved:
    """A record in which part one ran twice, with storages of these bytes: of the block, and of its parts."""
    saved = Saved()
    for number, (name, place) in enumerate((("block", BLOCK), ("one", ONE), ("two", TWO))):
        saved.storages[number] = Storage(number, bytes_of[name], Held.BLOCKS)
        saved.place[number] = place
        saved.savers[number].append((BLOCK,) if place is BLOCK else (BLOCK, place))
    saved.calls.update({BLOCK: 1, ONE: 2, TWO: 1})
    saved.work.update({BLOCK: Work(10), ONE: Work(3), TWO: Work(4)})
    return saved


def test_what_a_block_takes_at_its_moment() -> None:
    """It is the bytes that stay, and the largest part that runs again, one call at a time."""
    options = options_of(GROUP, saved_by(block=40, one=100, two=60))
    assert options == (
        Option((), 200, 200, 0),
        Option((ONE,), 100, 150, 3),
        Option((ONE, TWO), 40, 100, 7),
        Option((BLOCK,), 0, 200, 10),
        Option((BLOCK, ONE), 0, 150, 13),
        Option((BLOCK, ONE, TWO), 0, 100, 17),
    )


def test_kept_bytes_are_rounded_up() -> None:
    """Rounded down, what 21 blocks keep would fit by a choice that takes more than the room."""
    room, kept = 200_000, 9599
    moments = Moments(((Option((), kept, 0, 0.0), Option((BLOCK,), 0, 0, 1.0)),) * 21, (0,) * 21, 0, 0)
    assert 21 * kept > room
    chosen = cheapest(moments, room)
    assert chosen is not None
    assert sum(option.kept for option in chosen) <= room


def test_a_storage_that_two_parts_save_is_freed_with_both() -> None:
    saved = saved_by(block=40, one=100, two=60)
    saved.savers[1].append((BLOCK, TWO))
    assert [saved.freed_by(units, [1]) for units in ((ONE,), (TWO,), (ONE, TWO), (BLOCK,))] == [
        0,
        0,
        100,
        100,
    ]
    assert saved.places_freed_by(frozenset(["b.one"])) == set()
    assert saved.places_freed_by(frozenset(["b.one", "b.two"])) == {ONE, TWO}
    assert saved.places_freed_by(frozenset(["b"])) == {BLOCK, ONE, TWO}


def test_rows_are_the_parts_of_the_blocks() -> None:
    kinds = {row.kind for row in plan(SPEC).rows}
    assert kinds == {"attention", "feed-forward", "other", "outside"}


def test_what_is_saved_is_no_weight_and_no_batch() -> None:
    rows = plan(linears(), batch=torch.randn(32, 8)).rows
    blocks = {row.path: row.saved for row in rows if row.kind == "block"}
    assert blocks == {"1.0": STATE, "1.1": STATE, "1.2": STATE}
    assert not any(row.path == "before the blocks" for row in rows)


class Twice(nn.Module):
    """Two blocks, of which the first is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.blocks[1](self.blocks[0](x_BD)))


@contextlib.contextmanager
def recorded(model: nn.Module, batch: torch.Tensor) -> Any:
    """(step, groups, saved) of a model on fake tensors."""
    with fake_stand_in(with_loss(make_subject(model, batch))) as fake:
        groups = groups_of(fake.model, Anatomy(()))
        step = Step(fake, makes("sgd"), "float32")
        yield step, groups, step.record(groups)


def test_a_unit_that_is_called_twice_costs_two_runs() -> None:
    with recorded(Twice(), torch.randn(32, 64)) as (_, groups, saved):
        twice, once = (saved.work[group.block] for group in groups)
    assert once.flops > 0
    assert (twice.flops, twice.written) == (2 * once.flops, 2 * once.written)


def test_gradients_before_a_block_are_those_of_what_follows() -> None:
    with recorded(linears(), torch.randn(32, 8)) as (step, groups, saved):
        moments = moments_of(step, groups, saved, step.measure(groups))
    assert moments.gradients == (2 * LINEAR, LINEAR, 0)


def test_the_moment_of_the_loss_is_the_peak_without_recomputation() -> None:
    with recorded(linears(), torch.randn(512, 8)) as (step, groups, saved):
        base = step.measure(groups)
        moments = moments_of(step, groups, saved, base)
    kept = moments.before + sum(menu[0].kept for menu in moments.menus)
    assert kept > 0
    assert kept + moments.loss + sum(base.stays.values()) == base.peak


def test_states_of_the_random_generator_count() -> None:
    """Each second run on a CPU keeps one, which no operation shows."""
    with recorded(linears(), torch.randn(32, 8)) as (step, groups, saved):
        paths = ["1.0", "1.2"]
        with recompute(step.subject.model, paths):
            seen = step.measure(groups)
        found = measured(step, groups, saved, paths).footprint
    assert found.peak - seen.peak == 2 * torch.get_rng_state().nbytes
    assert sum(found.at_peak.values()) == found.peak


@pytest.mark.parametrize(
    ("spec", "options", "moment"),
    [
        (SPEC, {}, "backward"),
        ("nn:decoder,depth=2,width=256,heads=2", {"batch_size": 1, "seq_len": 8}, "optimizer step"),
    ],
)
def test_parts_of_a_peak_are_its_sum(spec: str, options: dict[str, Any], moment: str) -> None:
    made = plan(spec, optimizer="muon", **options).before
    assert made.moment == moment
    assert sum(made.at_peak.values()) == made.peak
    assert Held.GRADIENTS not in made.stays
    if moment == "optimizer step":
        assert made.at_peak[Held.GRADIENTS] == made.at_peak[Held.PARAMETERS]


def test_gradients_count_among_what_no_choice_changes() -> None:
    stays = plan(SPEC).before.stays
    with pytest.raises(UsageError, match="which weights, gradients and optimizer state take"):
        plan(SPEC, sum(stays.values()) + stays[Held.PARAMETERS] // 2)


def test_weights_that_are_frozen_have_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4))
    model[0].requires_grad_(False)
    batch = torch.randn(2, 512)
    peak = plan(model, batch=batch).peak
    assert plan(model, peak, batch=batch).peak == peak


def test_a_refusal_names_the_largest_parts() -> None:
    stays = plan(SPEC).before.stays
    with pytest.raises(UsageError, match="lowest peak: ") as caught:
        plan(SPEC, sum(stays.values()) + stays[Held.PARAMETERS] + 1000)
    parts = caught.value.given.partition("lowest peak: ")[2].removesuffix(")").split(", ")[:2]
    sizes = [parse_bytes(" ".join(part.split()[:2])) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert "optimizer state" in parts[0]


class Notes(nn.Module):
    """A map that notes the dtype of its output."""

    seen: set[torch.dtype] = set()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        y_BD = self.map(x_BD)
        self.seen.add(y_BD.dtype)
        return y_BD


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_each_precision_is_that_of_autocast(precision: str) -> None:
    Notes.seen.clear()
    plan(Notes(), batch=torch.randn(2, 4), precision=precision)
    assert getattr(torch, precision) in Notes.seen
    assert Notes.seen <= {torch.float32, getattr(torch, precision)}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_may_be_made_without_gradients(mode: Any) -> None:
    peak, model, batch = plan(SPEC).peak, linears(), torch.randn(32, 8)
    with mode():
        assert plan(SPEC).peak == peak
        assert plan(model, batch=batch).tensors == "fake"


def test_a_step_switches_gradients_on() -> None:
    with recorded(linears(), torch.randn(32, 8)) as (step, groups, _):
        peak = step.measure(groups).peak
        with torch.no_grad():
            assert step.measure(groups).peak == peak


def test_a_model_in_evaluation_is_planned_as_it_trains() -> None:
    """With the masks of its dropout; it stays in evaluation."""
    subject = normscope.load(f"{SPEC},dropout=0.1")
    subject.model.train()
    peak = plan(subject).peak
    subject.model.eval()
    assert plan(subject).peak == peak
    assert not subject.model.training


def test_storages_are_rounded_as_the_allocator_of_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROUND == {"cuda": 512}
    monkeypatch.setitem(ROUND, "cpu", 512)
    with Tracker() as tracker:
        kept = [torch.empty(1), torch.empty(128), torch.empty(129)]
    assert len(kept) == 3
    assert tracker.peak == 512 + 512 + 1024


@pytest.mark.parametrize("again", [True, False])
def test_a_sum_in_a_second_run_is_a_new_tensor(again: bool) -> None:
    """Autograd adds gradients in place, which a second forward does not do."""
    tracker = Tracker()
    tracker.phase = Held.BACKWARD
    with tracker, torch.set_grad_enabled(again):
        x = torch.ones(1000)
        x = x + 1
    assert tracker.peak == (8000 if again else 4000)


def test_a_convolution_takes_copies_forward() -> None:
    """oneDNN copies the input and the weight into its own layout, or the output."""
    x = torch.ones(2, 4, 100)
    for filters in (1, 4, 64):
        weight = torch.ones(filters, 4, 1)
        with Tracker() as tracker:
            output = functional.conv1d(x, weight)
        assert tracker.peak == output.nbytes + max(x.nbytes + weight.nbytes, output.nbytes)
        assert sum(tracker.at_peak.values()) == tracker.peak


def test_attention_on_a_cpu_counts() -> None:
    query = torch.ones(1, 2, 8, 16)
    with Tracker() as tracker:
        functional.scaled_dot_product_attention(query, query, query)
    assert tracker.work.flops == 2 * (2 * 2 * 8 * 8 * 16)


def test_views_write_nothing() -> None:
    with Tracker() as tracker:
        torch.ones(10).view(5, 2)
    assert (tracker.work.written, tracker.work.calls) == (40, 2)


def test_no_part_lies_in_another() -> None:
    """A module around a branch is no part of its own: its bytes would count twice."""
    attention = nn.ModuleDict({"core": nn.Linear(4, 4), "out": nn.Linear(4, 4)})
    model = nn.ModuleList([nn.ModuleDict({"attn": attention, "norm": nn.LayerNorm(4)})])
    branches = [SimpleNamespace(path="0.attn.core", kind="attention")]
    anatomy: Any = SimpleNamespace(blocks=[SimpleNamespace(path="0", branches=branches)])
    (group,) = groups_of(model, anatomy)
    assert group.parts == (Unit("0.attn.core", "attention"), Unit("0.norm", "other"))


def test_gradients_that_a_model_already_has_do_not_count() -> None:
    subject = normscope.load(SPEC)
    peak = plan(subject).peak
    subject.loss().backward()
    assert plan(subject).peak == peak
    assert all(p.grad is not None for p in subject.model.parameters())


def test_only_tensors_with_the_batch_axis_are_cut() -> None:
    batch = {"x": torch.ones(8, 16), "positions": torch.ones(16)}
    subject = replace(make_subject(linears(), torch.ones(8, 8)), batch=batch)
    cut = with_sequences(subject, 2).batch
    assert isinstance(cut, dict)
    assert {name: tuple(each.shape) for name, each in cut.items()} == {"x": (2, 16), "positions": (16,)}


def test_added_work_is_a_share_of_the_step_as_it_is() -> None:
    made = plan(SPEC)
    before, after = Work(100.0, 5.0, 1e-4), Work(150.0, 20.0, 3e-4)
    made = replace(made, before=replace(made.before, work=before), after=replace(made.after, work=after))
    assert made.added_flops == 0.5
    assert made.added_time == pytest.approx(
        (50 + 15 * INTENSITY + 2e-4 * CALL) / (100 + 5 * INTENSITY + 1e-4 * CALL)
    )


def test_options_of_the_command_reach_the_plan(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    words = "--batch-size 2 --seq-len 16 --dtype bfloat16 --optimizer sgd --precision float16"
    assert run(["plan", SPEC, *words.split(), "-o", str(target)]) == 0
    made = plan(SPEC, batch_size=2, seq_len=16, dtype=torch.bfloat16, optimizer="sgd", precision="float16")
    read = json.loads(target.read_text())
    assert {name: read[name] for name in ("before", "input", "optimizer", "precision")} == {
        name: made.to_dict()[name] for name in ("before", "input", "optimizer", "precision")
    }


def test_buffers_and_the_batch_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    stays = plan(model, batch=torch.randn(32, 8)).before.stays
    assert stays[Held.BUFFERS] == 8 * 4 + 8 * 4 + 8  # two running statistics, and a count
    assert stays[Held.BATCH] == 32 * 8 * 4


class Halves(nn.Module):
    """A block whose first part ends before the block has made its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.out = nn.Linear(8, 8), nn.Linear(800, 8)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        wide = self.part(x_BD).repeat(1, 100)
        return self.out(wide.sin().cos())


def test_a_part_that_ends_is_not_the_end_of_its_block() -> None:
    """Tensors that the block makes after it are activations of the block too."""
    model = nn.Sequential(Halves(), Halves(), Halves())
    at_peak = plan(model, batch=torch.randn(64, 8), optimizer="sgd").before.at_peak
    assert at_peak[Held.BLOCKS] >= 3 * 64 * 800 * 4
    assert at_peak.get(Held.ENDS, 0) < 64 * 800 * 4


def test_several_optimizers_of_ones_own() -> None:
    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *others = model.parameters()
        return [torch.optim.SGD([first], momentum=0.9), torch.optim.Adam(others)]

    model = linears()
    bytes_of = [p.numel() * p.element_size() for p in model.parameters()]
    made = plan(model, batch=torch.randn(4, 8), optimizer=two)
    assert made.optimizer == "two"
    counts = 4 * (len(bytes_of) - 1)  # a step of each parameter
    assert made.before.stays[Held.OPTIMIZER] == bytes_of[0] + 2 * sum(bytes_of[1:]) + counts


def test_the_text_has_the_figures_of_the_plan() -> None:
    as_it_is = plan(SPEC)
    made = plan(SPEC, int(0.8 * as_it_is.peak))
    words, limit = str(made), in_words(made.memory or 0)
    assert made.recompute
    assert f"With recomputation: {in_words(made.peak)}, which fits into {limit}" in words
    assert f"it adds {made.added_flops:.1%} floating-point operations" in words
    assert f"about {made.added_time:.0%} of their time" in words
    for kind in ("attention", "feed-forward"):
        rows = [row for row in made.rows if row.kind == kind]
        (line,) = [line for line in words.splitlines() if f"  {kind}  " in line]
        assert in_words(sum(row.saved for row in rows)) in line
        assert line.endswith(f"{sum(row.recomputed for row in rows)} of {len(rows)}")
    assert ON_CPU in words
    assert ON_CPU not in str(replace(made, device="cuda"))
    assert f"It fits into {in_words(2**40)} as it is." in str(replace(as_it_is, memory=2**40))


def test_a_grouped_product_counts_as_its_products() -> None:
    """Two experts with four tokens each: 2·8·16·32 operations."""
    tokens, experts = torch.ones(8, 16), torch.ones(2, 16, 32)
    assert _grouped(tokens, experts) == 2 * 8 * 16 * 32
