"""The Jacobian of a whole stack: linearised, its rank at any depth, its smallest singular value.

Layers are sublayers, as the source counts them: LN(x + F(x)) or x + F(LN(x)). One token goes through by
itself, so that F maps ℝᵈ to ℝᵈ.

Shapes: T tokens, D width, L layers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure, Line, Plot
from normscope.claims.look import Look
from normscope.claims.norm_jacobian import distance
from normscope.claims.real_blocks import (
    F64,
    Sublayer,
    at_last_token,
    jacobian,
    started,
    sublayers,
    token_jacobians,
    walk,
)
from normscope.claims.sources import Source
from normscope.claims.weyl import INITS, ROUND_OFF, branch_jacobian
from normscope.linalg import (
    left_kernel,
    numerical_rank,
    product_log_lower_bound,
    product_log_singular_values,
    singular_values,
    weyl_lower_bound,
)
from normscope.nn import Decoder
from normscope.nn.norms import NoNorm

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
    condition="F has no kink at x₀",
    hypothesis="the remainder's exponent in ‖δx‖ is at least 1.5 (a kink leaves 1, a smooth F gives 2), ‖δx‖ "
    "from 3e-3 to 3e-6, for Post-LN and Pre-LN feed-forwards with GELU and ReLU, at random x₀ and on a kink",
    parts={"chain": Sentence("(41): a stack's Jacobian is the product of its layers'.")},
)
def local_linearisation(look: Look) -> Evidence:
    """The remainder's exponent, and the product of layers against autograd of the stack."""
    cases, remainders = [], []
    for seed in look.seeds:
        for scheme in ("post", "pre"):
            for activation in ("gelu", "relu"):
                for kinked in (False, True) if activation == "relu" else (False,):
                    case, remainder = _remainder_case(scheme, activation, kinked, seed)
                    cases.append(case)
                    remainders.append((case, remainder))
            cases += _chain_cases(scheme, seed)
    smooth = [case.value for case in cases if not case.part and "gelu" in case.where]
    kinks = [case.value for case in cases if not case.part and not case.met]
    away = [case.value for case in cases if not case.part and case.met and "relu" in case.where]
    return Evidence(
        cases=cases,
        figure=Figure(
            "smallest exponent of the remainder, GELU",
            {s: min(c.value for c in cases if c.seed == s and "gelu" in c.where) for s in look.seeds},
        ),
        plots=[_remainder_plot(remainders)],
        notes=[
            f"Exponents: GELU {min(smooth):.3f} to {max(smooth):.3f}; ReLU away from kinks "
            f"{min(away):.3f} to {max(away):.3f}, on one {min(kinks):.3f} to {max(kinks):.3f}."
        ],
        of="blocks",
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
    return Case(seed=seed, where=where, value=slope, holds=slope >= LINEAR, met=not kinked), sizes


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
        x = _token(16, seed)
        product = _product(list(token_jacobians(model, x)))
        whole = jacobian(partial(_through_blocks, model), x)
        error = distance(product, whole)
        where = f"{scheme}, {2 * depth} layers"
        yield Case(seed=seed, where=where, value=error, holds=error <= ROUND_OFF, part="chain")


def _through_blocks(model: Decoder, x_BD: Tensor) -> Tensor:
    """Rows as tokens by themselves through all blocks."""
    state = x_BD.unsqueeze(1)
    for block in model.blocks:
        state = block(state)
    return state.squeeze(1)


def _token(width: int, seed: int) -> Tensor:
    return torch.randn(width, dtype=F64, generator=torch.Generator().manual_seed(seed))


def _product(factors: Sequence[Tensor]) -> Tensor:
    """J_L ⋯ J_1 in float64."""
    whole = factors[0]
    for factor in factors[1:]:
        whole = factor @ whole
    return whole


RANK_WIDTH, RANK_DEPTHS = 16, (1, 4, 16, 64, 256)
PRIMES = (2**61 - 1, 2**31 - 1)


@claim(
    "A14",
    Source("000", "Theorem 6.3", "L 层 Post-LN 的 Jacobian"),
    Source("000", "(45)", "无论堆叠多少层, Post-LN 网络至少存在 2 个梯度被完全抹除的方向"),
    says="The Jacobian of L layers of Post-LN has rank at most d − 2, at any depth.",
    hypothesis="rank ≤ 14 at d = 16 after 1, 4, 16, 64 and 256 layers, ε = 0: in exact arithmetic "
    "(modulo the primes 2⁶¹ − 1 and 2³¹ − 1, every float taken as the fraction that it is); and the "
    "product of autograd's Jacobians lets through no more than 1e-10 of the two gradients that the last LN "
    "erases; Xavier and N(0, 0.02²) weights",
    parts={
        "exactly": Sentence("No more is lost with depth: the rank stays d − 2."),
        "float64": Sentence(
            "The float64 product of the layers shows that rank: d − 2 singular values over 16 ε σ₁.",
            "σ₁/σ_{d−2} < 1e13",
        ),
    },
)
def rank_at_any_depth(look: Look) -> Evidence:
    """Exact ranks, float64's numerical ranks, and the range of log σ, by depth."""
    cases: list[Case] = []
    ranges: dict[str, dict[float, list[float]]] = {}
    ranks: dict[str, dict[float, list[float]]] = {}
    for seed in look.seeds:
        for init in ("xavier", "normal"):
            for depth, found in _ranks(init, seed):
                where = f"{INITS[init]}, {depth} layers"
                cases += found.cases(seed, where)
                ranges.setdefault(INITS[init], {}).setdefault(depth, []).append(found.decades)
                ranks.setdefault(INITS[init], {}).setdefault(depth, []).append(found.plain)
    deepest = RANK_DEPTHS[-1]
    return Evidence(
        cases=cases,
        figure=Figure(
            f"log₁₀ σ₁/σ_(d−2) after {deepest} layers, Xavier",
            dict(zip(look.seeds, ranges["Xavier"][deepest], strict=True)),
        ),
        plots=[
            _lines("Range of the singular values of Post-LN", "log₁₀ σ₁/σ_(d−2)", ranges, {"float64": 15.7}),
            _lines("Numerical rank of the float64 product", "rank", ranks, {"d − 2": RANK_WIDTH - 2}),
        ],
        notes=[
            f"Numerical rank of the float64 product after {deepest} layers: "
            + "; ".join(
                f"{name} {min(by[deepest]):.0f} to {max(by[deepest]):.0f}" for name, by in ranks.items()
            )
            + f", of {RANK_WIDTH - 2}."
        ],
        of="products",
    )


def _lines(title: str, y: str, points: dict[str, dict[float, list[float]]], levels: dict[str, float]) -> Plot:
    lines = [Line.over_seeds(name, by_depth) for name, by_depth in points.items()]
    return Plot(title, "layers", y, lines, "x", levels)


class _Ranks:
    """Of one product: exact, and as float64 has it.

    Attributes:
        exact: rank in exact arithmetic.
        passed: what the product lets through of the two gradients that its last norm erases, beside σ₁.
        decades: log₁₀ σ₁/σ_(d−2).
        plain: numerical rank of the float64 product.
    """

    def __init__(self, exact: int, factors: Sequence[Tensor], end: Tensor) -> None:
        logs = product_log_singular_values(torch.stack(list(factors))).log_values
        product = _product(factors)
        values = singular_values(product)
        basis = left_kernel(end, None, centred=True)[0]
        self.exact = exact
        self.passed = float((product.T @ basis).norm(dim=0).max() / values[0])
        self.decades = float(logs[0] - logs[RANK_WIDTH - 3]) / math.log(10)
        self.plain = numerical_rank(values, RANK_WIDTH * 2.3e-16)[0]

    def cases(self, seed: int, where: str) -> Iterator[Case]:
        kept = RANK_WIDTH - 2
        name = f"{where}, exact rank"
        yield Case(seed=seed, where=name, value=self.exact, holds=self.exact <= kept)
        yield Case(seed=seed, where=name, value=self.exact, holds=self.exact == kept, part="exactly")
        name = f"{where}, gain of the two gradients erased"
        yield Case(seed=seed, where=name, value=self.passed, holds=self.passed <= ROUND_OFF)
        met = self.decades < 13
        yield Case(
            seed=seed, where=where, value=self.plain, holds=self.plain == kept, met=met, part="float64"
        )


def _ranks(init: str, seed: int) -> Iterator[tuple[int, _Ranks]]:
    depth = max(RANK_DEPTHS) // 2
    model, _ = started("post", init=init, depth=depth, width=RANK_WIDTH, seed=seed, eps=0)
    layers, _ = walk(model, _token(RANK_WIDTH, seed)[None, None])
    factors = [jacobian(*at_last_token(layer.step, layer.x)) for layer in layers]
    exact = [_exact_factor(layer) for layer in layers]
    with torch.no_grad():
        ends = [layer.step(layer.x)[0, -1] for layer in layers]
    running: dict[int, list[list[int]]] = {}
    for number, factor in enumerate(exact, 1):
        for prime in PRIMES:
            before = running.get(prime)
            of_prime = _modulo(factor, prime)
            running[prime] = of_prime if before is None else _times(of_prime, before, prime)
        if number in RANK_DEPTHS:
            rank = max(_rank(running[prime], prime) for prime in PRIMES)
            yield number, _Ranks(rank, factors[:number], ends[number - 1])


def _exact_factor(layer: Sublayer) -> tuple[list[float], list[list[float]]]:
    """z and J_F of a Post-LN layer, whose Jacobian is (1/σ)(I − 11ᵀ/d − z̄z̄ᵀ/‖z̄‖²)(I + J_F)."""
    branch = jacobian(*at_last_token(layer.apply, layer.x))
    with torch.no_grad():
        z = (layer.x + layer.apply(layer.x))[0, -1]
    return z.tolist(), branch.tolist()


def _modulo(factor: tuple[list[float], list[list[float]]], prime: int) -> list[list[int]]:
    """σ J [D, D] modulo `prime`, without rounding."""
    z, branch = factor[0], factor[1]
    width, whole = len(z), range(len(z))
    z_mod = [_fraction(value, prime) for value in z]
    mean = sum(z_mod) * pow(width, -1, prime)
    centred = [(value - mean) % prime for value in z_mod]
    over = pow(sum(value * value for value in centred), -1, prime)
    share = pow(width, -1, prime)
    norm = [[((i == j) - share - centred[i] * centred[j] * over) % prime for j in whole] for i in whole]
    sum_with = [[((i == j) + _fraction(branch[i][j], prime)) % prime for j in whole] for i in whole]
    return _times(norm, sum_with, prime)


def _fraction(value: float, prime: int) -> int:
    above, below = value.as_integer_ratio()
    return above * pow(below, -1, prime) % prime


def _times(a: list[list[int]], b: list[list[int]], prime: int) -> list[list[int]]:
    columns = list(zip(*b, strict=True))
    return [[sum(x * y for x, y in zip(row, column, strict=True)) % prime for column in columns] for row in a]


def _rank(matrix: list[list[int]], prime: int) -> int:
    """By Gauss's elimination modulo `prime`: never above the rank over the rationals."""
    rows, rank = [list(row) for row in matrix], 0
    for column in range(len(rows)):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        inverse = pow(rows[rank][column], -1, prime)
        for i in range(rank + 1, len(rows)):
            factor = rows[i][column] * inverse
            rows[i] = [(x - factor * y) % prime for x, y in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


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
    condition="‖A‖ < 1 in every layer",
    hypothesis="both inequalities hold up to round-off and the bound is positive: 2, 16 and 128 layers (1, "
    "8, 64 blocks), d = 32, GPT-2, N(0, 0.02²) and Xavier weights; σ_min by a graded product of autograd's "
    "Jacobians",
)
def floor_of_a_stack(look: Look) -> Evidence:
    """The bound against the measured σ_min, and by how many decades it is loose."""
    cases: list[Case] = []
    loose: Loose = {}
    lows: dict[str, dict[float, list[float]]] = {}
    for seed in look.seeds:
        for name, (init, own) in FLOOR_STARTS.items():
            for depth in FLOOR_DEPTHS:
                bound, middle, smallest, largest = _floors(init, own, depth, seed)
                met = largest < 1
                holds = met and bound <= middle + 1e-9 and middle <= smallest + 1e-9 * depth
                where = f"{name}, {2 * depth} layers, largest ‖A‖ {largest:.3g}"
                cases.append(Case(seed=seed, where=where, value=math.exp(smallest), holds=holds, met=met))
                lows.setdefault(f"σ_min, {name}", {}).setdefault(2 * depth, []).append(math.exp(smallest))
                if met:
                    gap = (smallest - bound) / math.log(10)
                    loose.setdefault(name, {}).setdefault(2 * depth, {})[seed] = gap
                    lows.setdefault(f"bound, {name}", {}).setdefault(2 * depth, []).append(math.exp(bound))
    return Evidence(
        cases=cases,
        figure=_looseness(loose, cases),
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
    return Plot(title, "layers", y, [Line.over_seeds(name, by) for name, by in points.items()], "xy")


def _floors(init: str, own: bool, depth: int, seed: int) -> tuple[float, float, float, float]:
    """ln Π(1 − ‖A‖), ln Π σ_min(I + A), ln σ_min of the stack, and the largest ‖A‖."""
    model, ids = started("pre", init=init, depth=depth, width=32, seed=seed, tokens=1)
    layers = sublayers(model, ids) if own else walk(model, _token(32, seed)[None, None])[0]
    norms = [float(torch.linalg.matrix_norm(branch_jacobian(layer), 2)) for layer in layers]
    steps = torch.stack([jacobian(*at_last_token(layer.step, layer.x)) for layer in layers])
    bound = product_log_lower_bound([max(0.0, weyl_lower_bound(norm)) for norm in norms])
    middle = product_log_lower_bound([float(singular_values(step)[-1]) for step in steps])
    return bound, middle, float(product_log_singular_values(steps).log_values.min()), max(norms)


@claim(
    "A22",
    Source("000", "(49)", "奇异值乘法性质保证"),
    says="The smallest singular value of a product of square matrices is at least the product of theirs.",
    hypothesis="ln σ_min of a float64 SVD of the product is not under Σ ln σ_min of the factors by more "
    "than round-off (1e-8): 2, 5 and 20 factors that are orthogonal times a number, near the identity, "
    "triangular, or a matrix and its inverse in turns, d = 3 and 16",
)
def least_of_a_product(look: Look) -> Evidence:
    """Dense singular values of products against the bound by those of the factors."""
    cases = []
    for seed in look.seeds:
        for width in (3, 16):
            for count in (2, 5, 20):
                for name, factors in _factor_lists(width, count, seed):
                    values = singular_values(_product(factors))
                    bound = product_log_lower_bound([float(singular_values(f)[-1]) for f in factors])
                    slack = float(np.log(values[-1])) - bound
                    floor = 1e-8 + width * count * 1e-15 * float(values[0] / values[-1])
                    where = f"d = {width}, {count} factors, {name}"
                    cases.append(Case(seed=seed, where=where, value=slack, holds=bool(slack >= -floor)))
    return Evidence(
        cases=cases,
        figure=Figure(
            "smallest slack in ln σ_min",
            {seed: min(case.value for case in cases if case.seed == seed) for seed in look.seeds},
        ),
        of="products",
    )


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


@claim(
    "A24",
    Source("000", "Abstract", "保证了梯度在所有方向上的正下界"),
    Source("000", "§6.3", "Pre-LN 的梯度在任意方向上都不会被完全抹除"),
    Source("000", "§7", "避免了零空间的传播"),
    says="In a Pre-LN network, however deep, no direction of the gradient is erased.",
    condition="there is no final norm",
    hypothesis="rank d of ∂(what the head reads)/∂(what enters the first block) at one token, d = 32, ε = 0, "
    "1, 8 and 32 blocks; σ under 1e-13 σ₁ counts as erased: `pre` and `gpt2` as they are, with their final "
    "norm, and without it",
)
def pre_ln_with_its_final_norm(look: Look) -> Evidence:
    """Directions lost end to end, with and without the norm that Pre-LN ends in."""
    cases = [
        _end_to_end(scheme, final, depth, seed)
        for seed in look.seeds
        for scheme in ("pre", "gpt2")
        for final in (None, False)
        for depth in (1, 8, 32)
    ]
    return Evidence(
        cases=cases,
        figure=Figure(
            "most directions erased a token",
            {s: max(c.value for c in cases if c.seed == s) for s in look.seeds},
        ),
        of="stacks, half of them built without it",
    )


def num_erased(factors: Sequence[Tensor]) -> int:
    """Directions of a product whose σ is under 1e-13 σ₁."""
    logs = product_log_singular_values(torch.stack(list(factors))).log_values
    return int((logs < logs[0] + math.log(1e-13)).sum())


def _end_to_end(scheme: str, final: bool | None, depth: int, seed: int) -> Case:
    options: dict[str, Any] = {} if final is None else {"final_norm": final}
    model, _ = started(scheme, init="xavier", depth=depth, width=32, seed=seed, eps=0, **options)
    x = _token(32, seed)
    layers, end = walk(model, x[None, None])
    factors = [jacobian(*at_last_token(layer.step, layer.x)) for layer in layers]
    factors.append(jacobian(model.final_norm, end[0, 0]))
    lost = num_erased(factors)
    has_none = isinstance(model.final_norm, NoNorm)
    where = f"{scheme}, {depth} blocks, {'no final norm' if has_none else 'its final norm'}"
    return Case(seed=seed, where=where, value=lost, holds=lost == 0, met=has_none)
