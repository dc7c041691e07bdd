"""What lets a stack be deep: DeepNorm's α and β, and branches scaled by 1/√N.

Shapes: B batch, T tokens, D width.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, read_anatomy
from normscope.claims.at_start import (
    blocks_of,
    decoder,
    down_gradients,
    exponent,
    noise,
    stack_of,
    stream_by_block,
    variance,
)
from normscope.claims.evidence import effect
from normscope.claims.form import Case, Evidence, Figure, Kind, Line, Plot, Sentence, Setup, Source, claim
from normscope.claims.short_runs import ShortRun, small, train_changed
from normscope.nn import build
from normscope.nn.joins import WeightedSum

READ = (4, 12)
RATE = 1e-5
STILL = 0.15
"""Largest exponent in L of an update that is the same at any depth."""
RIVALS = ("pre", "deepnorm", "post")
SHORT_RUN, LONG_RUN = (12, 100), (32, 300)
"""Blocks and steps."""
COUNTS = 0.05
"""Nats: the smallest difference that counts."""


@claim(
    "C16",
    Source("004", "§5.3.2", "微软提出的DeepNet理论从数学上证明了Pre-Norm的优越性"),
    Source("004", "§5.3", "GPT-2和后来的GPT-3、DeepNet等模型纷纷转向了Pre-Norm架构"),
    Source("004", "§3.3", "在后来的深层模型（如 GPT-2, DeepNet）中，Pre-LN（先做 LN 再做残差相加）被证明"),
    says="DeepNet is a Pre-Norm model, and proves Pre-Norm superior.",
    asks="the anatomy reads every branch of DeepNorm as Pre-LN; what DeepNet bounds (its Theorem 4.2: "
    "the output's change by one small SGD step is the same at any depth, exponent in L within 0.15 of zero, "
    "L = 4 … 32) is bounded in Pre-LN; trained 100 steps at 12 blocks Pre-LN's loss is lower",
    kind=Kind.TENDENCY,
    parts={
        "bound": "One small step moves Pre-LN's output by the same at any depth.",
        "deepnorm": "It moves DeepNorm's by the same at any depth.",
        "better": Sentence("Deep, Pre-LN ends lower than DeepNorm, by 0.05 nats.", smallest=COUNTS),
        "deep": Sentence("A stack with the norm on the stream cannot be trained deep.", smallest=0.0),
    },
    has_long=True,
)
def deep_net(setup: Setup) -> Evidence:
    """DeepNorm's placement as it is read; the exponent of an update; short runs of deep stacks."""
    readings = {depth: _reading(depth) for depth in READ}
    updates = {
        seed: {name: _update_exponent(name, seed) for name in ("pre", "deepnorm")} for seed in setup.seeds
    }
    depth, steps = LONG_RUN if setup.long else SHORT_RUN
    runs = {
        name: setup.train([small(name, depth, steps=steps).replace(seed=seed) for seed in setup.seeds])
        for name in RIVALS
    }
    entropy = runs["pre"][0].unigram_entropy
    ends = {seed: {name: _end(runs[name][k].losses) for name in RIVALS} for k, seed in enumerate(setup.seeds)}
    cases = list(_reading_cases(readings))
    cases += [case for seed, found in updates.items() for case in _update_cases(seed, found)]
    cases += [case for seed, found in ends.items() for case in _end_cases(seed, found, entropy, depth)]
    shares = {None: 100 * _share_of_pre(readings[READ[-1]])}
    first = readings[READ[-1]].blocks[0].branches[0]
    return Evidence(
        cases,
        Figure("branches of DeepNorm that are read as Pre-LN, in %", shares),
        plots=[_run_plot({name: [run.losses for run in found] for name, found in runs.items()}, depth)],
        notes=[
            f"DeepNorm is read as {first.placement}, with α = {first.stream_scale:.4g} at {READ[-1]} blocks."
            if isinstance(first.stream_scale, float)
            else f"DeepNorm is read as {first.placement}.",
            f"{depth} blocks, {steps} steps: "
            + ", ".join(f"{name} {statistics.median(e[name] for e in ends.values()):.3g}" for name in RIVALS)
            + f" nats; bare frequencies have {entropy:.3g}.",
        ],
    )


def _reading(depth: int) -> Anatomy:
    torch.manual_seed(0)
    model = build("decoder", scheme="deepnorm", depth=depth, width=32, heads=2, vocab=64, context=16)
    return read_anatomy(model, torch.randint(64, (2, 16)))


def _share_of_pre(anatomy: Anatomy) -> float:
    branches = [branch for block in anatomy.blocks for branch in block.branches]
    return sum(branch.placement == "pre" for branch in branches) / len(branches)


def _reading_cases(readings: Mapping[int, Anatomy]) -> Iterator[Case]:
    for depth, anatomy in readings.items():
        placement = anatomy.blocks[0].branches[0].placement
        share = _share_of_pre(anatomy)
        where = f"DeepNorm of {depth} blocks, read as {placement}: share of Pre-LN branches"
        yield Case(None, where, share, share == 1)


def update(scheme: str, depth: int, seed: int) -> float:
    """‖Δlogits‖ by one small SGD step of the blocks' matrices, per unit of the rate."""
    model, ids, labels = decoder(scheme, depth, seed, width=48)
    model = model.double()
    before = model(ids, labels)
    before.loss.backward()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.dim() == 2 and parameter.grad is not None:
                parameter.sub_(RATE * parameter.grad)
        return float((model(ids).logits - before.logits).norm()) / RATE


def _update_exponent(scheme: str, seed: int, draws: int = 3) -> float:
    """Exponent in L of the mean update of `draws` models."""
    seeds = [100 * seed + draw for draw in range(draws)]
    return exponent(lambda depth: statistics.fmean(update(scheme, depth, each) for each in seeds))


def _update_cases(seed: int, found: Mapping[str, float]) -> Iterator[Case]:
    for name in ("pre", "deepnorm"):
        p = found[name]
        where, part = f"{name}, exponent in L of an update", "bound" if name == "pre" else "deepnorm"
        yield Case(seed, where, p, abs(p) <= STILL, part)


def _end(losses: Sequence[float]) -> float:
    """Mean of the last 20 losses, ∞ for a run that diverged."""
    end = statistics.fmean(losses[-20:])
    return end if math.isfinite(end) else math.inf


def _end_cases(seed: int, ends: Mapping[str, float], entropy: float, depth: int) -> Iterator[Case]:
    where = f"{depth} blocks, nats that Pre-LN is lower"
    yield effect(seed, where, ends["deepnorm"] - ends["pre"], COUNTS, part="better")
    for name in ("post", "deepnorm"):
        where = f"{name}, {depth} blocks, nats that it lacks to train"
        yield effect(seed, where, 0.1 - (entropy - ends[name]), 0.0, part="deep")


def _run_plot(runs: Mapping[str, Sequence[Sequence[float]]], depth: int) -> Plot:
    lines = []
    for name, losses in runs.items():
        steps = range(0, min(len(each) for each in losses), 3)
        lines.append(Line.over_seeds(name, {step: [each[step] for each in losses] for step in steps}))
    return Plot(f"{depth} blocks, AdamW at 3e-3 without warm-up", "step", "loss, nats", lines)


FAR, THIN = 128, 32
TRAINED, SHORT_STEPS, LONG_STEPS, FEW = 104, 40, 200, 3
"""Blocks, steps, and seeds that are trained."""


@claim(
    "C28",
    Source("004", "§8.4", "在极深层的网络（如100层以上）中，仅仅依靠残差连接有时仍不够稳定"),
    Source("004", "§8.4", "在残差相加时乘以一个缩放因子（如 $1/\\sqrt{N}$，其中N为层数）"),
    says="Beyond 100 layers a factor 1/√N on the branches helps.",
    asks="104 blocks of width 16, Xavier weights, AdamW at 3e-3, three seeds: the mean of the last 20 of 40 "
    "losses is at least 0.05 nats lower with the factor, in Pre-LN and without norms; at the start of 128 "
    "blocks the stream's variance stays within a factor e with it, and the gradients of first and last block "
    "within 2",
    smallest=COUNTS,
    kind=Kind.TENDENCY,
    parts={
        "variance": "With the factor the variance at the end is within a factor e of that at entry.",
        "gradient": "With the factor the first and the last gradient are within a factor 2.",
        "unstable": "Residuals alone, without the factor, are not stable: the loss rises.",
    },
    has_long=True,
)
def residual_scaling(setup: Setup) -> Evidence:
    """The start of 128 blocks and a short training of 104, with and without the factor."""
    starts = {
        seed: {(name, on): _start(name, on, seed) for name in SCALED for on in (False, True)}
        for seed in setup.seeds
    }
    steps = LONG_STEPS if setup.long else SHORT_STEPS
    few = replace(setup, seeds=setup.seeds[:FEW])
    runs = {
        (name, on): train_changed(
            few,
            small(name, TRAINED, steps=steps, width=16, init="xavier").replace(batch_size=2),
            scale_branches if on else lambda model: None,
        )
        for name in SCALED
        for on in (False, True)
    }
    cases = [case for seed, found in starts.items() for case in _start_cases(seed, found)]
    trained = [case for seed in few.seeds for case in _trained_cases(seed, runs)]
    return Evidence(
        [*cases, *trained],
        Figure(
            f"nats that the factor saves Pre-LN of {TRAINED} blocks",
            {case.seed: case.value for case in trained if case.where.startswith("pre,") and not case.part},
        ),
        plots=[_scaled_plot(runs)],
        notes=[
            f"{name}: {_median_end(runs[name, False]):.3g} nats without, "
            f"{_median_end(runs[name, True]):.3g} with the factor, after {steps} steps."
            for name in SCALED
        ],
        of="stacks",
    )


SCALED = ("pre", "residual-no-norm")
Start = tuple[float, float]
"""The variance at the end over that at entry; ‖∇W₂‖ of the first block over the last."""


def scale_branches(module: nn.Module) -> None:
    """Every branch × 1/√N, N the number of blocks."""
    blocks = blocks_of(module)
    for block in blocks:
        for _, residual in block.sublayers().values():
            assert isinstance(residual.join, WeightedSum)
            residual.join.branch_scale = len(blocks) ** -0.5


def _start(scheme: str, scaled: bool, seed: int) -> Start:
    stack = stack_of(scheme, FAR, seed, width=THIN, heads=2, init="xavier")
    model, ids, labels = decoder(scheme, FAR, seed, width=THIN, heads=2)
    if scaled:
        scale_branches(stack)
        scale_branches(model)
    streams: list[Tensor] = stream_by_block(stack, noise(THIN, seed))
    gradients = down_gradients(model, ids, labels)
    grown = variance(streams[-1]) / variance(streams[0])
    tilt = gradients[0] / gradients[-1] if gradients[-1] else math.inf
    return tuple(value if math.isfinite(value) else math.inf for value in (grown, tilt))  # type: ignore[return-value]


def _start_cases(seed: int, found: Mapping[tuple[str, bool], Start]) -> Iterator[Case]:
    for name in SCALED:
        grown, tilt = found[name, True]
        where = f"{name}, {FAR} blocks"
        yield Case(seed, where, grown, 1 / math.e <= grown <= math.e, "variance")
        yield Case(seed, where, tilt, 0.5 <= tilt <= 2, "gradient")


def _trained_cases(seed: int, runs: Mapping[tuple[str, bool], Mapping[int, ShortRun]]) -> Iterator[Case]:
    for name in SCALED:
        without, with_factor = (_end(runs[name, on][seed].losses) for on in (False, True))
        yield effect(seed, f"{name}, {TRAINED} blocks, nats that it saves", without - with_factor, COUNTS)
    without, first = _end(runs[SCALED[1], False][seed].losses), runs[SCALED[1], False][seed].losses[0]
    rises = not without < first  # either may be no number
    where = f"{SCALED[1]}, {TRAINED} blocks without the factor, loss at the end"
    yield Case(seed, where, without, rises, "unstable")


def _median_end(runs: Mapping[int, ShortRun]) -> float:
    return statistics.median(_end(run.losses) for run in runs.values())


def _scaled_plot(runs: Mapping[tuple[str, bool], Mapping[int, ShortRun]]) -> Plot:
    lines = []
    for (name, on), by_seed in runs.items():
        losses = [run.losses for run in by_seed.values()]
        points: dict[float, Sequence[float]] = {
            k: [each[k] for each in losses if k < len(each)] for k in range(max(map(len, losses)))
        }
        lines.append(Line.over_seeds(f"{name}, {'1/√N' if on else 'no factor'}", points))
    return Plot(f"{TRAINED} blocks of width 16", "step", "loss, nats", lines, log="y")
