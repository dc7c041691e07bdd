"""Branches that start as nothing: zero last maps, and a γ of zero in each slot.

Shapes: B batch, T tokens, D width.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from normscope.claims.at_start import blocks_of, decoder, noise, stack_of, stream_by_block
from normscope.claims.evidence import effect
from normscope.claims.form import Case, Evidence, Figure, Kind, Line, Plot, Sentence, Setup, Source, claim
from normscope.claims.short_runs import ShortRun, small, train_changed
from normscope.errors import UsageError
from normscope.nn import SCHEMES, Scaled, Slot, Where
from normscope.nn.block import sublayer_places
from normscope.nn.placement import one

DEPTH, WIDTH = 12, 32
BORN_ZERO = ("rezero", "skipinit", "fixup", "swin-v2")
STEPS, LONG_STEPS = 60, 300
NATS = 0.05
"""The smallest saving that counts."""
CALMER = 0.1
"""Smallest share by which the variance of the increments has to fall."""


@claim(
    "C14",
    Source("004", "§5.4.1", "模型就退化为 $y = x$，即一个纯粹的恒等映射"),
    Source("004", "§5.4.1", "极大地降低了优化难度"),
    says="With the last map of each branch at zero the stack starts as the identity.",
    asks="the stream after 12 blocks is the one before them, bit by bit, in the schemes whose stream is y = "
    "x + F(x): zero last maps, and those that start so by themselves; the mean loss of the first 60 steps of "
    "6 blocks is at least 0.05 nats lower than with Xavier weights, with norms (Pre-LN) and without",
    hypothesis="y = x + F(x): one stream, not scaled, with no norm on it",
    kind=Kind.TENDENCY,
    parts={
        "any": "The same in every scheme of the catalogue.",
        "loss": Sentence("It makes the first steps of training easier.", smallest=NATS),
    },
    has_long=True,
)
def zero_last_maps(setup: Setup) -> Evidence:
    """The stream after the blocks against the stream before; losses of short runs."""
    moved = {seed: dict(_moves(seed)) for seed in setup.seeds[:1]}
    cases = []
    for name, value in ((name, value) for by_name in moved.values() for name, value in by_name.items()):
        sum_of = is_bare_sum(name.split(",")[0])
        cases.append(Case(None, name, value, value == 0, within=sum_of))
        cases.append(Case(None, name, value, value == 0, "any"))
    steps = LONG_STEPS if setup.long else STEPS
    runs = {
        name + (", zero" if zero else ""): _losses(setup, scheme, steps, zero=zero)
        for name, scheme in RUNS.items()
        for zero in (False, True)
    }
    cases += setup.cases(lambda seed: _loss_cases(seed, runs))
    exact = {seed: float(sum(v == 0 for v in by.values())) for seed, by in moved.items()}
    return Evidence(
        cases,
        Figure(f"starts of {len(moved[setup.seeds[0]])} that are the identity", exact),
        plots=[_loss_plot(runs)],
        of="starts: every scheme with zero last maps, and four of their own",
    )


def _moves(seed: int) -> Iterator[tuple[str, float]]:
    """Largest change of the stream by the stack, by start."""
    for name in SCHEMES:
        try:
            yield f"{name}, zero last maps", _moved(name, seed, init="zero-output")
        except UsageError:
            continue  # maps that are divided by their σ cannot be zero
    for name in BORN_ZERO:
        yield f"{name}, by itself", _moved(name, seed)


def _moved(name: str, seed: int, **options: object) -> float:
    stack = stack_of(name, DEPTH, seed, width=WIDTH, heads=2, **options)
    streams = stream_by_block(stack, noise(WIDTH, seed))
    return float((streams[-1] - streams[0]).abs().max())


def is_bare_sum(name: str) -> bool:
    """Whether the stream is one, comes through unscaled, and meets no norm."""
    scheme = SCHEMES[name]
    unscaled = isinstance(scheme.join, Scaled) and scheme.join.stream_scale is one
    places = [
        place
        for block in range(1, DEPTH + 1)
        for place in sublayer_places(Where(block, depth=DEPTH), cross=False).values()
    ]
    on_stream = any(Slot.STREAM in scheme.placement_at(place) for place in places)
    return (unscaled or scheme.join.kind == "learnt") and not on_stream


RUNS = {"Pre-LN": "pre", "no norms": "residual-no-norm"}


@torch.no_grad()
def zero_last(module: nn.Module) -> None:
    """The last map of each branch, and its bias, at zero."""
    for block in blocks_of(module):
        for last in (block.attention.o, block.feed_forward.down):
            for parameter in last.parameters():
                parameter.zero_()


def _losses(setup: Setup, scheme: str, steps: int, *, zero: bool) -> dict[int, Sequence[float]]:
    config = small(scheme, steps=steps, init="xavier")
    runs = train_changed(setup, config, zero_last if zero else lambda model: None)
    return {seed: run.losses for seed, run in runs.items()}


def _loss_cases(seed: int, runs: Mapping[str, Mapping[int, Sequence[float]]]) -> Iterator[Case]:
    for name in RUNS:
        usual, zero = (mean_loss(runs[start][seed]) for start in (name, f"{name}, zero"))
        yield effect(seed, f"{name}, nats that it saves on the way", usual - zero, NATS, part="loss")


def mean_loss(losses: Sequence[float]) -> float:
    """The mean over a run, 10 where it diverged."""
    mean = statistics.fmean(losses)
    return mean if math.isfinite(mean) else 10.0


def _loss_plot(runs: Mapping[str, Mapping[int, Sequence[float]]]) -> Plot:
    lines = [
        Line.over_seeds(
            name,
            {
                step: [losses[step] for losses in by_seed.values() if step < len(losses)]
                for step in range(0, min(len(losses) for losses in by_seed.values()), 3)
            },
        )
        for name, by_seed in runs.items()
    ]
    return Plot("6 blocks, AdamW at 3e-3 without warm-up", "step", "loss, nats", lines)


PLACES: Mapping[str, tuple[str, Slot]] = {
    "before the branch (pre)": ("pre", Slot.BRANCH_IN),
    "before the branch (peri)": ("peri", Slot.BRANCH_IN),
    "after the branch (res-post)": ("res-post", Slot.BRANCH_OUT),
    "after the branch (peri)": ("peri", Slot.BRANCH_OUT),
    "on the stream (post)": ("post", Slot.STREAM),
}


@claim(
    "C19",
    Source("004", "§10", "对LN层的增益参数（γ）进行初始化置零，让网络在初始阶段仅表现为恒等映射"),
    Source("004", "§10", "若发现训练前期Loss震荡"),
    says="With γ = 0 at the start the network is the identity.",
    asks="the stream after 12 blocks is the one before them, bit by bit, with γ = 0 in one slot: before the "
    "branch, after it, on the stream; biases at zero or drawn. Each γ must get a gradient. Over the first "
    "60 steps at 3e-3 the loss's increments have a smaller variance than from γ = 1, and its mean is lower",
    condition="the norm is the last step of the branch",
    kind=Kind.TENDENCY,
    parts={
        "learns": Sentence(
            "Every γ that starts at zero gets a gradient.",
            "the norm stands in the branch, and the activation has a slope at zero",
        ),
        "settles": Sentence("Early oscillation of the loss becomes smaller (by a tenth).", smallest=CALMER),
        "faster": Sentence("The first steps are faster (by 0.05 nats).", smallest=NATS),
    },
    has_long=True,
)
def zero_gains(setup: Setup) -> Evidence:
    """The stack's map and the gradients of γ, slot by slot; increments of the loss in short runs."""
    cases = setup.cases(_identity_cases)
    cases += setup.cases(_learning_cases)
    steps = LONG_STEPS if setup.long else STEPS
    runs = {} if setup.fresh else {place: _pair(setup, place, steps) for place in TRAINED}
    settled = [case for place, pair in runs.items() for case in _settling_cases(place, *pair)]
    return Evidence(
        [*cases, *settled],
        Figure.share("% of the places where γ = 0 gives the identity", cases),
        plots=[_pair_plot(runs)],
        notes=[_dead_note(cases)],
    )


TRAINED = ("before the branch (pre)", "after the branch (res-post)")


@torch.no_grad()
def set_gains(module: nn.Module, slot: Slot, value: float) -> None:
    """Fill γ of one slot in every block."""
    for block in blocks_of(module):
        for _, residual in block.sublayers().values():
            weight = residual.norms[slot.value].weight
            assert isinstance(weight, nn.Parameter)
            weight.fill_(value)


def _identity_cases(seed: int) -> Iterator[Case]:
    for place, (scheme, slot) in PLACES.items():
        for init, biases in (("xavier", "biases 0"), ("torch", "biases drawn")):
            stack = stack_of(scheme, DEPTH, seed, width=WIDTH, heads=2, init=init)
            set_gains(stack, slot, 0.0)
            streams = stream_by_block(stack, noise(WIDTH, seed))
            moved = float((streams[-1] - streams[0]).norm() / streams[0].norm())
            met = slot is Slot.BRANCH_OUT
            yield Case(seed, f"{place}, {biases}", moved, moved == 0, met=met)


def _learning_cases(seed: int) -> Iterator[Case]:
    for place, (scheme, slot) in PLACES.items():
        for activation in ("gelu", "relu"):
            share = _alive(scheme, slot, activation, seed)
            met = slot is not Slot.STREAM and activation == "gelu"
            where = f"{place}, {activation}, share of γ with a gradient"
            yield Case(seed, where, share, share == 1, "learns", met=met)


def _alive(scheme: str, slot: Slot, activation: str, seed: int) -> float:
    """Share of the vectors γ, all at zero, whose gradient is not zero."""
    model, ids, labels = decoder(scheme, 4, seed, width=WIDTH, activation=activation)
    set_gains(model, slot, 0.0)
    model(ids, labels).loss.backward()
    alive = []
    for block in blocks_of(model):
        for _, residual in block.sublayers().values():
            weight = residual.norms[slot.value].weight
            assert isinstance(weight, nn.Parameter)
            alive.append(weight.grad is not None and bool(weight.grad.any()))
    return sum(alive) / len(alive)


def _dead_note(cases: Sequence[Case]) -> str:
    dead = [
        case.value
        for case in cases
        if case.part == "learns" and "before" in case.where and "relu" in case.where
    ]
    return (
        f"Before a branch with ReLU {100 * (1 - max(dead)):.0f} % of the γ get no gradient, and never will."
    )


Pair = tuple[dict[int, ShortRun], dict[int, ShortRun]]


def _pair(setup: Setup, place: str, steps: int) -> Pair:
    """Runs from γ = 1 and from γ = 0."""
    scheme, slot = PLACES[place]
    config = small(scheme, steps=steps)
    return (
        train_changed(setup, config, lambda model: set_gains(model, slot, 1.0)),
        train_changed(setup, config, lambda model: set_gains(model, slot, 0.0)),
    )


def _settling_cases(place: str, ones: dict[int, ShortRun], zeros: dict[int, ShortRun]) -> Iterator[Case]:
    for seed, run in ones.items():
        calmer = 1 - increments(zeros[seed].losses[:STEPS]) / increments(run.losses[:STEPS])
        yield effect(seed, place, calmer, CALMER, part="settles")
        saved = mean_loss(run.losses) - mean_loss(zeros[seed].losses)
        yield effect(seed, f"{place}, nats", saved, NATS, part="faster")


def increments(losses: Sequence[float]) -> float:
    """Variance of the loss's change from step to step."""
    return statistics.variance(after - before for before, after in itertools.pairwise(losses))


def _pair_plot(runs: Mapping[str, Pair]) -> Plot:
    lines = []
    for place, pair in runs.items():
        for gain, by_seed in zip((1, 0), pair, strict=True):
            steps = range(0, min(len(run.losses) for run in by_seed.values()), 3)
            points: dict[float, Sequence[float]] = {
                step: [run.losses[step] for run in by_seed.values()] for step in steps
            }
            lines.append(Line.over_seeds(f"{place}, γ = {gain}", points))
    return Plot("6 blocks from γ = 1 and from γ = 0", "step", "loss, nats", lines)
