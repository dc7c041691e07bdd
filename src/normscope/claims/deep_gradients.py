"""Gradients through depth at the start: do they explode or vanish, and is a residual's factor 1 or more.

Shapes: B batch, T tokens, D width.
"""

import math
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from normscope.claims.form import Case, Evidence, Figure, Line, Plot, Setup, Source, claim
from normscope.claims.real_blocks import (
    F64,
    INITS,
    at_last_token,
    embedded,
    jacobian,
    started,
    sublayers,
    walk,
)
from normscope.linalg import product_log_singular_values, singular_values
from normscope.nn import Context, ModelConfig, Where
from normscope.nn.stack import Stack

WIDTH, BATCH, TOKENS, DEPTH = 32, 2, 16, 64
MEMORIES = {"": None, "cross-attention to identical tokens": 1, "cross-attention to different tokens": TOKENS}
"""What each block reads besides → different tokens in it."""


def stream_gradients(scheme: str, init: str, seed: int, memory: str = "", depth: int = DEPTH) -> list[float]:
    """‖∂(random linear loss of the last block's output)/∂x_l‖, l = 0 … depth, at the start, x_0 ~ N(0, 1)."""
    stack = _stack(scheme, init, seed, memory, depth)
    context = Context(memory=_memory(memory))
    states = [torch.randn(BATCH, TOKENS, WIDTH, dtype=F64, requires_grad=True)]
    for block in stack.blocks:
        states.append(block(states[-1], context))
    loss = (states[-1] * torch.randn_like(states[-1])).sum()
    return [float(gradient.norm()) for gradient in torch.autograd.grad(loss, states)]


def _stack(scheme: str, init: str, seed: int, memory: str = "", depth: int = DEPTH) -> Stack:
    torch.manual_seed(seed)
    config = ModelConfig(scheme=scheme, depth=depth, width=WIDTH, heads=2, init=init, activation="relu")
    first = Where(1, depth, stack="decoder" if memory else "single", other_depth=depth)
    return Stack(config, first, causal=True, cross=bool(memory)).to(F64).requires_grad_(False)


def _memory(name: str) -> Tensor | None:
    different = MEMORIES[name]
    if different is None:
        return None
    return torch.randn(BATCH, different, WIDTH, dtype=F64).expand(-1, TOKENS, -1)


def _ratio(norms: list[float]) -> float:
    """ln ‖∂x_0‖/‖∂x_L‖."""
    smallest = sys.float_info.min  # a gradient that underflows is as small as can be
    return math.log(max(norms[0], smallest) / max(norms[-1], smallest))


TENFOLD = math.log(10)


@claim(
    "B10",
    Source("002", "数学解释梯度爆炸和消失", "任何一个梯度项如果大于1,将导致总体梯度指数级放大"),
    Source("004", "§6.2", "梯度就会呈指数级衰减"),
    says="Any one gradient factor above 1 makes a deep stack's gradient explode exponentially, any one "
    "below 1 makes it vanish.",
    asks="a stack of 64 blocks whose first layers' Jacobians have a singular value above 1 multiplies "
    "the gradient by 10 or more, one with a singular value below 1 (but for the two that LN makes 0) "
    "divides it by 10 or more: Post-LN and Pre-LN, Xavier and N(0, 0.02²) weights, x_0 ~ N(0, 1); and 64 "
    "numbers that are 1 but for one",
    parts={
        "post": "Post-LN's gradient changes tenfold or more over 64 blocks.",
        "pre": "Pre-LN's changes less, in the logarithm by half or less of Post-LN's.",
        "extremes": "At one token σ_max/σ_(d−2) of a Post-LN stack grows exponentially: its log as "
        "depth^0.7 to depth^1.3.",
    },
)
def explode_or_vanish(setup: Setup) -> Evidence:
    """Gain of the gradient by depth, beside the singular values of single layers."""
    cases: list[Case] = []
    curves: dict[str, list[list[float]]] = {}
    for seed in setup.seeds:
        gains: dict[tuple[str, str], float] = {}
        for scheme in ("post", "pre"):
            for init in ("xavier", "normal"):
                norms = stream_gradients(scheme, init, seed)
                gains[scheme, init] = _ratio(norms)
                curves.setdefault(f"{scheme}, {INITS[init]}", []).append(norms)
                cases += _factor_cases(scheme, init, gains[scheme, init], seed)
        cases += _single_number_cases(seed)
        for init in ("xavier", "normal"):
            cases += _part_cases(gains, init, seed)
    return Evidence(
        cases,
        Figure(
            "ln ‖∂x_0‖/‖∂x_64‖, Post-LN, Xavier",
            {s: _ratio(norms) for s, norms in zip(setup.seeds, curves["post, Xavier"], strict=True)},
        ),
        plots=[_gradient_plot("Gradient by depth at the start", curves)],
    )


def _factor_cases(scheme: str, init: str, gain: float, seed: int) -> Iterator[Case]:
    """Both halves of the sentence, of one stack: by the first eight layers, at one token."""
    x = torch.randn(WIDTH, dtype=F64, generator=torch.Generator().manual_seed(seed))
    layers, _ = walk(_stack(scheme, init, seed), x[None, None])
    values = [singular_values(jacobian(*at_last_token(each.step, each.x))) for each in layers[:8]]
    high, low = max(each[0] for each in values), min(each[-3] for each in values)
    name = f"{scheme}, {INITS[init]}"
    if high > 1:
        where = f"{name}: a layer's σ is {high:.3g}, the gradient over 64 blocks changes by e to the"
        yield Case(seed, where, gain, gain >= TENFOLD)
    if low < 1:
        where = f"{name}: a layer's σ is {low:.3g}, the gradient over 64 blocks changes by e to the"
        yield Case(seed, where, gain, gain <= -TENFOLD)


def _single_number_cases(seed: int) -> Iterator[Case]:
    for factor in (1.5, 0.7):
        gain = float(np.log(np.prod([factor] + [1.0] * 63)))
        where = f"64 numbers, one of them {factor}: the product's logarithm"
        holds = gain >= TENFOLD if factor > 1 else gain <= -TENFOLD
        yield Case(seed, where, gain, holds)


def _part_cases(gains: dict[tuple[str, str], float], init: str, seed: int) -> Iterator[Case]:
    where = INITS[init]
    post, pre = gains["post", init], gains["pre", init]
    yield Case(seed, where, post, abs(post) >= TENFOLD, "post")
    yield Case(seed, where, pre, abs(pre) <= abs(post) / 2, "pre")
    slope = _range_slope(init, seed)
    yield Case(seed, where, slope, 0.7 <= slope <= 1.3, "extremes")


def _range_slope(init: str, seed: int) -> float:
    """Exponent in depth of ln σ_max/σ_(d−2), from 8 to 64 layers of one token."""
    model, _ = started("post", init=init, depth=32, width=16, seed=seed)
    x = torch.randn(16, dtype=F64, generator=torch.Generator().manual_seed(seed))
    factors = torch.stack(
        [jacobian(*at_last_token(each.step, each.x)) for each in walk(model, x[None, None])[0]]
    )
    depths = (8, 16, 32, 64)
    logs = [product_log_singular_values(factors[:depth]).log_values for depth in depths]
    ranges = [float(each[0] - each[13]) for each in logs]
    return float(np.polyfit(np.log(depths), np.log(ranges), 1)[0])


def _gradient_plot(title: str, curves: dict[str, list[list[float]]]) -> Plot:
    lines = []
    for name, found in curves.items():
        at = range(0, DEPTH + 1, 4)
        points = {float(block): [norms[block] / norms[-1] for norms in found] for block in at}
        lines.append(Line.over_seeds(name, points))
    return Plot(title, "block (0: what enters the first)", "‖∂x_l‖ / ‖∂x_L‖", lines, "y")


@claim(
    "C1",
    Source("004", "§4.2", "恒等映射，保证梯度至少为1"),
    Source("004", "§6.2", "梯度至少能以 $1.0$ 的倍率无损地传回前层"),
    Source("001", "§3", "保证了梯度至少可以无损地传导一部分到前一层"),
    says="A residual connection's gradient factor I + J_F is at least 1.",
    asks="σ_min(I + J_F) ≥ 1 at one token: residuals without norm and Pre-LN's, attention and "
    "feed-forward, four initialisations, d = 32, and F(x) = −x",
    parts={
        "gradient": "A loss's own gradient is no shorter below a Pre-LN layer than above it.",
        "small": "(§6.2) Where J_F's singular values are near 0, those of I + J_F are near 1: within ‖J_F‖.",
    },
)
def at_least_one(setup: Setup) -> Evidence:
    """σ_min of residual layers, and what they do to a real gradient."""
    cases = setup.cases(_residual_cases)
    own = [case for case in cases if not case.part]
    gradients = [case for case in cases if case.part == "gradient"]
    return Evidence(
        cases,
        Figure(
            "share of layers with σ_min(I + J_F) < 1, in %",
            {s: 100 * _below([case for case in own if case.seed == s]) for s in setup.seeds},
        ),
        notes=[
            f"The median σ_min is {float(np.median([case.value for case in own])):.3g}.",
            f"{_below(gradients):.0%} of the layers make the gradient shorter, the worst to "
            f"{min(case.value for case in gradients):.3g} of what it was.",
        ],
        plots=[_histogram([case.value for case in own])],
    )


def _below(cases: list[Case]) -> float:
    return sum(not case.holds for case in cases) / len(cases)


def _histogram(values: list[float]) -> Plot:
    ordered = sorted(values)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    line = Line("σ_min(I + J_F)", ordered, shares)
    return Plot("Smallest singular value of a residual layer", "σ_min", "share of layers below", [line])


def _residual_cases(seed: int) -> Iterator[Case]:
    yield _least(-torch.eye(WIDTH, dtype=F64), "F(x) = −x", seed)
    for scheme in ("residual-no-norm", "pre"):
        for init, words in INITS.items():
            model, ids = started(scheme, init=init, depth=4, width=WIDTH, seed=seed)
            for each in sublayers(model, ids):
                where = f"{scheme}, {words}, {each.kind} of block {each.block}"
                eye = torch.eye(WIDTH, dtype=F64)
                branch = jacobian(*at_last_token(each.step, each.x)) - eye
                yield _least(branch, where, seed)
                norm = float(torch.linalg.matrix_norm(branch, 2))
                for size in (0.1, 0.01):
                    farthest = float(np.abs(singular_values(eye + branch * size / norm) - 1).max())
                    yield Case(
                        seed,
                        f"{where}, ‖J_F‖ = {size}, farthest σ from 1",
                        farthest,
                        farthest <= size + 1e-10,
                        "small",
                    )
    yield from _gradient_cases(seed)


def _least(branch: Tensor, where: str, seed: int) -> Case:
    value = float(singular_values(torch.eye(len(branch), dtype=F64) + branch)[-1])
    return Case(seed, where, value, value >= 1 - 1e-10)


def _gradient_cases(seed: int) -> Iterator[Case]:
    for init, words in INITS.items():
        model, ids = started("pre", init=init, depth=8, width=WIDTH, seed=seed)
        states = [embedded(model, ids).requires_grad_()]
        layers = sublayers(model, ids)
        for each in layers:
            states.append(each.step(states[-1]))
        logits = model.head(model.final_norm(states[-1]))
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        norms = [float(gradient.norm()) for gradient in torch.autograd.grad(loss, states)]
        for each, below, above in zip(layers, norms, norms[1:], strict=False):
            where = f"{words}, {each.kind} of block {each.block} of 8"
            ratio = below / above
            yield Case(seed, where, ratio, ratio >= 1 - 1e-10, "gradient")


@claim(
    "C17",
    Source("004", "§5.3.2", "Post-Norm模型的梯度是随着深度指数级衰减的"),
    Source("001", "§3", "层数越深，底层梯度越可能消失"),
    Source("004", "§4.3", "指数级衰减"),
    says="At the start Post-LN's gradients decay exponentially from the top down.",
    asks="from exit to entry of 64 blocks the stream's gradient falls tenfold or more, and ln of it "
    "follows a straight line in l (R² ≥ 0.9): Post-LN with Xavier and N(0, 0.02²) weights, alone and with "
    "cross-attention to identical and to different tokens; d = 32",
    parts={
        "pre": "Pre-LN's decay no faster than linearly: the gradient at the entry is 1/64 of the exit's or "
        "more.",
        "flat": "With Pre-LN they need not decay at all: the gradient at the entry is no smaller than at the "
        "exit.",
    },
)
def decay_with_depth(setup: Setup) -> Evidence:
    """The stream's gradient through 64 blocks, each placement, with and without cross-attention."""
    cases: list[Case] = []
    curves: dict[str, list[list[float]]] = {}
    for seed in setup.seeds:
        for init in ("xavier", "normal"):
            for memory in MEMORIES:
                name = f"Post-LN, {INITS[init]}{', ' + memory if memory else ''}"
                norms = stream_gradients("post", init, seed, memory)
                curves.setdefault(name, []).append(norms)
                cases.append(_decay_case(norms, name, seed))
            name = f"Pre-LN, {INITS[init]}"
            norms = stream_gradients("pre", init, seed)
            curves.setdefault(name, []).append(norms)
            share = norms[0] / norms[-1]
            cases.append(Case(seed, name, share, share >= 1 / DEPTH, "pre"))
            cases.append(Case(seed, name, share, share >= 1, "flat"))
    crossed = curves["Post-LN, Xavier, cross-attention to identical tokens"]
    notes = [
        f"{name}: {min(rates):.3f} to {max(rates):.3f} a block"
        for name, found in curves.items()
        for rates in [[math.exp(_ratio(norms) / DEPTH) for norms in found]]
    ]
    return Evidence(
        cases,
        Figure(
            "gradient's factor a block, Post-LN with cross-attention to identical tokens",
            {s: math.exp(_ratio(norms) / DEPTH) for s, norms in zip(setup.seeds, crossed, strict=True)},
        ),
        plots=[_gradient_plot("Gradient by depth at the start", curves)],
        notes=notes,
    )


def _decay_case(norms: list[float], where: str, seed: int) -> Case:
    logs, at = np.log(np.maximum(norms, sys.float_info.min)), np.arange(len(norms))
    straight = float(np.corrcoef(at, logs)[0, 1] ** 2)
    decays = _ratio(norms) <= -TENFOLD and straight >= 0.9
    return Case(seed, f"{where}: ‖∂x_0‖/‖∂x_64‖", norms[0] / norms[-1], decays)
