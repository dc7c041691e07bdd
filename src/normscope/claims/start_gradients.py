"""Gradients of the weights at the start: by block, by depth, by width, in Post-LN and Pre-LN.

Shapes: B batch, T tokens, D width.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normscope.claims import at_start
from normscope.claims.at_start import decoder, down_gradients, noise, slope, stack_of
from normscope.claims.experiments import spread, values
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, flat, lines_along, lines_by, plots
from normscope.nn import Context

DEPTHS = (2, 4, 8, 16, 32, 64)
WIDTHS = (64, 256, 1024)
MEMORIES = ("none", "drawn tokens", "identical tokens", "a Post-LN encoder's")
"""The input of each block's cross-attention; "none" has no cross-attention."""
ENDS, WIDTH = (6, 12, 24), 64
HELD_OUT_ENDS, HELD_OUT_WIDTH = (9, 18), 48
DRAWS = 2
"""Models a seed; their mean gradient is taken."""
LARGER = 2.0
"""Smallest ratio of the last block's gradient to the first's that is called "very large" against "small"."""
PROVED = {"post": 0.0, "pre": -0.5}
"""Exponent in depth of the last block's gradient, by Xiong et al. 2020, Theorem 1."""
NEAR = 0.15
"""Largest distance of an exponent from the one that is proved."""
COLLAPSED = 1e-2
"""Token diversity of a memory (its variance over tokens, in its mean square) under which it has collapsed."""


@claim("B3")
def gradients_of_post_ln(setup: Setup) -> Evidence:
    """The tilt from the last block to the first; the two exponents that are proved of the last."""
    tilts = setup.cases(lambda seed: _tilt_cases(setup, seed))
    figure = Figure(
        "last block's gradient over the first's, Post-LN alone, the deepest",
        {case.seed: case.value for case in tilts if case.at["memory"] == "none"},
    )
    if setup.fresh:  # the parts have no condition to confirm
        return Evidence(tilts, figure)
    by_depth = setup.by_seed(PROVED, lambda scheme, s: [of_xiong(scheme, d, s, width=64) for d in DEPTHS])
    depths = [_exponent_case(scheme, seed, slope(DEPTHS, each)) for scheme, seed, each in flat(by_depth)]
    return Evidence(
        [*tilts, *depths, *setup.cases(_width_cases)],
        figure,
        plots=plots("B3", lines_by(tilts, "depth", "memory"), lines_along(DEPTHS, by_depth)),
        notes=[
            f"Memory {memory}: last over first {spread(values(found))}, "
            f"diversity {spread(float(case.at['diversity']) for case in found)}."
            for memory in MEMORIES
            for found in [[case for case in tilts if case.at["memory"] == memory]]
        ],
    )


def _exponent_case(scheme: str, seed: int, p: float) -> Case:
    where = f"{scheme}, exponent in L, {PROVED[scheme]:g} proved"
    return Case(seed, where, p, abs(p - PROVED[scheme]) <= NEAR, "depth")


def _tilt_cases(setup: Setup, seed: int) -> Iterator[Case]:
    for memory in MEMORIES:
        for depth in setup.sizes(ENDS, HELD_OUT_ENDS):
            drawn = _drawn(setup, memory, depth, seed)
            value = statistics.geometric_mean(gradients[-1] / gradients[0] for gradients, _ in drawn)
            at: dict[str, float | str] = {"memory": memory, "depth": depth, "diversity": drawn[-1][1]}
            where, met = f"memory {memory}, {depth} blocks", drawn[-1][1] < COLLAPSED
            yield Case(seed, where, value, value >= LARGER, met=met, at=at)


def _drawn(setup: Setup, memory: str, depth: int, seed: int) -> list[tuple[list[float], float]]:
    """`post_gradients` of each draw of a seed."""
    width = setup.sizes(WIDTH, HELD_OUT_WIDTH)
    return [post_gradients(memory, depth, 100 * seed + draw, width) for draw in range(DRAWS)]


@functools.cache
def post_gradients(memory: str, depth: int, seed: int, width: int) -> tuple[list[float], float]:
    """‖∂(a random read-out)/∂W₂‖ by Post-LN block, and the token diversity of what they read (1 for none)."""
    how: dict[str, Any] = {"width": width, "heads": 2, "activation": "relu", "init": "xavier"}
    stack = stack_of("post", depth, seed, **how, cross=memory != "none")
    read = None
    if memory != "none":
        read = noise(width, seed + 1)
        if memory == "identical tokens":
            read = read[:, :1].expand_as(read)
        elif memory != "drawn tokens":
            with torch.no_grad():
                read = stack_of("post", depth, seed + 2, **how, causal=False).run(read)
    (stack.run(noise(width, seed), Context(memory=read)) * noise(width, seed + 3)).sum().backward()
    diversity = 1.0 if read is None else float(read.var(1, correction=0).mean() / read.square().mean())
    return [at_start.gradient_norm(block.feed_forward.down) for block in at_start.blocks_of(stack)], diversity


def of_xiong(
    scheme: str, depth: int, seed: int, width: int, *, unit_head: bool = False, draws: int = 4
) -> float:
    """‖∂loss/∂W₂‖ of the last block in the setting of the theorem, a mean of `draws` models.

    The loss is that of one token, as there: the sum over tokens grows as they become alike with depth.
    """
    how: dict[str, Any] = {"width": width, "heads": 1, "hidden": width, "bias": False}
    found = []
    for draw in range(draws):
        model, ids, labels = decoder(scheme, depth, 100 * seed + draw, **how)
        for block in at_start.blocks_of(model):
            nn.init.zeros_(at_start.weight_of(block.attention.q))  # so attention is uniform
        if unit_head:
            nn.init.normal_(model.head.weight)
        found += down_gradients(model, ids[:1], labels[:1].index_fill(1, torch.arange(15), -100))[-1:]
    return statistics.fmean(found)


def _width_cases(seed: int) -> Iterator[Case]:
    heads = {"width": False, "width, unit head": True}
    for scheme, (part, unit) in itertools.product(("post", "pre"), heads.items()):
        gradients = []
        for width in WIDTHS:
            found = of_xiong(scheme, 1, seed, width, unit_head=unit, draws=4 if width < 1024 else 1)
            gradients.append(found / math.log(width) ** 0.5)
        p = slope(WIDTHS, gradients)
        yield Case(seed, f"{scheme}, exponent in d beside √(ln d)", p, abs(p - 1) <= NEAR, part)


SIZES = (4, 8, 16, 32, 64)
POSITIONS = {"first": lambda L: 0, "second": lambda L: 1, "middle": lambda L: L // 2, "last": lambda L: L - 1}
FLAT = 0.1
"""Largest exponent in L of what is "about independent" of it: under a third from 4 blocks to 64."""


@claim("B16")
def gradients_of_pre_ln(setup: Setup) -> Evidence:
    """Three readings of one sentence: a layer counted from below, one from above, all layers of a model."""
    found = setup.by_seed(SIZES, _pre_gradients)
    cases = setup.cases(
        lambda seed: _layer_cases(seed, {depth: by_seed[seed] for depth, by_seed in found.items()}),
        lambda seed: _vanish_cases(setup, seed),
    )
    last = [case for case in cases if case.where.startswith("last block")]
    shown = {f"{depth} blocks": by_seed for depth, by_seed in found.items() if depth > SIZES[0]}
    lines = lines_along(range(1, SIZES[-1] + 1), shown)
    return Evidence(
        cases,
        Figure.largest("exponent in L of the last block's gradient", last),
        plots=plots("B16", lines),
    )


def _pre_gradients(depth: int, seed: int) -> list[float]:
    """‖∂loss/∂W₂‖ by block, a mean of `DRAWS` models."""
    drawn = [down_gradients(*decoder("pre", depth, 100 * seed + d, width=64)) for d in range(DRAWS)]
    return [sum(values) / DRAWS for values in zip(*drawn, strict=True)]


def _layer_cases(seed: int, by_depth: Mapping[int, Sequence[float]]) -> Iterator[Case]:
    for name, at in POSITIONS.items():
        p = slope(SIZES, [by_depth[depth][at(depth)] for depth in SIZES])
        for part in ("", "from the input") if name in ("first", "second") else ("",):
            yield Case(seed, f"{name} block, exponent in L", p, abs(p) <= FLAT, part)
    for depth, gradients in by_depth.items():
        ratio = max(gradients) / min(gradients)
        yield Case.at_most(seed, f"{depth} blocks, largest over smallest", ratio, 2, "even")


def _vanish_cases(setup: Setup, seed: int) -> Iterator[Case]:
    depths = setup.sizes(ENDS, HELD_OUT_ENDS)
    for memory in MEMORIES:
        drawn = [_drawn(setup, memory, depth, seed) for depth in depths]
        p = slope(depths, [sum(gradients[0] for gradients, _ in each) / DRAWS for each in drawn])
        met = max(diversity for each in drawn for _, diversity in each) < COLLAPSED
        where = f"memory {memory}, exponent in L of the first block's"
        yield Case(seed, where, p, p <= -0.25, "vanish", met=met)
