"""What gradients the weights get at the start: by block, by depth, by width, in Post-LN and Pre-LN.

Shapes: B batch, T tokens, D width.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from normscope.claims.at_start import (
    blocks_of,
    decoder,
    down_gradients,
    exponent,
    gradient_norm,
    slope,
    weight_of,
)
from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.nn import EncoderDecoder, build

DEPTHS = (2, 4, 8, 16, 32, 64)
WIDTHS = (64, 256, 1024)
KINDS = ("decoder", "encoder", "encoder-decoder")
ENDS = (6, 12, 24)
DRAWS = 2
"""Models a seed; their mean gradient is taken."""
LARGER = 2.0
"""What the last block's gradient is at least, over the first's, where it is "very large" at the top."""
NEAR = 0.15
"""Largest distance of an exponent from the one that is proved."""


@claim(
    "B3",
    Source("001", "§2.B", "最后一层的梯度非常大，而底层的梯度可能非常小或不稳定"),
    Source("002", "缺点", "梯度不稳定:在深层网络中,梯度容易出现爆炸或消失的现象"),
    says="At the start of Post-LN the gradients of the last blocks are very large and those of the first "
    "ones small.",
    asks="‖∂loss/∂W₂‖ of the last block is at least twice that of the first, at 6, 12 and 24 blocks of "
    "a decoder, an encoder and the decoder of an encoder–decoder; the exponents of Xiong et al. 2020 "
    "(Theorem 1) within 0.15, L = 2 … 64 and d = 64 … 1024, in their setting: uniform attention, d hidden "
    "units, ReLU, Xavier weights",
    condition="the blocks have cross-attention to a memory",
    parts={
        "depth": Sentence(
            "The last block's gradient is the same at every depth in Post-LN, ∝ L^-½ in Pre-LN."
        ),
        "width": Sentence(
            "The last block's gradient grows with the width as d√(ln d).",
            "the head's weights have variance 1, as those of a shared embedding",
        ),
    },
)
def gradients_of_post_ln(setup: Setup) -> Evidence:
    """The tilt from the last block to the first; the two exponents that are proved of the last."""
    tilts = {seed: _tilts(seed) for seed in setup.seeds}
    by_depth = {seed: {name: _by_depth(name, seed) for name in ("post", "pre")} for seed in setup.seeds}
    cases = [case for seed, tilt in tilts.items() for case in _tilt_cases(seed, tilt)]
    cases += [case for seed, lines in by_depth.items() for case in _depth_cases(seed, lines)]
    cases += [case for seed in setup.seeds for case in _width_cases(seed)]
    alone = [tilt[kind, depth] for tilt in tilts.values() for kind in KINDS[:2] for depth in ENDS]
    crossed = [tilt["encoder-decoder", ENDS[-1]] for tilt in tilts.values()]
    return Evidence(
        cases=cases,
        figure=Figure(
            "last block's gradient over the first's, Post-LN decoder of 24 blocks",
            {seed: tilt["decoder", ENDS[-1]] for seed, tilt in tilts.items()},
        ),
        plots=[_tilt_plot(tilts), _depth_plot(by_depth)],
        notes=[
            f"A stack by itself: last over first between {min(alone):.2g} and {max(alone):.2g}; "
            f"{ENDS[-1]} blocks that also read a memory: {min(crossed):.2g} to {max(crossed):.2g}.",
            *_intervals(cases),
        ],
        of="stacks: 3 kinds × 3 depths",
        parts_of={"width": "exponents: 2 placements × 2 heads"},
    )


def _intervals(cases: Sequence[Case]) -> list[str]:
    """Each exponent, as its range over seeds."""
    values: dict[str, list[float]] = {}
    for case in cases:
        if case.part:
            values.setdefault(case.where, []).append(case.value)
    return [f"{where}: {min(found):.2f} to {max(found):.2f}." for where, found in values.items()]


def _tilts(seed: int) -> dict[tuple[str, int], float]:
    return {(kind, depth): _tilt(kind, depth, seed) for kind in KINDS for depth in ENDS}


def _tilt(kind: str, depth: int, seed: int) -> float:
    """‖∂loss/∂W₂‖ of the last block over that of the first, geometric mean of `DRAWS`."""
    logs = []
    for draw in range(DRAWS):
        gradients = post_gradients(kind, depth, 100 * seed + draw)
        logs.append(math.log(gradients[-1] / gradients[0]))
    return math.exp(sum(logs) / len(logs))


def post_gradients(kind: str, depth: int, seed: int) -> list[float]:
    """‖∂loss/∂W₂‖ by block of a Post-LN `kind` of models; of an encoder–decoder those of the decoder."""
    torch.manual_seed(seed)
    model = build(
        kind, scheme="post", depth=depth, width=64, heads=2, vocab=64, activation="relu", context=16
    )
    ids, labels, source = torch.randint(64, (3, 4, 16))
    if isinstance(model, EncoderDecoder):
        output = model(source, decoder_ids=ids, labels=labels)
    else:
        output = model(ids, labels)
    output.loss.backward()
    blocks = blocks_of(model)
    crossed = [block for block in blocks if block.cross is not None]
    return [gradient_norm(block.feed_forward.down) for block in crossed or blocks]


def _tilt_cases(seed: int, tilt: Mapping[tuple[str, int], float]) -> Iterator[Case]:
    for (kind, depth), value in tilt.items():
        where = f"{kind}, {depth} blocks"
        met = kind == "encoder-decoder"
        yield Case(seed=seed, where=where, value=value, holds=value >= LARGER, met=met)


def of_xiong(
    scheme: str, depth: int, seed: int, width: int, *, unit_head: bool = False, draws: int = 4
) -> float:
    """‖∂loss/∂W₂‖ of the last block in the setting of the theorem, a mean of `draws` models.

    The loss is that of one token, as there: the sum over tokens grows as they become alike with depth.
    """
    total = 0.0
    for draw in range(draws):
        model, ids, labels = decoder(
            scheme, depth, 100 * seed + draw, width=width, heads=1, hidden=width, bias=False
        )
        for block in blocks_of(model):
            nn.init.zeros_(weight_of(block.attention.q))  # so attention is uniform
        if unit_head:
            nn.init.normal_(model.head.weight)
        total += down_gradients(model, ids[:1], labels[:1].index_fill(1, torch.arange(15), -100))[-1]
    return total / draws


def _by_depth(scheme: str, seed: int) -> list[float]:
    return [of_xiong(scheme, depth, seed, width=64) for depth in DEPTHS]


def _depth_cases(seed: int, lines: Mapping[str, Sequence[float]]) -> Iterator[Case]:
    for scheme, proved in (("post", 0.0), ("pre", -0.5)):
        p = slope(DEPTHS, lines[scheme])
        where = f"{scheme}, exponent in L, {proved:g} proved"
        yield Case(seed=seed, where=where, value=p, holds=abs(p - proved) <= NEAR, part="depth")


def _width_cases(seed: int) -> Iterator[Case]:
    for scheme in ("post", "pre"):
        for unit in (True, False):
            p = exponent(lambda d: _per_root_log(scheme, d, seed, unit), WIDTHS)  # noqa: B023  called here
            head = "a head of variance 1" if unit else "a Xavier head"
            where = f"{scheme}, {head}, exponent in d beside √(ln d)"
            yield Case(seed=seed, where=where, value=p, holds=abs(p - 1) <= NEAR, met=unit, part="width")


def _per_root_log(scheme: str, width: int, seed: int, unit_head: bool) -> float:
    return (
        of_xiong(scheme, 1, seed, width, unit_head=unit_head, draws=4 if width < 1024 else 1)
        / math.log(width) ** 0.5
    )


def _tilt_plot(tilts: Mapping[int, Mapping[tuple[str, int], float]]) -> Plot:
    lines = [
        Line.over_seeds(kind, {depth: [t[kind, depth] for t in tilts.values()] for depth in ENDS})
        for kind in KINDS
    ]
    title = "Post-LN at its start: the last block's gradient over the first's"
    return Plot(title, "blocks", "‖∇W₂‖ last / first", lines, log="xy", levels={"equal": 1})


def _depth_plot(by_depth: Mapping[int, Mapping[str, Sequence[float]]]) -> Plot:
    lines = [
        Line.over_seeds(
            name, {depth: [lines[name][k] for lines in by_depth.values()] for k, depth in enumerate(DEPTHS)}
        )
        for name in ("post", "pre")
    ]
    return Plot("‖∇W₂‖ of the last block, by depth", "blocks L", "‖∇W₂‖", lines, log="xy")


FROM_INPUT = {"first block": lambda depth: 0, "second block": lambda depth: 1}
FROM_OUTPUT = {"middle block": lambda depth: depth // 2, "last block": lambda depth: depth - 1}
SIZES = (4, 8, 16, 32, 64)
FLAT = 0.1
"""Largest exponent in L of what is "about independent" of it: under a third from 4 blocks to 64."""


@claim(
    "B16",
    Source("001", "深入解析", "各层参数的梯度范数近似独立于层数 $L$"),
    Source("001", "§2.B", "梯度在各层分布更均匀"),
    says="In Pre-LN the gradient norm of each layer is about independent of the number of layers L.",
    asks="the exponent in L of ‖∂loss/∂W₂‖, L = 4 … 64, is within 0.1 of zero: for the first, second, "
    "middle and last block; Xiong et al. prove L^-½ for the last",
    condition="the block is counted from the input",
    parts={
        "even": Sentence(
            "In Pre-LN the gradients of all layers are about equal: largest over smallest at most 2.",
            "there are 4 blocks or fewer",
        ),
        "vanish": Sentence(
            "In Post-LN the first block's gradient falls with L: exponent -¼ or below.",
            "the blocks have cross-attention to a memory",
        ),
    },
)
def gradients_of_pre_ln(setup: Setup) -> Evidence:
    """Three readings of one sentence: a layer counted from below, one from above, all layers of a model."""
    found = {seed: {depth: _pre_gradients(depth, seed) for depth in SIZES} for seed in setup.seeds}
    cases = [case for seed, by_depth in found.items() for case in _layer_cases(seed, by_depth)]
    cases += [case for seed in setup.seeds for case in _vanish_cases(seed)]
    ends = {seed: slope(SIZES, [g[depth][-1] for depth in SIZES]) for seed, g in found.items()}
    firsts = [slope(SIZES, [g[depth][0] for depth in SIZES]) for g in found.values()]
    return Evidence(
        cases=cases,
        figure=Figure("exponent in L of the last block's gradient", ends),
        plots=[_layer_plot(found)],
        notes=[f"Exponent in L of the first block's gradient: {min(firsts):.2g} to {max(firsts):.2g}."],
        of="blocks: 4 positions",
        parts_of={"even": "models: 5 depths", "vanish": "exponents: 2 kinds of stacks"},
    )


def _pre_gradients(depth: int, seed: int) -> list[float]:
    """‖∂loss/∂W₂‖ by block, a mean of `DRAWS` models."""
    drawn = [down_gradients(*decoder("pre", depth, 100 * seed + d, width=64)) for d in range(DRAWS)]
    return [sum(values) / DRAWS for values in zip(*drawn, strict=True)]


def _layer_cases(seed: int, by_depth: Mapping[int, Sequence[float]]) -> Iterator[Case]:
    for name, at in {**FROM_INPUT, **FROM_OUTPUT}.items():
        p = slope(SIZES, [by_depth[depth][at(depth)] for depth in SIZES])
        met = name in FROM_INPUT
        yield Case(seed=seed, where=f"{name}, exponent in L", value=p, holds=abs(p) <= FLAT, met=met)
    for depth, gradients in by_depth.items():
        ratio = max(gradients) / min(gradients)
        where = f"{depth} blocks, largest over smallest"
        yield Case(seed=seed, where=where, value=ratio, holds=ratio <= 2, met=depth <= 4, part="even")


def _vanish_cases(seed: int) -> Iterator[Case]:
    for kind in ("decoder", "encoder-decoder"):
        draws = 8 if kind == "decoder" else 1  # where it hardly falls the draws differ more than that
        first = [
            sum(post_gradients(kind, depth, 100 * seed + d)[0] for d in range(draws)) / draws
            for depth in ENDS
        ]
        p = slope(ENDS, first)
        crossed = kind == "encoder-decoder"
        where = f"post, {kind}, exponent in L of the first block's"
        yield Case(seed=seed, where=where, value=p, holds=p <= -0.25, met=crossed, part="vanish")


def _layer_plot(found: Mapping[int, Mapping[int, Sequence[float]]]) -> Plot:
    lines = [
        Line.over_seeds(
            f"{depth} blocks",
            {k + 1: [by_depth[depth][k] for by_depth in found.values()] for k in range(depth)},
        )
        for depth in SIZES[1:]
    ]
    return Plot("Pre-LN at its start: gradient by block", "block l", "‖∇W₂‖", lines, log="xy")
