"""Branches that start as nothing, or nearly so: zero last maps, a γ of zero in each slot, learnt gates.

Shapes: B batch, T tokens, D width.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from normscope.claims.at_start import blocks_of, decoder, noise, stack_of, stream_by_block
from normscope.claims.catalogue import SCHEMES
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, effect, mapped
from normscope.claims.training import Setting, ShortRun, curves, losses_plot, train_changed, trained
from normscope.claims.warmup import POST, PRE
from normscope.errors import UsageError
from normscope.nn import Block, ModelConfig, Scaled, Slot, Where
from normscope.nn.block import sublayer_places
from normscope.nn.placement import one

DEPTH, WIDTH = 12, 32
BORN_ZERO = ("rezero", "skipinit", "fixup", "swin-v2")
STEPS, LONG_STEPS = 60, 300


@claim("C14", has_long=True)
def zero_last_maps(setup: Setup) -> Evidence:
    """The stream after the blocks against the stream before; losses of short runs."""
    seed = setup.seeds[0]
    moved = dict(_moves(seed))
    cases = []
    for name, value in moved.items():
        cases.append(Case(None, name, value, value == 0, within=is_bare_sum(name.split(",")[0])))
        cases.append(Case(None, name, value, value == 0, "any"))
    runs = {}
    for name, scheme in RUNS.items():
        setting = Setting(scheme=scheme, depth=6, init="xavier", steps=LONG_STEPS if setup.long else STEPS)
        runs[name] = train_changed(setup, setting)
        runs[f"{name}, zero"] = train_changed(setup, setting, zero_last)
    cases += setup.cases(lambda seed: _loss_cases(seed, runs))
    exact = float(sum(value == 0 for value in moved.values()))
    return Evidence(
        cases,
        Figure(f"starts of {len(moved)} that are the identity", {seed: exact}),
        plots=[losses_plot("6 blocks, AdamW at 3e-3 without warm-up", runs)],
    )


RUNS = {"Pre-LN": "pre", "no norms": "residual-no-norm"}


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
    """True for a scheme whose stream is one, comes through unscaled, and meets no norm."""
    scheme = SCHEMES[name]
    unscaled = isinstance(scheme.join, Scaled) and scheme.join.stream_scale is one
    on_stream = any(
        Slot.STREAM in scheme.placement_at(place)
        for block in range(1, DEPTH + 1)
        for place in sublayer_places(Where(block, depth=DEPTH), cross=False).values()
    )
    return (unscaled or scheme.join.kind == "learnt") and not on_stream


@torch.no_grad()
def zero_last(module: nn.Module) -> None:
    """Set the last map of each branch, and its bias, to zero."""
    for block in blocks_of(module):
        for parameter in (*block.attention.o.parameters(), *block.feed_forward.down.parameters()):
            parameter.zero_()


def _loss_cases(seed: int, runs: Mapping[str, Mapping[int, ShortRun]]) -> Iterator[Case]:
    for name in RUNS:
        saved = mean_loss(runs[name][seed].losses) - mean_loss(runs[f"{name}, zero"][seed].losses)
        yield effect(seed, f"{name}, nats that it saves on the way", saved, part="loss")


def mean_loss(losses: Sequence[float]) -> float:
    """The mean over a run, 10 where it diverged."""
    mean = statistics.fmean(losses)
    return mean if math.isfinite(mean) else 10.0


PLACES: Mapping[str, tuple[str, Slot]] = {
    "before the branch (pre)": ("pre", Slot.BRANCH_IN),
    "before the branch (peri)": ("peri", Slot.BRANCH_IN),
    "after the branch (res-post)": ("res-post", Slot.BRANCH_OUT),
    "after the branch (peri)": ("peri", Slot.BRANCH_OUT),
    "on the stream (post)": ("post", Slot.STREAM),
}
TRAINED = ("before the branch (pre)", "after the branch (res-post)")


@claim("C19", has_long=True)
def zero_gains(setup: Setup) -> Evidence:
    """The stack's map and the gradients of γ, slot by slot; increments of the loss in short runs."""
    cases = setup.cases(_identity_cases, _learning_cases)
    figure = Figure.share("% of the places where γ = 0 gives the identity", cases)
    if setup.fresh:  # the runs have no condition to confirm
        return Evidence(cases, figure)
    runs = {
        f"{place}, γ = {gain}": _train_with_gain(setup, place, gain)
        for place, gain in itertools.product(TRAINED, (1, 0))
    }
    alive = [case.value for case in cases if case.where.startswith("before") and "relu" in case.where]
    dead = 100 * (1 - max(alive))
    return Evidence(
        [*cases, *setup.cases(lambda seed: _settling_cases(seed, runs))],
        figure,
        plots=[losses_plot("6 blocks from γ = 1 and from γ = 0", runs)],
        notes=[f"Before a branch with ReLU {dead:.0f} % of the γ get no gradient, and never will."],
    )


def gains_of(module: nn.Module, slot: Slot) -> list[nn.Parameter]:
    """γ of one slot in every block."""
    residuals = [residual for block in blocks_of(module) for _, residual in block.sublayers().values()]
    weights = [residual.norms[slot.value].weight for residual in residuals]
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]


@torch.no_grad()
def set_gains(module: nn.Module, slot: Slot, value: float) -> None:
    """Fill γ of one slot in every block."""
    for weight in gains_of(module, slot):
        weight.fill_(value)


def _identity_cases(seed: int) -> Iterator[Case]:
    biases = {"xavier": "biases 0", "torch": "biases drawn"}
    for (place, (scheme, slot)), init in itertools.product(PLACES.items(), biases):
        stack = stack_of(scheme, DEPTH, seed, width=WIDTH, heads=2, init=init)
        set_gains(stack, slot, 0.0)
        streams = stream_by_block(stack, noise(WIDTH, seed))
        moved = float((streams[-1] - streams[0]).norm() / streams[0].norm())
        yield Case(seed, f"{place}, {biases[init]}", moved, moved == 0, met=slot is Slot.BRANCH_OUT)


def _learning_cases(seed: int) -> Iterator[Case]:
    """Share of the vectors γ, all at zero, whose gradient is not zero."""
    for (place, (scheme, slot)), activation in itertools.product(PLACES.items(), ("gelu", "relu")):
        model, ids, labels = decoder(scheme, 4, seed, width=WIDTH, activation=activation)
        set_gains(model, slot, 0.0)
        model(ids, labels).loss.backward()
        share = statistics.fmean(g.grad is not None and bool(g.grad.any()) for g in gains_of(model, slot))
        met = slot is not Slot.STREAM and activation == "gelu"
        where = f"{place}, {activation}, share of γ with a gradient"
        yield Case(seed, where, share, share == 1, "learns", met=met)


def _train_with_gain(setup: Setup, place: str, gain: float) -> dict[int, ShortRun]:
    scheme, slot = PLACES[place]
    setting = Setting(scheme=scheme, depth=6, steps=LONG_STEPS if setup.long else STEPS)
    return train_changed(setup, setting, lambda model: set_gains(model, slot, gain))


def _settling_cases(seed: int, runs: Mapping[str, Mapping[int, ShortRun]]) -> Iterator[Case]:
    for place in TRAINED:
        ones, zeros = (runs[f"{place}, γ = {gain}"][seed].losses for gain in (1, 0))
        calmer = 1 - increments(zeros[:STEPS]) / increments(ones[:STEPS])
        yield effect(seed, place, calmer, part="settles")
        yield effect(seed, f"{place}, nats", mean_loss(ones) - mean_loss(zeros), part="faster")


def increments(losses: Sequence[float]) -> float:
    """Variance of the loss's change from step to step."""
    return statistics.variance(after - before for before, after in itertools.pairwise(losses))


EARLY = 100
"""Steps that are called early."""
SHALLOW, DEEP = 8, 16
"""Blocks, in the short form and in the long one."""
NO_NORM = Setting(scheme="residual-no-norm", depth=SHALLOW, steps=EARLY)
GATED = {"rezero": NO_NORM, "highway": NO_NORM, "layerscale": PRE[1], "gtrxl": PRE[1]}
"""Each gated scheme with the same stack without a gate."""


@claim("C29", has_long=True)
def gates_help_early(setup: Setup) -> Evidence:
    """The change that a block makes to its input at the start, and the loss after 100 steps."""
    depth = DEEP if setup.long else SHALLOW
    post = replace(POST[1], depth=depth)
    gated = {name: replace(NO_NORM, scheme=name, depth=depth) for name in GATED}
    plain = {name: replace(setting, depth=depth) for name, setting in GATED.items()}
    outcomes = trained(setup, [*gated.values(), *plain.values(), post])
    early = mapped(outcomes, lambda outcome: replace(outcome, losses=outcome.losses[:EARLY]))
    cases = []
    for name, other in plain.items():
        for seed in setup.seeds:
            gate, bare, on_stream = (early[setting][seed].excess for setting in (gated[name], other, post))
            cases.append(effect(seed, f"{name} against {other.scheme}", bare - gate, part="helps"))
            cases.append(effect(seed, f"{name} against post", on_stream - gate, part="post"))
            moves = [change(scheme, depth, seed) for scheme in (name, other.scheme)]
            where = f"a block changes its input by {moves[0]:.2g} ({name}), {moves[1]:.2g} ({other.scheme})"
            cases.append(Case(seed, where, moves[0], moves[0] < moves[1]))
    shown = {setting.scheme: by_seed for setting, by_seed in early.items()}
    return Evidence(
        cases,
        Figure.largest("largest share by which a gated block changes its input", cases),
        plots=[curves(f"{depth} blocks, the first {EARLY} steps", shown, every=5)],
    )


@torch.no_grad()
def change(scheme: str, depth: int, seed: int) -> float:
    """‖block(x) − x‖/‖x‖ of the first of `depth` blocks at the start, x standard normal (4, 32, 32)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ModelConfig(scheme=scheme, depth=depth, width=32, heads=2)
        block, x_BTD = Block(config, Where(1, depth), causal=True), torch.randn(4, 32, 32)
    return float((block(x_BTD) - x_BTD).norm() / x_BTD.norm())
