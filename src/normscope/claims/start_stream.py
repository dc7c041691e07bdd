"""The stream at the start: how its variance goes through a stack, and who holds it.

Shapes: B batch, T tokens, D width.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from normscope.claims.at_start import noise, slope, stack_of, stream_by_block, streams_of, variance
from normscope.claims.form import Case, Evidence, Figure, Line, Plot, Sentence, Setup, Source, claim
from normscope.claims.short_runs import small, train_changed
from normscope.nn import SCHEMES, Slot, Where, build

DEEP = 32
INITS = ("xavier", "normal", "gpt2")


@claim(
    "B6",
    Source("001", "§3", "深层的输出幅度（Magnitude）可能会变得非常大"),
    Source("001", "§3", "残差分支 $F$ 对主干流 $x$ 的修改作用越来越小"),
    says="Pre-LN's stream grows with depth, and what a branch adds is an ever smaller share of it.",
    asks="over 32 blocks the slope of log mean square against log block is at least 0.1, that of the "
    "block's share ‖Δx‖/‖x‖ at most −0.1, with Xavier, N(0, 0.02²) and GPT-2's weights on their embeddings; "
    "a line of both kinds is 1 and −½. After 60 training steps of 8 blocks the same",
    parts={
        "law": "After l blocks the mean square is between 1 + l/2 and 1 + 3l/2 (Xiong et al. 2020, Lemma 2).",
        "trained": "The same after training.",
    },
)
def stream_of_pre_ln(setup: Setup) -> Evidence:
    """Slopes of the stream's mean square and of the branches' share; the lemma; a trained model."""
    streams = {seed: {init: _squares(_own_streams(init, seed)) for init in INITS} for seed in setup.seeds}
    lemma = {seed: _lemma(seed) for seed in setup.seeds}
    trained = {
        seed: _squares(streams_of(run.model, seed))
        for seed, run in train_changed(setup, small("pre", 8, steps=60)).items()
    }
    cases = [case for seed, found in streams.items() for case in _growth_cases(seed, found)]
    cases += [_lemma_case(seed, squares) for seed, squares in lemma.items()]
    cases += [case for seed, found in trained.items() for case in _growth(seed, "trained", found, "trained")]
    return Evidence(
        cases,
        Figure(
            f"mean square after {DEEP} blocks over that at entry, Xavier weights",
            {seed: squares[-1] / squares[0] for seed, squares in lemma.items()},
        ),
        plots=[_square_plot(lemma), _share_plot(streams)],
        notes=[
            f"The share of the last of {DEEP} blocks is {_mean_last_share(streams, init):.2g} ({init})."
            for init in INITS
        ],
    )


Squares = tuple[list[float], list[float]]


def _squares(streams: Sequence[Tensor]) -> Squares:
    """Mean squares of the stream after each block, and the share that each block added to it."""
    shares = [float((after - before).norm() / after.norm()) for before, after in itertools.pairwise(streams)]
    return [float(x.square().mean()) for x in streams[1:]], shares


def _own_streams(init: str, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model = build("decoder", scheme="pre", depth=DEEP, width=96, heads=4, init=init, vocab=64, context=32)
    return streams_of(model, seed)


def _growth_cases(seed: int, found: Mapping[str, Squares]) -> Iterator[Case]:
    for init, squares in found.items():
        yield from _growth(seed, init, squares)


def _growth(seed: int, name: str, squares: Squares, part: str = "") -> Iterator[Case]:
    blocks = range(1, len(squares[0]) + 1)
    grows, shrinks = slope(blocks, squares[0]), slope(blocks, squares[1])
    yield Case(seed, f"{name}, slope of the mean square", grows, grows >= 0.1, part)
    yield Case(seed, f"{name}, slope of the share", shrinks, shrinks <= -0.1, part)


def _lemma(seed: int) -> list[float]:
    """Mean squares before the first block and after each, ReLU, Xavier weights, from N(0, 1)."""
    stack = stack_of("pre", DEEP, seed, init="xavier", activation="relu")
    return [float(x.square().mean()) for x in stream_by_block(stack, noise(96, seed))]


def _lemma_case(seed: int, squares: Sequence[float]) -> Case:
    inside = [1 + k / 2 <= square <= 1 + 3 * k / 2 for k, square in enumerate(squares) if k]
    share = sum(inside) / len(inside)
    where = f"share of {DEEP} blocks within the bounds"
    return Case(seed, where, share, all(inside), "law")


def _mean_last_share(streams: Mapping[int, Mapping[str, Squares]], init: str) -> float:
    return sum(found[init][1][-1] for found in streams.values()) / len(streams)


def _square_plot(lemma: Mapping[int, Sequence[float]]) -> Plot:
    blocks = list(range(1, DEEP + 1))
    lines = [
        Line.over_seeds("Pre-LN", {k: [squares[k] for squares in lemma.values()] for k in blocks}),
        Line("1 + l/2", blocks, [1 + k / 2 for k in blocks]),
        Line("1 + 3l/2", blocks, [1 + 3 * k / 2 for k in blocks]),
    ]
    return Plot("The stream of Pre-LN at its start", "block l", "mean square", lines, log="xy")


def _share_plot(streams: Mapping[int, Mapping[str, Squares]]) -> Plot:
    lines = [
        Line.over_seeds(init, {k + 1: [found[init][1][k] for found in streams.values()] for k in range(DEEP)})
        for init in INITS
    ]
    return Plot("What a block adds", "block l", "‖Δx‖/‖x‖", lines, log="xy")


BLOCKS, NARROW = 12, 32
FAR = 100
PLAIN_SCHEMES = ("post", "pre", "gpt2", "peri", "res-post", "deepnorm", "residual-no-norm", "plain")


@claim(
    "C8",
    Source("004", "§6.1", "近似地满足 $Var(x_{l+1}) \\approx Var(x_l)$"),
    Source("004", "§6.1", "既不会衰减至0，也不会膨胀至无穷大"),
    says="With residuals and LayerNorm each block leaves the stream's variance about as it was.",
    asks="Var(x_{l+1})/Var(x_l) within 5 % of 1 at each of 12 blocks, all schemes, with Xavier weights "
    "and with the scheme's own; through 100 blocks the variance stays within a factor of 1000",
    condition="there is one stream and every block ends in a norm on it",
    hypothesis="the blocks have residuals and norms",
    parts={
        "hundred": Sentence(
            "Through 100 blocks the variance neither goes to zero nor to infinity.",
            hypothesis="the blocks have residuals and norms",
        )
    },
)
def variance_by_block(setup: Setup) -> Evidence:
    """Growth factors of a block, scheme by scheme; the end of 100 blocks."""
    found = {
        seed: {
            (name, init): _variances(name, BLOCKS, seed, init) for name in SCHEMES for init in _starts(name)
        }
        for seed in setup.seeds
    }
    cases = [_kept_case(seed, *key, values) for seed, by in found.items() for key, values in by.items()]
    far = {
        seed: {name: _variances(name, FAR, seed, "xavier") for name in PLAIN_SCHEMES}
        for seed in (() if setup.fresh else setup.seeds)  # that part has no condition
    }
    cases += [_far_case(seed, name, values) for seed, by in far.items() for name, values in by.items()]
    return Evidence(
        cases,
        Figure.share("% of the starts that keep it within 5 % at each block", cases),
        plots=[] if setup.fresh else [_far_plot(far)],
        of=f"starts of the {len(SCHEMES)} schemes, with Xavier weights and with their own",
        parts_of={"hundred": "schemes"},
    )


def has_both(name: str) -> bool:
    """Whether a scheme has residuals, and a norm in its blocks."""
    place = SCHEMES[name].placement_at(Where(1, depth=BLOCKS, kind="feed-forward", index=1))
    return name != "plain" and any(slot in place for slot in (Slot.BRANCH_IN, Slot.BRANCH_OUT, Slot.STREAM))


def _starts(name: str) -> list[str | None]:
    return [None] if SCHEMES[name].initialisation.weights == "xavier" else [None, "xavier"]


def _variances(name: str, depth: int, seed: int, init: str | None) -> list[float]:
    """Of the stream before the first block, where it is 1, and after each."""
    stack, x_BTD = stack_of(name, depth, seed, width=NARROW, heads=2, init=init), noise(NARROW, seed)
    return [variance(x) for x in stream_by_block(stack, x_BTD / variance(x_BTD) ** 0.5)]


def _kept_case(seed: int, name: str, init: str | None, values: Sequence[float]) -> Case:
    factors = [after / before if before else 0.0 for before, after in itertools.pairwise(values)]
    worst = max(factors, key=lambda factor: abs(factor - 1))
    where = f"{name}, {init or 'its own'} weights"
    return Case(seed, where, worst, abs(worst - 1) <= 0.05, met=holds_stream(name), within=has_both(name))


def holds_stream(name: str) -> bool:
    """Whether a scheme has one stream, with a norm on it at the end of every block."""
    scheme = SCHEMES[name]
    ends = [Where(block, depth=BLOCKS, kind="feed-forward", index=1) for block in range(1, BLOCKS + 1)]
    return scheme.join.kind != "streams" and all(Slot.STREAM in scheme.placement_at(end) for end in ends)


def _far_case(seed: int, name: str, values: Sequence[float]) -> Case:
    ratio = values[-1] / values[0] if math.isfinite(values[-1]) else math.inf
    where = f"{name}, variance after {FAR} blocks over that at entry"
    return Case(seed, where, ratio, 1e-3 <= ratio <= 1e3, "hundred", within=has_both(name))


def _far_plot(far: Mapping[int, Mapping[str, Sequence[float]]]) -> Plot:
    lines = [
        Line.over_seeds(name, {k: [by[name][k] for by in far.values()] for k in range(0, FAR + 1, 4)})
        for name in PLAIN_SCHEMES
    ]
    return Plot("The stream's variance at the start, Xavier weights", "block", "variance", lines, log="y")
