"""The stream at the start: its variance through a stack, what holds it, and what scales it from outside.

Shapes: B batch, T tokens, D width.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normscope.claims import at_start
from normscope.claims.at_start import noise, slope, stack_of, stream_by_block, variance
from normscope.claims.catalogue import SCHEMES
from normscope.claims.form import Case, Evidence, Figure, Line, Setup, claim, flat, lines_along, mapped, plots
from normscope.claims.training import Setting, effects, lead, train_changed
from normscope.nn import Decoder, Slot, Where, build

DEEP = 32
INITS = ("xavier", "normal", "gpt2")


@claim("B6")
def stream_of_pre_ln(setup: Setup) -> Evidence:
    """Slopes of the stream's mean square and of the branches' share; the lemma; a trained model."""
    model = {"scheme": "pre", "depth": DEEP, "width": 96, "vocab": 64}
    streams = setup.by_seed(INITS, lambda init, seed: _own_streams(seed, init=init, **model))
    runs = train_changed(setup, Setting(scheme="pre", depth=8, steps=60))
    trained = {"trained": {seed: at_start.streams_of(run.model, seed) for seed, run in runs.items()}}
    lemma = {seed: _lemma(seed) for seed in setup.seeds}
    cases = [case for each in flat(streams | trained) for case in _growth_cases(*each)]
    for seed, squares in lemma.items():
        inside = [1 + k / 2 <= square <= 1 + 3 * k / 2 for k, square in enumerate(squares) if k]
        where = f"share of {DEEP} blocks within the bounds"
        cases.append(Case(seed, where, statistics.fmean(inside), all(inside), "law"))
    shares = mapped(streams, _shares)
    blocks = range(1, DEEP + 1)
    measured = lines_along(blocks, {"Pre-LN": {seed: squares[1:] for seed, squares in lemma.items()}})
    ends = {"1 + l/2": 1 / 2, "1 + 3l/2": 3 / 2}
    bounds = [Line(name, blocks, [1 + rise * k for k in blocks]) for name, rise in ends.items()]
    return Evidence(
        cases,
        Figure(
            f"mean square after {DEEP} blocks over that at entry, Xavier weights",
            {seed: squares[-1] / squares[0] for seed, squares in lemma.items()},
        ),
        plots=plots("B6", [*measured, *bounds], lines_along(blocks, shares)),
        notes=[
            f"The share of the last of {DEEP} blocks is "
            f"{statistics.fmean(found[-1] for found in by_seed.values()):.2g} ({init})."
            for init, by_seed in shares.items()
        ],
    )


def _squares(streams: Sequence[Tensor]) -> list[float]:
    """Mean squares of the stream."""
    return [float(x.square().mean()) for x in streams]


def _shares(streams: Sequence[Tensor]) -> list[float]:
    """The share of the stream that each block added to it."""
    return [float((after - before).norm() / after.norm()) for before, after in itertools.pairwise(streams)]


def _own_streams(seed: int, **options: Any) -> list[Tensor]:
    """The stream by block of a model on its own embeddings."""
    torch.manual_seed(seed)
    return at_start.streams_of(build("decoder", heads=4, context=32, **options), seed)


def _growth_cases(name: str, seed: int, streams: Sequence[Tensor]) -> Iterator[Case]:
    part, blocks = "trained" if name == "trained" else "", range(1, len(streams))
    grows, shrinks = slope(blocks, _squares(streams[1:])), slope(blocks, _shares(streams))
    yield Case.at_least(seed, f"{name}, slope of the mean square", grows, 0.1, part)
    yield Case.at_most(seed, f"{name}, slope of the share", shrinks, -0.1, part)


def _lemma(seed: int) -> list[float]:
    """Mean squares before the first block and after each, ReLU, Xavier weights, from N(0, 1)."""
    stack = stack_of("pre", DEEP, seed, init="xavier", activation="relu")
    return _squares(stream_by_block(stack, noise(96, seed)))


BLOCKS, NARROW = 12, 32
FAR = 100
PLAIN_SCHEMES = ("post", "pre", "gpt2", "peri", "res-post", "deepnorm", "residual-no-norm", "plain")


@claim("C8")
def variance_by_block(setup: Setup) -> Evidence:
    """Growth factors of a block, scheme by scheme; the end of 100 blocks."""
    cases = setup.cases(_kept_cases)
    figure = Figure.share("% of the starts that keep it within 5 % at each block", cases)
    if setup.fresh:  # the part has no condition to confirm
        return Evidence(cases, figure)
    far = setup.by_seed(PLAIN_SCHEMES, lambda name, seed: _variances(name, FAR, seed, "xavier"))
    for name, seed, values in flat(far):
        ratio = values[-1] / values[0] if math.isfinite(values[-1]) else math.inf
        where = f"{name}, variance after {FAR} blocks over that at entry"
        cases.append(Case(seed, where, ratio, 1e-3 <= ratio <= 1e3, "hundred", within=has_both(name)))
    lines = lines_along(range(0, FAR + 1, 4), mapped(far, lambda values: values[::4]))
    return Evidence(cases, figure, plots=plots("C8", lines))


def has_both(name: str) -> bool:
    """True for a scheme with residuals, and a norm in its blocks."""
    place = SCHEMES[name].placement_at(Where(1, depth=BLOCKS, kind="feed-forward", index=1))
    return name != "plain" and any(slot in place for slot in (Slot.BRANCH_IN, Slot.BRANCH_OUT, Slot.STREAM))


def _variances(name: str, depth: int, seed: int, init: str | None) -> list[float]:
    """Variance of the stream before the first block, where it is 1, and after each."""
    stack, x_BTD = stack_of(name, depth, seed, width=NARROW, heads=2, init=init), noise(NARROW, seed)
    return [variance(x) for x in stream_by_block(stack, x_BTD / variance(x_BTD) ** 0.5)]


def _kept_cases(seed: int) -> Iterator[Case]:
    for name in SCHEMES:
        own = SCHEMES[name].initialisation.weights
        for init in (None,) if own == "xavier" else (None, "xavier"):
            values = itertools.pairwise(_variances(name, BLOCKS, seed, init))
            factors = [after / before if before else 0.0 for before, after in values]
            worst = max(factors, key=lambda factor: abs(factor - 1))
            where = f"{name}, {init or 'its own'} weights"
            holds, met = abs(worst - 1) <= 0.05, holds_stream(name)
            yield Case(seed, where, worst, holds, met=met, within=has_both(name))


def holds_stream(name: str) -> bool:
    """True for a scheme with one stream, and a norm on it at the end of every block."""
    scheme = SCHEMES[name]
    ends = [Where(block, depth=BLOCKS, kind="feed-forward", index=1) for block in range(1, BLOCKS + 1)]
    return scheme.join.kind != "streams" and all(Slot.STREAM in scheme.placement_at(end) for end in ends)


LENGTHS = (4, 8, 16, 32, 64)
COUNTS = {"L layers": 1, "2L branches": 2}
LEVEL = 0.1
"""Largest exponent in L of what is the same at every depth."""


@claim("C15")
def scaled_start(setup: Setup) -> Evidence:
    """Variance and gradient by depth under 1/√L, 1/√(2L) and nothing; GPT-2's own start."""
    ends, own = setup.by_seed((*COUNTS, "nothing"), _ends), setup.by_seed((64, 256), _own_growth)
    cases = [
        Case(seed, f"gpt2, 12 blocks, d = {width}", value, 0.5 <= value <= 2)
        for width, seed, value in flat(own)
    ]
    for name, seed, grown in flat({name: ends[name] for name in COUNTS}):
        p, last, where = slope(LENGTHS, grown), grown[-1], f"N = {name}, {LENGTHS[-1]} blocks"
        cases.append(Case(seed, f"N = {name}, exponent in L", p, abs(p) <= LEVEL, "depth"))
        cases.append(Case(seed, where, last, abs(last - 1) <= 0.1, "one"))
    cases += setup.cases(_gradient_cases)
    means = {name: statistics.fmean(grown[-1] for grown in by.values()) for name, by in ends.items()}
    return Evidence(
        cases,
        Figure("variance after 12 blocks of GPT-2 over that at entry, d = 256", own[256]),
        plots=plots("C15", lines_along(LENGTHS, ends)),
        notes=[
            f"Variance after {LENGTHS[-1]} blocks: "
            + ", ".join(f"{mean:.3g} by {name}" for name, mean in means.items())
            + "."
        ],
    )


def divide_last_maps(module: nn.Module, num_branches: int) -> None:
    """The last map of each branch over √N."""
    with torch.no_grad():
        for block in at_start.blocks_of(module):
            at_start.weight_of(block.attention.o).mul_(num_branches**-0.5)
            at_start.weight_of(block.feed_forward.down).mul_(num_branches**-0.5)


def _ends(name: str, seed: int) -> list[float]:
    """Variance after `LENGTHS` blocks, over that at entry."""
    ends = []
    for depth in LENGTHS:
        stack = stack_of("pre", depth, seed, width=64, init="xavier")
        if name in COUNTS:
            divide_last_maps(stack, COUNTS[name] * depth)
        streams = stream_by_block(stack, noise(64, seed))
        ends.append(variance(streams[-1]) / variance(streams[0]))
    return ends


def _gradient_cases(seed: int) -> Iterator[Case]:
    for name, count in COUNTS.items():
        last = []
        for depth in LENGTHS:
            model, ids, labels = at_start.decoder("pre", depth, seed, width=64)
            divide_last_maps(model, count * depth)
            last.append(at_start.down_gradients(model, ids, labels)[-1])
        p = slope(LENGTHS, last)
        where = f"N = {name}, exponent in L of ‖∇W₂‖"
        yield Case(seed, where, p, abs(p) <= LEVEL, "gradient")


def _own_growth(width: int, seed: int) -> float:
    streams = _own_streams(seed, scheme="gpt2", depth=12, width=width, vocab=256)
    return variance(streams[-1]) / variance(streams[0])


FINALS = ("pre", "pre-no-final")


@claim("C18")
def final_norm(setup: Setup) -> Evidence:
    """Paired losses; the output's mean square by depth with and without the final norm."""
    outputs = setup.by_seed(itertools.product(FINALS, INITS[:2]), lambda start, seed: _outputs(*start, seed))
    runs = [Setting(scheme="pre-no-final", depth=6), Setting(scheme="pre", depth=6)]
    cases = effects(setup, runs, lead, "6 blocks, nats that it saves")
    saved = Figure.largest("nats that a final norm saves", cases)
    for (scheme, init), seed, squares in flat(outputs):
        p, where = slope(LENGTHS, squares), f"{scheme}, {init} weights, exponent in L"
        if scheme == "pre":
            cases.append(Case(seed, where, p, abs(p) <= 0.05, "scale"))
        else:
            cases.append(Case(seed, where, p, p >= 0.5, "without"))
    shown = {f"{scheme}, {init}": by_seed for (scheme, init), by_seed in outputs.items()}
    return Evidence(
        cases,
        saved,
        plots=plots("C18", lines_along(LENGTHS, shown)),
        unmeasured=["its effect on fine-tuning on another task, of which 004 speaks"],
    )


def _outputs(scheme: str, init: str, seed: int) -> list[float]:
    """Mean square of what the head reads, by depth."""
    squares = []
    for depth in LENGTHS:
        torch.manual_seed(seed)
        model = build("decoder", scheme=scheme, depth=depth, width=64, init=init, vocab=64, context=16)
        assert isinstance(model, Decoder)
        ids = torch.randint(64, (4, 16))
        with torch.no_grad():
            x_BTD = model.run(model.embedding(ids, torch.arange(16)[None]))
        squares.append(float(x_BTD.square().mean()))
    return squares
