"""The Jacobian of a whole stack: linearised, and its smallest singular value.

Layers are sublayers, as the source counts them: LN(x + F(x)) or x + F(LN(x)). One token goes through by
itself, so that F maps ℝᵈ to ℝᵈ.

Shapes: T tokens, D width, L layers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from normscope.claims.form import Case, Evidence, Figure, Line, Plot, Setup, Source, claim, lines_of
from normscope.claims.norm_jacobian import ROUND_OFF, distance
from normscope.claims.real_blocks import (
    F64,
    Sublayer,
    at_last_token,
    branch_jacobian,
    jacobian,
    started,
    sublayers,
    token_jacobians,
    walk,
)
from normscope.linalg import (
    product_log_lower_bound,
    product_log_singular_values,
    singular_values,
    weyl_lower_bound,
)
from normscope.nn import Decoder

STEPS = np.logspace(-2.5, -5.5, 7)
"""‖δx‖."""
LINEAR = 1.5
"""Slope of the remainder between that of a kink, 1, and that of a curve, 2."""


@claim(
    "A13",
    Source("000", "Assumption 6.1", "局部线性化假设"),
    Source("000", "Remark 6.2", "多层复合的线性化"),
    Source("000", "(39)–(41)"),
    says="A layer is g(x₀) + J δx up to o(‖δx‖).",
    hypothesis="the layer is differentiable at x₀",
    asks="the remainder's exponent in ‖δx‖ is at least 1.5 (a kink leaves 1, a smooth F gives 2), ‖δx‖ "
    "from 3e-3 to 3e-6, for Post-LN and Pre-LN feed-forwards with GELU and ReLU, at random x₀; and, for "
    "comparison, on a kink, which Assumption 6.1 excludes",
    parts={"chain": "(41): a stack's Jacobian is the product of its layers'."},
)
def local_linearisation(setup: Setup) -> Evidence:
    """The remainder's exponent, and the product of layers against autograd of the stack."""
    cases, remainders = [], []
    for seed in setup.seeds:
        for scheme in ("post", "pre"):
            for activation in ("gelu", "relu"):
                for kinked in (False, True) if activation == "relu" else (False,):
                    case, remainder = _remainder_case(scheme, activation, kinked, seed)
                    cases.append(case)
                    remainders.append((case, remainder))
            cases += _chain_cases(scheme, seed)
    smooth = [case.value for case in cases if not case.part and "gelu" in case.where]
    kinks = [case.value for case in cases if not case.part and not case.within]
    away = [case.value for case in cases if not case.part and case.within and "relu" in case.where]
    return Evidence(
        cases,
        Figure(
            "smallest exponent of the remainder, GELU",
            {s: min(c.value for c in cases if c.seed == s and "gelu" in c.where) for s in setup.seeds},
        ),
        plots=[_remainder_plot(remainders)],
        notes=[
            f"Exponents: GELU {min(smooth):.3f} to {max(smooth):.3f}; ReLU away from kinks "
            f"{min(away):.3f} to {max(away):.3f}, on one {min(kinks):.3f} to {max(kinks):.3f}."
        ],
    )


def _remainder_case(scheme: str, activation: str, kinked: bool, seed: int) -> tuple[Case, list[float]]:
    model, ids = started(scheme, init="xavier", depth=1, width=32, seed=seed, activation=activation)
    layer = sublayers(model, ids)[1]
    if kinked:
        _put_on_kink(layer)
    f, x = at_last_token(layer.step, layer.x)
    direction = torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([sign * t * direction / direction.norm() for t in STEPS for sign in (1, -1)])
    with torch.no_grad():
        remainder = (f(x + rows) - f(x[None]) - rows @ jacobian(f, x).T).norm(dim=1)
    sizes = remainder.reshape(-1, 2).amax(1).tolist()
    slope = float(np.polyfit(np.log(STEPS), np.log(sizes), 1)[0])
    where = f"{scheme}, {activation}{', x₀ on a kink' if kinked else ''}"
    return Case(seed, where, slope, slope >= LINEAR, within=not kinked), sizes


def _put_on_kink(layer: Sublayer) -> None:
    """Move the bias of the first hidden unit, so that what enters it at the last token is 0."""
    up = layer.branch.up
    assert isinstance(up, nn.Linear)
    with torch.no_grad():
        up.bias[0] -= up(layer.residual.norms["branch_in"](layer.x))[0, -1, 0]


def _remainder_plot(found: Sequence[tuple[Case, list[float]]]) -> Plot:
    lines = []
    for name in dict.fromkeys(case.where for case, _ in found):
        each = [sizes for case, sizes in found if case.where == name]
        points = {float(t): [sizes[i] for sizes in each] for i, t in enumerate(STEPS)}
        lines.append(Line.over_seeds(name, points))
    return Plot("What the linearisation leaves", "‖δx‖", "‖remainder‖", lines, "xy")


def _chain_cases(scheme: str, seed: int) -> Iterator[Case]:
    for depth in (1, 8, 32):
        model, _ = started(scheme, init="xavier", depth=depth, width=16, seed=seed)
        x = token(16, seed)
        chain = product(list(token_jacobians(model, x)))
        whole = jacobian(partial(_through_blocks, model), x)
        error = distance(chain, whole)
        where = f"{scheme}, {2 * depth} layers"
        yield Case(seed, where, error, error <= ROUND_OFF, "chain")


def _through_blocks(model: Decoder, x_BD: Tensor) -> Tensor:
    """Rows as tokens by themselves through all blocks."""
    state = x_BD.unsqueeze(1)
    for block in model.blocks:
        state = block(state)
    return state.squeeze(1)


def token(width: int, seed: int) -> Tensor:
    """One token of N(0, 1) [D], float64."""
    return torch.randn(width, dtype=F64, generator=torch.Generator().manual_seed(seed))


def product(factors: Sequence[Tensor]) -> Tensor:
    """J_L ⋯ J_1 in float64."""
    whole = factors[0]
    for factor in factors[1:]:
        whole = factor @ whole
    return whole


FLOOR_DEPTHS = (1, 8, 64)
FLOOR_STARTS = {
    "N(0, 0.02²), x₀ ~ N(0, 1)": ("normal", False),
    "GPT-2, x₀ ~ N(0, 1)": ("gpt2", False),
    "Xavier, x₀ ~ N(0, 1)": ("xavier", False),
    "N(0, 0.02²), its own embedding": ("normal", True),
}
Loose = dict[str, dict[float, dict[int, float]]]
"""Decades by which the bound is too low: by start, layers and seed, where the condition is met."""


@claim(
    "A15",
    Source("000", "Theorem 6.4", "L 层 Pre-LN 的 Jacobian"),
    Source("000", "(48)–(49)"),
    Source("000", "Remark 4.5", "无论网络深度如何堆叠"),
    says="The Jacobian of L layers of Pre-LN has σ_min ≥ Π σ_min(I + A) ≥ Π (1 − ‖A‖) > 0.",
    hypothesis="‖A‖ < 1 in every layer",
    asks="both inequalities hold up to round-off and the bound is positive: 2, 16 and 128 layers (1, "
    "8, 64 blocks), d = 32, GPT-2, N(0, 0.02²) and Xavier weights; σ_min by a graded product of autograd's "
    "Jacobians",
)
def floor_of_a_stack(setup: Setup) -> Evidence:
    """The bound against the measured σ_min, and by how many decades it is loose."""
    cases: list[Case] = []
    loose: Loose = {}
    lows: dict[str, dict[float, list[float]]] = {}
    for seed in setup.seeds:
        for name, (init, own) in FLOOR_STARTS.items():
            for depth in FLOOR_DEPTHS:
                bound, middle, smallest, largest = _floors(init, own, depth, seed)
                met = largest < 1
                holds = met and bound <= middle + 1e-9 and middle <= smallest + 1e-9 * depth
                where = f"{name}, {2 * depth} layers, largest ‖A‖ {largest:.3g}"
                cases.append(Case(seed, where, math.exp(smallest), holds, within=met))
                lows.setdefault(f"σ_min, {name}", {}).setdefault(2 * depth, []).append(math.exp(smallest))
                if met:
                    gap = (smallest - bound) / math.log(10)
                    loose.setdefault(name, {}).setdefault(2 * depth, {})[seed] = gap
                    lows.setdefault(f"bound, {name}", {}).setdefault(2 * depth, []).append(math.exp(bound))
    return Evidence(
        cases,
        _looseness(loose, cases),
        plots=[_lines_log("σ_min of Pre-LN stacks and its bound", "σ_min", lows)],
        notes=[_loose_words(name, by_depth) for name, by_depth in loose.items()],
        of="stacks: four starts × 2, 16, 128 layers",
    )


def _looseness(loose: Loose, cases: list[Case]) -> Figure:
    """Decades where the bound is loosest, on the seeds that meet the condition there; else the σ_min."""
    found = {(name, depth): gaps for name, by_depth in loose.items() for depth, gaps in by_depth.items()}
    if not found:
        return Figure(
            "smallest σ_min", {c.seed: min(o.value for o in cases if o.seed == c.seed) for c in cases}
        )
    name, depth = max(found, key=lambda key: max(found[key].values()))
    return Figure(f"decades that the bound is too low after {depth} layers, {name}", found[name, depth])


def _loose_words(name: str, by_depth: dict[float, dict[int, float]]) -> str:
    gaps = (
        f"{min(found.values()):.2g} to {max(found.values()):.2g} after {depth} layers (seeds: {len(found)})"
        for depth, found in sorted(by_depth.items())
    )
    return f"{name}: decades by which the bound is too low: {', '.join(gaps)}."


def _lines_log(title: str, y: str, points: dict[str, dict[float, list[float]]]) -> Plot:
    return Plot(title, "layers", y, lines_of(points), "xy")


def _floors(init: str, own: bool, depth: int, seed: int) -> tuple[float, float, float, float]:
    """ln Π(1 − ‖A‖), ln Π σ_min(I + A), ln σ_min of the stack, and the largest ‖A‖."""
    model, ids = started("pre", init=init, depth=depth, width=32, seed=seed, tokens=1)
    layers = sublayers(model, ids) if own else walk(model, token(32, seed)[None, None])[0]
    norms = [float(torch.linalg.matrix_norm(branch_jacobian(layer), 2)) for layer in layers]
    steps = torch.stack([jacobian(*at_last_token(layer.step, layer.x)) for layer in layers])
    bound = product_log_lower_bound([max(0.0, weyl_lower_bound(norm)) for norm in norms])
    middle = product_log_lower_bound([float(singular_values(step)[-1]) for step in steps])
    return bound, middle, float(product_log_singular_values(steps).log_values.min()), max(norms)


@claim(
    "A22",
    Source("000", "(49)", "奇异值乘法性质保证"),
    says="The smallest singular value of a product of square matrices is at least the product of theirs.",
    asks="ln σ_min of a float64 SVD of the product is not under Σ ln σ_min of the factors by more "
    "than round-off (1e-8): 2, 5 and 20 factors that are orthogonal times a number, near the identity, "
    "triangular, or a matrix and its inverse in turns, d = 3 and 16",
)
def least_of_a_product(setup: Setup) -> Evidence:
    """Dense singular values of products against the bound by those of the factors."""
    cases = []
    for seed in setup.seeds:
        for width in (3, 16):
            for count in (2, 5, 20):
                for name, factors in _factor_lists(width, count, seed):
                    values = singular_values(product(factors))
                    bound = product_log_lower_bound([float(singular_values(f)[-1]) for f in factors])
                    slack = float(np.log(values[-1])) - bound
                    floor = 1e-8 + width * count * 1e-15 * float(values[0] / values[-1])
                    where = f"d = {width}, {count} factors, {name}"
                    cases.append(Case(seed, where, slack, bool(slack >= -floor)))
    return Evidence(cases, Figure.smallest("smallest slack in ln σ_min", cases))


def _factor_lists(width: int, count: int, seed: int) -> Iterator[tuple[str, list[Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(width, width, dtype=F64, generator=generator) for _ in range(count)]
    eye = torch.eye(width, dtype=F64)
    orthogonal = [torch.linalg.qr(draw)[0] for draw in draws]
    shapes: dict[str, Callable[[int], Tensor]] = {
        "orthogonal times a number": lambda i: (1 + i / count) * orthogonal[i],
        "I + Gaussian/4√d": lambda i: eye + draws[i] / (4 * width**0.5),
        "I + upper triangle": lambda i: eye + draws[i].triu(1) / width,
        "a matrix and its inverse, in turns": lambda i: (
            eye + draws[0] / 10 if i % 2 else torch.linalg.inv(eye + draws[0] / 10)
        ),
    }
    for name, shape in shapes.items():
        yield name, [shape(i) for i in range(count)]
