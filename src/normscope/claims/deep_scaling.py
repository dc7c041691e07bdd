"""Scales that let a stack be deep: DeepNorm's α and β, and branches scaled by 1/√N.

Shapes: B batch, T tokens, D width.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from normscope.anatomy import Branch, read_anatomy
from normscope.claims import at_start
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, effect, mapped
from normscope.claims.training import Outcome, Setting, final_loss, losses_plot, train_changed, trained
from normscope.nn import build
from normscope.nn.joins import WeightedSum
from normscope.train import MARGIN

READ = (4, 12)
"""Blocks of the models whose anatomy is read."""
STILL = 0.15
"""Largest exponent in L of an update that is the same at any depth."""
RIVALS = ("pre", "deepnorm", "post")
SHORT_RUN, LONG_RUN = (12, 100), (32, 300)
"""Blocks and steps."""


@claim("C16", has_long=True)
def deep_net(setup: Setup) -> Evidence:
    """DeepNorm's placement as it is read; the exponent of an update; short runs of deep stacks."""
    cases = []
    for read in READ:
        last, share = _reading(read)
        where = f"DeepNorm of {read} blocks, read as {last.placement}: share of Pre-LN branches"
        cases.append(Case(None, where, share, share == 1))
    depth, steps = LONG_RUN if setup.long else SHORT_RUN
    settings = {name: Setting(scheme=name, depth=depth, steps=steps) for name in RIVALS}
    outcomes = trained(setup, settings.values())
    runs = {name: outcomes[setting] for name, setting in settings.items()}
    cases += setup.cases(_update_cases, lambda seed: _end_cases(seed, runs, depth))
    ends = {name: statistics.median(run.final for run in by_seed.values()) for name, by_seed in runs.items()}
    scale = last.stream_scale
    with_scale = f", with α = {scale:.4g} at {READ[-1]} blocks" if isinstance(scale, float) else ""
    return Evidence(
        cases,
        Figure("branches of DeepNorm that are read as Pre-LN, in %", {None: 100 * share}),
        plots=[losses_plot(f"{depth} blocks, AdamW at 3e-3 without warm-up", runs)],
        notes=[
            f"DeepNorm is read as {last.placement}{with_scale}.",
            f"{depth} blocks, {steps} steps: "
            + ", ".join(f"{name} {end:.3g}" for name, end in ends.items())
            + f" nats; bare frequencies have {runs['pre'][setup.seeds[0]].entropy:.3g}.",
        ],
    )


def _reading(depth: int) -> tuple[Branch, float]:
    """The first branch of a DeepNorm model, as its anatomy reads it, and the share that is Pre-LN."""
    torch.manual_seed(0)
    model = build("decoder", scheme="deepnorm", depth=depth, width=32, heads=2, vocab=64, context=16)
    branches = read_anatomy(model, torch.randint(64, (2, 16))).branches
    return branches[0], statistics.fmean(branch.placement == "pre" for branch in branches)


def _update_cases(seed: int) -> Iterator[Case]:
    """Exponent in L of the mean update of three models."""
    seeds = [100 * seed + draw for draw in range(3)]
    for name, part in (("pre", "bound"), ("deepnorm", "deepnorm")):
        updates = [
            statistics.fmean(at_start.sgd_move(name, depth, each, width=48) for each in seeds)
            for depth in at_start.DEPTHS
        ]
        p = at_start.slope(at_start.DEPTHS, updates)
        yield Case(seed, f"{name}, exponent in L of an update", p, abs(p) <= STILL, part)


def _end_cases(seed: int, runs: Mapping[str, Mapping[int, Outcome]], depth: int) -> Iterator[Case]:
    ends = {name: by_seed[seed].final for name, by_seed in runs.items()}
    where = f"{depth} blocks, nats that Pre-LN is lower"
    yield effect(seed, where, ends["deepnorm"] - ends["pre"], part="better")
    for name in ("post", "deepnorm"):
        lacks = MARGIN - (runs[name][seed].entropy - ends[name])
        where = f"{name}, {depth} blocks, nats that it lacks to train"
        yield effect(seed, where, lacks, part="deep")


FAR, THIN = 128, 32
TRAINED, SHORT_STEPS, LONG_STEPS, FEW = 104, 40, 200, 3
"""Blocks, steps, and seeds that are trained."""
SCALED = ("pre", "residual-no-norm")


@claim("C28", has_long=True)
def residual_scaling(setup: Setup) -> Evidence:
    """The start of 128 blocks and a short training of 104, with and without the factor."""
    steps = LONG_STEPS if setup.long else SHORT_STEPS
    few = replace(setup, seeds=setup.seeds[:FEW])
    runs = {
        f"{name}, {factor}": train_changed(
            few, Setting(scheme=name, depth=TRAINED, steps=steps, width=16, init="xavier", batch=2), change
        )
        for name in SCALED
        for factor, change in (("no factor", None), ("1/√N", scale_branches))
    }
    ends = mapped(runs, lambda run: final_loss(run.losses))
    saved = few.cases(lambda seed: _saving_cases(seed, ends))
    without = runs[f"{SCALED[1]}, no factor"]
    where = f"{SCALED[1]}, {TRAINED} blocks without the factor, loss at the end"
    unstable = [
        Case(seed, where, end, not end < without[seed].losses[0], "unstable")  # either may be no number
        for seed, end in ends[f"{SCALED[1]}, no factor"].items()
    ]
    medians = {name: statistics.median(by_seed.values()) for name, by_seed in ends.items()}
    saved_pre = {case.seed: case.value for case in saved if case.where.startswith("pre,")}
    return Evidence(
        [*setup.cases(_start_cases), *saved, *unstable],
        Figure(f"nats that the factor saves Pre-LN of {TRAINED} blocks", saved_pre),
        plots=[losses_plot(f"{TRAINED} blocks of width 16", runs, every=1, log="y")],
        notes=[
            f"{name}: {medians[f'{name}, no factor']:.3g} nats without, {medians[f'{name}, 1/√N']:.3g} with "
            f"the factor, after {steps} steps."
            for name in SCALED
        ],
    )


def scale_branches(module: nn.Module) -> None:
    """Every branch × 1/√N, N the number of blocks."""
    blocks = at_start.blocks_of(module)
    for block in blocks:
        for _, residual in block.sublayers().values():
            assert isinstance(residual.join, WeightedSum)
            residual.join.branch_scale = len(blocks) ** -0.5


def _start_cases(seed: int) -> Iterator[Case]:
    """With the factor: the variance at the end over that at entry, ‖∇W₂‖ of the first block over the last."""
    for name in SCALED:
        stack = at_start.stack_of(name, FAR, seed, width=THIN, heads=2, init="xavier")
        model, ids, labels = at_start.decoder(name, FAR, seed, width=THIN, heads=2)
        scale_branches(stack)
        scale_branches(model)
        streams = at_start.stream_by_block(stack, at_start.noise(THIN, seed))
        gradients = at_start.down_gradients(model, ids, labels)
        grown = at_start.variance(streams[-1]) / at_start.variance(streams[0])
        tilt = gradients[0] / gradients[-1] if gradients[-1] else math.inf
        grown, tilt = (value if math.isfinite(value) else math.inf for value in (grown, tilt))
        where = f"{name}, {FAR} blocks"
        yield Case(seed, where, grown, 1 / math.e <= grown <= math.e, "variance")
        yield Case(seed, where, tilt, 0.5 <= tilt <= 2, "gradient")


def _saving_cases(seed: int, ends: Mapping[str, Mapping[int, float]]) -> Iterator[Case]:
    for name in SCALED:
        saved = ends[f"{name}, no factor"][seed] - ends[f"{name}, 1/√N"][seed]
        yield effect(seed, f"{name}, {TRAINED} blocks, nats that it saves", saved)
