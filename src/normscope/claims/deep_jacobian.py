"""The Jacobian of a whole stack: linearised, and its rank at any depth and end to end with the final norm.

Layers are sublayers, as the source counts them: LN(x + F(x)) or x + F(LN(x)). One token goes through by
itself, so that F maps ℝᵈ to ℝᵈ.

Shapes: T tokens, D width, L layers.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.claims import real_blocks
from normscope.claims.at_start import slope
from normscope.claims.exact import Exact, as_exact, exact_rank, scaled_norm_jacobian
from normscope.claims.experiments import ROUND_OFF, distance, gaussian, jacobian, of_part, spread, values
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, flat, lines_along, lines_by, plots
from normscope.claims.real_blocks import INITS, Layer, product, started, step_jacobian
from normscope.linalg import left_kernel, numerical_rank, product_log_singular_values, singular_values
from normscope.nn import FeedForward
from normscope.nn.norms import NoNorm

STEPS = [float(size) for size in np.logspace(-2.5, -5.5, 7)]
"""‖δx‖."""
LINEAR = 1.5
"""Slope of the remainder between that of a kink, 1, and that of a curve, 2."""

LAYERS = {
    f"{scheme}, {activation}{', x₀ on a kink' if kinked else ''}": (scheme, activation, kinked)
    for scheme in ("post", "pre")
    for activation, kinked in (("gelu", False), ("relu", False), ("relu", True))
}


@claim("A13")
def local_linearisation(setup: Setup) -> Evidence:
    """The remainder's exponent, and the product of layers against autograd of the stack."""
    remainders = setup.by_seed(LAYERS, lambda name, seed: _remainders(*LAYERS[name], seed))
    cases = [
        Case.at_least(seed, name, slope(STEPS, sizes), LINEAR, within="kink" not in name)
        for name, seed, sizes in flat(remainders)
    ]
    smooth = [case for case in cases if "gelu" in case.where]
    kinks = [case for case in cases if not case.within]
    away = [case for case in cases if case.within and "relu" in case.where]
    gelu, relu, kink = (spread(values(each), ".3f") for each in (smooth, away, kinks))
    return Evidence(
        [*cases, *setup.cases(_chain_cases)],
        Figure.smallest("smallest exponent of the remainder, GELU", smooth),
        plots=plots("A13", lines_along(STEPS, remainders)),
        notes=[f"Exponents: GELU {gelu}; ReLU away from kinks {relu}, on one {kink}."],
    )


def _remainders(scheme: str, activation: str, kinked: bool, seed: int) -> list[float]:
    """‖remainder‖ at each of `STEPS`, the larger of both directions."""
    model, ids = started(scheme, init="xavier", depth=1, width=32, seed=seed, activation=activation)
    layer = real_blocks.sublayers(model, ids)[1]
    if kinked:
        _put_on_kink(layer)
    f, x = real_blocks.at_last_token(layer, layer.x)
    direction = torch.nn.functional.normalize(gaussian(seed, *x.shape))
    j_DD, y = jacobian(f, x), f(x)

    def remainder(step: Tensor) -> float:
        return float((f(x + step) - y - step @ j_DD.T).norm())

    return [max(remainder(size * direction), remainder(-size * direction)) for size in STEPS]


def _put_on_kink(layer: Layer) -> None:
    """Move the bias of the first hidden unit, so that what enters it at the last token is 0."""
    assert isinstance(layer.branch, FeedForward)
    up: Any = layer.branch.up
    with torch.no_grad():
        up.bias[0] -= up(layer.residual.norms["branch_in"](layer.x))[0, -1, 0]


def _chain_cases(seed: int) -> Iterator[Case]:
    for scheme, depth in itertools.product(("post", "pre"), (1, 8, 32)):
        model, _ = started(scheme, init="xavier", depth=depth, width=16, seed=seed, final_norm=False)
        chain = product([step_jacobian(layer) for layer in real_blocks.one_token(model, 16, seed)[0]])
        error = distance(chain, jacobian(model.run, gaussian(seed, 1, 1, 16)))
        yield Case(seed, f"{scheme}, {2 * depth} layers", error, error <= ROUND_OFF, "chain")


WIDTH, KEPT = 16, 14
"""d and d − 2."""
DEPTHS = (1, 4, 16, 64, 256)
PRIMES = (2**61 - 1, 2**31 - 1)


@claim("A14")
def rank_at_any_depth(setup: Setup) -> Evidence:
    """Exact ranks, float64's numerical ranks, and the range of log σ, by depth."""
    cases = setup.cases(partial(_rank_cases, "xavier"), partial(_rank_cases, "normal"))
    ranks = of_part(cases, "float64")
    decades = [replace(case, value=float(case.at["decades"])) for case in ranks]
    kept = lines_by(ranks, "depth", "init")
    deepest = [case for case in decades if case.at["depth"] == DEPTHS[-1] and case.at["init"] == "Xavier"]
    ends = (f"{line.name} {line.low[-1]:.0f} to {line.high[-1]:.0f}" for line in kept)
    return Evidence(
        cases,
        Figure.largest(f"log₁₀ σ₁/σ_(d−2) after {DEPTHS[-1]} layers, Xavier", deepest, "float64"),
        plots=plots("A14", lines_by(decades, "depth", "init"), kept),
        notes=[
            f"Numerical rank of the float64 product after {DEPTHS[-1]} layers: {'; '.join(ends)}, of {KEPT}."
        ],
    )


def _rank_cases(init: str, seed: int) -> Iterator[Case]:
    """Rank of the product of the first layers, exact and as float64 has it; gradients past its last norm."""
    model, _ = started("post", init=init, depth=DEPTHS[-1] // 2, width=WIDTH, seed=seed, eps=0)
    layers, _ = real_blocks.one_token(model, WIDTH, seed)
    factors = torch.stack([step_jacobian(layer) for layer in layers])
    for depth, exact in zip(DEPTHS, _exact_ranks(layers), strict=True):
        whole, logs = product(factors[:depth]), product_log_singular_values(factors[:depth]).log_values
        sigma, end = singular_values(whole), layers[depth - 1](layers[depth - 1].x)[0, -1].detach()
        erased = left_kernel(end, None, centred=True)[0]
        passed = float((whole.T @ erased).norm(dim=0).max() / sigma[0])
        plain = numerical_rank(sigma, WIDTH * 2.3e-16)[0]
        decades = float(logs[0] - logs[KEPT - 1]) / math.log(10)
        where = f"{INITS[init]}, {depth} layers"
        at: dict[str, float | str] = {"init": INITS[init], "depth": depth, "decades": decades}
        yield Case(seed, f"{where}, exact rank", exact, exact <= KEPT)
        yield Case(seed, f"{where}, exact rank", exact, exact == KEPT, "exactly")
        yield Case.at_most(seed, f"{where}, gain of the two gradients erased", passed, ROUND_OFF)
        yield Case(seed, where, plain, plain == KEPT, "float64", met=decades < 13, at=at)


def _exact_ranks(layers: Sequence[Layer]) -> Iterator[int]:
    """The rank in exact arithmetic of the product of the first layers, for each number of `DEPTHS`."""
    running: dict[int, Exact] = {}
    for number, layer in enumerate(layers, 1):
        # (1/σ)(I − 11ᵀ/d − z̄z̄ᵀ/‖z̄‖²)(I + J_F) is the layer's Jacobian.
        exact = layer.joined[0, -1].tolist(), real_blocks.plain_branch_jacobian(layer).tolist()
        for prime in PRIMES:
            running[prime] = _modulo(exact, prime) @ running.get(prime, np.eye(WIDTH, dtype=object)) % prime
        if number in DEPTHS:
            yield max(exact_rank(running[prime], prime) for prime in PRIMES)


def _modulo(factor: tuple[list[float], list[list[float]]], prime: int) -> Exact:
    """σ J [D, D] modulo `prime` of z and J_F of a Post-LN layer, without rounding."""
    z_D, branch_DD = (as_exact(values, prime) for values in factor)
    inner_DD = np.eye(len(z_D), dtype=object) + branch_DD
    return scaled_norm_jacobian(z_D, prime) @ inner_DD % prime


@claim("A24")
def pre_ln_with_its_final_norm(setup: Setup) -> Evidence:
    """Directions lost end to end, with and without the norm that Pre-LN ends in."""
    grid = itertools.product(setup.seeds, ("pre", "gpt2"), (None, False), (1, 8, 32))
    cases = [_end_to_end(scheme, final, depth, seed) for seed, scheme, final, depth in grid]
    ends = [replace(case, part="") for case in cases]
    return Evidence(cases, Figure.largest("most directions erased a token, with the final norm", ends))


def num_erased(factors: Sequence[Tensor]) -> int:
    """Directions of a product whose σ is under 1e-13 σ₁."""
    logs = product_log_singular_values(torch.stack(list(factors))).log_values
    return int((logs < logs[0] + math.log(1e-13)).sum())


def _end_to_end(scheme: str, final: bool | None, depth: int, seed: int) -> Case:
    options: dict[str, Any] = {} if final is None else {"final_norm": final}
    model, _ = started(scheme, init="xavier", depth=depth, width=32, seed=seed, eps=0, **options)
    layers, end = real_blocks.one_token(model, 32, seed)
    lost = num_erased([*map(step_jacobian, layers), jacobian(model.final_norm, end)])
    has_none = isinstance(model.final_norm, NoNorm)
    where = f"{scheme}, {depth} blocks, {'no final norm' if has_none else 'its final norm'}"
    return Case(seed, where, lost, lost == 0, "" if has_none else "final")
