"""The rank of a whole stack's Jacobian: at any depth, and end to end with the final norm.

Layers are sublayers, as the source counts them: LN(x + F(x)) or x + F(LN(x)). One token goes through by
itself, so that F maps ℝᵈ to ℝᵈ.

Shapes: T tokens, D width, L layers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from normscope.claims.deep_jacobian import product, token
from normscope.claims.form import Case, Evidence, Figure, Plot, Sentence, Setup, Source, claim, lines_of
from normscope.claims.norm_jacobian import ROUND_OFF
from normscope.claims.real_blocks import INITS, Sublayer, at_last_token, jacobian, started, walk
from normscope.linalg import left_kernel, numerical_rank, product_log_singular_values, singular_values
from normscope.nn.norms import NoNorm

RANK_WIDTH, RANK_DEPTHS = 16, (1, 4, 16, 64, 256)
PRIMES = (2**61 - 1, 2**31 - 1)


@claim(
    "A14",
    Source("000", "Theorem 6.3", "L 层 Post-LN 的 Jacobian"),
    Source("000", "(45)", "无论堆叠多少层, Post-LN 网络至少存在 2 个梯度被完全抹除的方向"),
    says="The Jacobian of L layers of Post-LN has rank at most d − 2, at any depth.",
    asks="rank ≤ 14 at d = 16 after 1, 4, 16, 64 and 256 layers, ε = 0: in exact arithmetic "
    "(modulo the primes 2⁶¹ − 1 and 2³¹ − 1, every float taken as the fraction that it is); and the "
    "product of autograd's Jacobians lets through no more than 1e-10 of the two gradients that the last LN "
    "erases; Xavier and N(0, 0.02²) weights",
    parts={
        "exactly": "No more is lost with depth: the rank stays d − 2.",
        "float64": Sentence(
            "The float64 product of the layers shows that rank: d − 2 singular values over 16 ε σ₁.",
            "σ₁/σ_{d−2} < 1e13",
        ),
    },
)
def rank_at_any_depth(setup: Setup) -> Evidence:
    """Exact ranks, float64's numerical ranks, and the range of log σ, by depth."""
    cases: list[Case] = []
    ranges: dict[str, dict[float, list[float]]] = {}
    ranks: dict[str, dict[float, list[float]]] = {}
    for seed in setup.seeds:
        for init in ("xavier", "normal"):
            for depth, found in _ranks(init, seed):
                where = f"{INITS[init]}, {depth} layers"
                cases += found.cases(seed, where)
                ranges.setdefault(INITS[init], {}).setdefault(depth, []).append(found.decades)
                ranks.setdefault(INITS[init], {}).setdefault(depth, []).append(found.plain)
    deepest = RANK_DEPTHS[-1]
    return Evidence(
        cases,
        Figure(
            f"log₁₀ σ₁/σ_(d−2) after {deepest} layers, Xavier",
            dict(zip(setup.seeds, ranges["Xavier"][deepest], strict=True)),
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
    )


def _lines(title: str, y: str, points: dict[str, dict[float, list[float]]], levels: dict[str, float]) -> Plot:
    lines = lines_of(points)
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
        whole = product(factors)
        values = singular_values(whole)
        basis = left_kernel(end, None, centred=True)[0]
        self.exact = exact
        self.passed = float((whole.T @ basis).norm(dim=0).max() / values[0])
        self.decades = float(logs[0] - logs[RANK_WIDTH - 3]) / math.log(10)
        self.plain = numerical_rank(values, RANK_WIDTH * 2.3e-16)[0]

    def cases(self, seed: int, where: str) -> Iterator[Case]:
        kept = RANK_WIDTH - 2
        name = f"{where}, exact rank"
        yield Case(seed, name, self.exact, self.exact <= kept)
        yield Case(seed, name, self.exact, self.exact == kept, "exactly")
        name = f"{where}, gain of the two gradients erased"
        yield Case(seed, name, self.passed, self.passed <= ROUND_OFF)
        met = self.decades < 13
        yield Case(seed, where, self.plain, self.plain == kept, "float64", met=met)


def _ranks(init: str, seed: int) -> Iterator[tuple[int, _Ranks]]:
    depth = max(RANK_DEPTHS) // 2
    model, _ = started("post", init=init, depth=depth, width=RANK_WIDTH, seed=seed, eps=0)
    layers, _ = walk(model, token(RANK_WIDTH, seed)[None, None])
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


@claim(
    "A24",
    Source("000", "Abstract", "保证了梯度在所有方向上的正下界"),
    Source("000", "§6.3", "Pre-LN 的梯度在任意方向上都不会被完全抹除"),
    Source("000", "§7", "避免了零空间的传播"),
    says="In a Pre-LN network, however deep, no direction of the gradient is erased.",
    hypothesis="the network is that of (46), which has no final norm",
    parts={"final": "The same of a model as it is built, with its final norm."},
    asks="rank d of ∂(what the head reads)/∂(what enters the first block) at one token, d = 32, ε = 0, "
    "1, 8 and 32 blocks; σ under 1e-13 σ₁ counts as erased: `pre` and `gpt2` as they are, with their final "
    "norm, and without it",
)
def pre_ln_with_its_final_norm(setup: Setup) -> Evidence:
    """Directions lost end to end, with and without the norm that Pre-LN ends in."""
    cases = [
        _end_to_end(scheme, final, depth, seed)
        for seed in setup.seeds
        for scheme in ("pre", "gpt2")
        for final in (None, False)
        for depth in (1, 8, 32)
    ]
    return Evidence(cases, Figure.largest("most directions erased a token, with the final norm", cases))


def num_erased(factors: Sequence[Tensor]) -> int:
    """Directions of a product whose σ is under 1e-13 σ₁."""
    logs = product_log_singular_values(torch.stack(list(factors))).log_values
    return int((logs < logs[0] + math.log(1e-13)).sum())


def _end_to_end(scheme: str, final: bool | None, depth: int, seed: int) -> Case:
    options: dict[str, Any] = {} if final is None else {"final_norm": final}
    model, _ = started(scheme, init="xavier", depth=depth, width=32, seed=seed, eps=0, **options)
    x = token(32, seed)
    layers, end = walk(model, x[None, None])
    factors = [jacobian(*at_last_token(layer.step, layer.x)) for layer in layers]
    factors.append(jacobian(model.final_norm, end[0, 0]))
    lost = num_erased(factors)
    has_none = isinstance(model.final_norm, NoNorm)
    where = f"{scheme}, {depth} blocks, {'no final norm' if has_none else 'its final norm'}"
    return Case(seed, where, lost, lost == 0, "" if has_none else "final")
