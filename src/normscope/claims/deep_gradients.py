"""Gradients through depth at the start: whether they explode or vanish, and whether a residual's factor is 1.

Shapes: B batch, T tokens, D width.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.claims.at_start import slope, stack_of
from normscope.claims.experiments import of_part, share_held, spread, values
from normscope.claims.form import Case, Evidence, Figure, Line, Setup, claim, flat, lines_along, mapped, plots
from normscope.claims.real_blocks import F64, INITS, embedded, one_token, started, step_jacobian, sublayers
from normscope.linalg import product_log_singular_values, singular_values
from normscope.nn import Context
from normscope.nn.stack import Stack

WIDTH, BATCH, TOKENS, DEPTH = 32, 2, 16, 64
MEMORIES = {"": 0, "cross-attention to identical tokens": 1, "cross-attention to different tokens": TOKENS}
"""The other input of each block → different tokens in it."""
TENFOLD = math.log(10)
Norms = Mapping[str, Mapping[int, Sequence[float]]]
"""`stream_gradients` by stack and seed."""


def stream_gradients(scheme: str, init: str, memory: str = "", *, seed: int) -> list[float]:
    """‖∂(random linear loss of the last block's output)/∂x_l‖, l = 0 … 64, at the start, x_0 ~ N(0, 1)."""
    stack, different = _stack(scheme, init, seed, cross=bool(memory)), MEMORIES[memory]
    read = torch.randn(BATCH, different, WIDTH, dtype=F64).expand(-1, TOKENS, -1) if different else None
    context = Context(memory=read)
    states = [torch.randn(BATCH, TOKENS, WIDTH, dtype=F64, requires_grad=True)]
    for block in stack.blocks:
        states.append(block(states[-1], context))
    loss = (states[-1] * torch.randn_like(states[-1])).sum()
    return [float(gradient.norm()) for gradient in torch.autograd.grad(loss, states)]


def _stack(scheme: str, init: str, seed: int, **options: Any) -> Stack:
    stack = stack_of(scheme, DEPTH, seed, width=WIDTH, heads=2, init=init, activation="relu", **options)
    return stack.to(F64).requires_grad_(False)


def _ratio(norms: Sequence[float]) -> float:
    """ln ‖∂x_0‖/‖∂x_L‖."""
    smallest = sys.float_info.min  # a gradient that underflows is as small as can be
    return math.log(max(norms[0], smallest) / max(norms[-1], smallest))


def _lines(norms: Norms) -> list[Line]:
    at = range(0, DEPTH + 1, 4)
    return lines_along(at, mapped(norms, lambda found: [found[block] / found[-1] for block in at]))


@claim("B10")
def explode_or_vanish(setup: Setup) -> Evidence:
    """Gain of the gradient by depth, beside the singular values of single layers."""
    stacks = itertools.product(("post", "pre"), ("xavier", "normal"))
    norms = setup.by_seed(stacks, lambda stack, seed: stream_gradients(*stack, seed=seed))
    gains = mapped(norms, _ratio)
    named = {f"{scheme}, {INITS[init]}": found for (scheme, init), found in norms.items()}
    cases = [case for stack, seed, gain in flat(gains) for case in _factor_cases(*stack, gain, seed)]
    cases += setup.cases(_single_number_cases)
    for init, seed in itertools.product(("xavier", "normal"), setup.seeds):
        where, post, pre = INITS[init], gains["post", init][seed], gains["pre", init][seed]
        p = _range_slope(init, seed)
        cases.append(Case(seed, where, post, abs(post) >= TENFOLD, "post"))
        cases.append(Case(seed, where, pre, abs(pre) <= abs(post) / 2, "pre"))
        cases.append(Case(seed, where, p, 0.7 <= p <= 1.3, "extremes"))
    return Evidence(
        cases,
        Figure("ln ‖∂x_0‖/‖∂x_64‖, Post-LN, Xavier", gains["post", "xavier"]),
        plots=plots("B10", _lines(named)),
    )


def _factor_cases(scheme: str, init: str, gain: float, seed: int) -> Iterator[Case]:
    """Both halves of the sentence, of one stack: by the first eight layers, at one token."""
    layers, _ = one_token(_stack(scheme, init, seed), WIDTH, seed)
    spectra = [singular_values(step_jacobian(layer)) for layer in layers[:8]]
    high, low = max(each[0] for each in spectra), min(each[-3] for each in spectra)
    for sigma, says, holds in ((high, high > 1, gain >= TENFOLD), (low, low < 1, gain <= -TENFOLD)):
        layer = f"{scheme}, {INITS[init]}: a layer's σ is {sigma:.3g}"
        if says:
            yield Case(seed, f"{layer}, the gradient over 64 blocks changes by e to the", gain, holds)


def _single_number_cases(seed: int) -> Iterator[Case]:
    for factor in (1.5, 0.7):
        gain = math.log(math.prod([factor] + [1.0] * 63))
        where = f"64 numbers, one of them {factor}: the product's logarithm"
        yield Case(seed, where, gain, gain >= TENFOLD if factor > 1 else gain <= -TENFOLD)


def _range_slope(init: str, seed: int) -> float:
    """Exponent in depth of ln σ_max/σ_(d−2), from 8 to 64 layers of one token."""
    model, _ = started("post", init=init, depth=32, width=16, seed=seed)
    factors = torch.stack([step_jacobian(layer) for layer in one_token(model, 16, seed)[0]])

    def log_range(depth: int) -> float:
        logs = product_log_singular_values(factors[:depth]).log_values
        return float(logs[0] - logs[13])

    depths = (8, 16, 32, 64)
    return slope(depths, [log_range(depth) for depth in depths])


@claim("C1")
def at_least_one(setup: Setup) -> Evidence:
    """σ_min of residual layers, and their effect on a real gradient."""
    cases = setup.cases(_residual_cases, _gradient_cases)
    under = [replace(case, holds=not case.holds) for case in cases]
    gradients, ordered = of_part(cases, "gradient"), sorted(values(cases))
    line = Line("σ_min(I + J_F)", ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
    return Evidence(
        cases,
        Figure.share("share of layers with σ_min(I + J_F) < 1, in %", under),
        notes=[
            f"The median σ_min is {statistics.median(ordered):.3g}.",
            f"{1 - share_held(gradients):.0%} of the layers make the gradient shorter, the worst to "
            f"{min(values(cases, 'gradient')):.3g} of what it was.",
        ],
        plots=plots("C1", [line]),
    )


def _residual_cases(seed: int) -> Iterator[Case]:
    eye = torch.eye(WIDTH, dtype=F64)
    yield _least(-eye, "F(x) = −x", seed)
    for scheme in ("residual-no-norm", "pre"):
        for init, words in INITS.items():
            model, ids = started(scheme, init=init, depth=4, width=WIDTH, seed=seed)
            for each in sublayers(model, ids):
                where = f"{scheme}, {words}, {each.name}"
                branch = step_jacobian(each) - eye
                yield _least(branch, where, seed)
                norm = float(torch.linalg.matrix_norm(branch, 2))
                for size in (0.1, 0.01):
                    farthest = float(np.abs(singular_values(eye + branch * size / norm) - 1).max())
                    said = f"{where}, ‖J_F‖ = {size}, farthest σ from 1"
                    yield Case(seed, said, farthest, farthest <= size + 1e-10, "small")


def _least(branch: Tensor, where: str, seed: int) -> Case:
    value = float(singular_values(torch.eye(len(branch), dtype=F64) + branch)[-1])
    return Case.at_least(seed, where, value, 1 - 1e-10)


def _gradient_cases(seed: int) -> Iterator[Case]:
    for init, words in INITS.items():
        model, ids = started("pre", init=init, depth=8, width=WIDTH, seed=seed)
        states = [embedded(model, ids).requires_grad_()]
        layers = sublayers(model, ids)
        for each in layers:
            states.append(each(states[-1]))
        logits = model.head(model.final_norm(states[-1]))
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        norms = [float(gradient.norm()) for gradient in torch.autograd.grad(loss, states)]
        for each, below, above in zip(layers, norms, norms[1:], strict=False):
            where = f"{words}, {each.name} of 8"
            yield Case.at_least(seed, where, below / above, 1 - 1e-10, "gradient")


@claim("C17")
def decay_with_depth(setup: Setup) -> Evidence:
    """The stream's gradient through 64 blocks, each placement, with and without cross-attention."""
    stacks = {
        ", ".join(filter(None, (label, INITS[init], memory))): (scheme, init, memory)
        for init in ("xavier", "normal")
        for label, scheme, memories in (("Post-LN", "post", MEMORIES), ("Pre-LN", "pre", ("",)))
        for memory in memories
    }
    norms = setup.by_seed(stacks, lambda name, seed: stream_gradients(*stacks[name], seed=seed))
    cases = [case for each in flat(norms) for case in _decay_cases(*each)]
    rates = mapped(norms, lambda found: math.exp(_ratio(found) / DEPTH))
    memory = "cross-attention to identical tokens"
    return Evidence(
        cases,
        Figure(f"gradient's factor a block, Post-LN with {memory}", rates[f"Post-LN, Xavier, {memory}"]),
        plots=plots("C17", _lines(norms)),
        notes=[f"{name}: {spread(by_seed.values(), '.3f')} a block" for name, by_seed in rates.items()],
    )


def _decay_cases(name: str, seed: int, norms: Sequence[float]) -> Iterator[Case]:
    share = norms[0] / norms[-1]
    if name.startswith("Pre-LN"):
        yield Case(seed, name, share, share >= 1 / DEPTH, "pre")
        yield Case(seed, name, share, share >= 1, "flat")
    else:
        logs = np.log(np.maximum(norms, sys.float_info.min)).tolist()
        straight = statistics.correlation(range(len(logs)), logs) ** 2
        decays = _ratio(norms) <= -TENFOLD and straight >= 0.9
        yield Case(seed, f"{name}: ‖∂x_0‖/‖∂x_64‖", share, decays)
