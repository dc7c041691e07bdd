"""Gauss quadrature of one probe: what a Golub–Kahan run from v₁ says about the distribution of σ.

    ⟨v₁, f(JᵀJ) v₁⟩ ≈ Σ_i w_i f(θ_i²),     θ_i the singular values of B_k,  w_i = ⟨e₁, y_i⟩²

with y_i the right singular vectors: the measure Σ_i ⟨v₁, v_i⟩² δ(σ_i²) seen through its first 2k moments.
With B̂ [k, k+1] in place of B the rule has a node at zero (Gauss–Radau), of weight 1/Σ_{j≤k} p̂_j(0)²: an
upper bound of v₁'s mass in the kernel (Chebyshev–Markov–Stieltjes), which it reaches as k grows.

A node whose Ritz vector has converged is a singular value; the others stand for a stretch of the spectrum,
and where a distribution is asked for (not a moment), their weight is spread up to their neighbours, half to
each side. A node far heavier than its neighbours is a cluster, and keeps what it has beyond. Half of the
lowest node is further down, where the steps see nothing: from the density f that they see last it is laid out
as f · (1 − t/3ℓ)², t nats down, which ends after 3ℓ, ℓ = half/f. For residual stacks and geometric spectra of
5 to 7 nats that halves W₁. It is a guess; what it changes from level to level is in the error.

Source: Golub & Meurant 2010, "Matrices, Moments and Quadrature", ch. 6; Ubaru, Chen & Saad 2017.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normscope.linalg.golub_kahan import Bidiagonalisation

Floats = NDArray[np.float64]

SHARP = 1e-3
"""A node is a singular value where its residual is at most this share of it."""

PIECES = 8
"""Points that stand for the stretch between two nodes."""

CLUSTER = 3.0
"""So many times the heavier neighbour's weight is spread at most; by chance it is rarely more."""


@dataclass(frozen=True)
class Rule:
    """A measure of log σ: nodes and weights outside the kernel, and the share of the kernel.

    Attributes:
        nodes: log θ [k], ascending.
        weights: w [k]; Σw + kernel = 1.
        kernel: weight of σ = 0.
        sharp: which nodes are singular values themselves [k].
    """

    nodes: Floats
    weights: Floats
    kernel: float
    sharp: NDArray[np.bool_]


def gauss(process: Bidiagonalisation, steps: int, floor: float) -> Rule:
    """The rule of the first `steps` steps; what is under `floor` times the largest θ counts as kernel.

    Where the space was exhausted by a vanishing α, the node at zero is exact and belongs to it.
    """
    matrix = process.bidiagonal()
    if _all_of(process, steps):
        return _rule(matrix, floor, 0.0)
    return _rule(matrix[:steps, :steps], floor, process.beta[steps - 1])


def radau(process: Bidiagonalisation, steps: int, floor: float) -> Rule:
    """The rule with a node at zero; where the space was exhausted before, the Gauss rule, which is exact."""
    matrix = process.bidiagonal()
    if _all_of(process, steps):
        return _rule(matrix, floor, 0.0)
    return _rule(matrix[:steps, : steps + 1], floor, process.beta[steps - 1])


def pooled(rules: list[Rule]) -> Rule:
    """The mean of the measures."""
    nodes = np.concatenate([rule.nodes for rule in rules])
    weights = np.concatenate([rule.weights for rule in rules]) / len(rules)
    sharp = np.concatenate([rule.sharp for rule in rules])
    order = np.argsort(nodes, kind="stable")
    return Rule(nodes[order], weights[order], float(np.mean([rule.kernel for rule in rules])), sharp[order])


def spread(rule: Rule, *, below: bool = True) -> Rule:
    """The same measure with the weight of nodes that are not sharp laid out up to their neighbours.

    Args:
        rule: of one probe.
        below: whether half of the lowest node goes further down than that.
    """
    if len(rule.nodes) < 2:
        return rule
    weights = rule.weights
    heavier = np.maximum(np.append(weights[1:], 0.0), np.insert(weights[:-1], 0, 0.0))
    halves = np.where(rule.sharp, 0.0, np.minimum(weights, CLUSTER * heavier) / 2)
    inwards = halves[:-1] + halves[1:]  # what each of the gaps between nodes receives
    kept = weights - np.append(0.0, halves[1:]) - np.append(halves[:-1], 0.0)
    steps = (np.arange(PIECES) + 0.5) / PIECES
    filled = (rule.nodes[:-1, None] + np.diff(rule.nodes)[:, None] * steps).reshape(-1)
    tail = np.empty(0)
    if below and halves[0] > 0 and rule.kernel == 0:  # beside a kernel, the end was seen
        length = halves[0] / inwards[0] * (rule.nodes[1] - rule.nodes[0])
        tail = rule.nodes[0] - 3 * length * (1 - np.cbrt(steps))
        kept[0] -= halves[0]
    in_tail = np.full(len(tail), halves[0] / PIECES)
    nodes = np.concatenate((tail, rule.nodes, filled))
    weights = np.concatenate((in_tail, kept, np.repeat(inwards / PIECES, PIECES)))
    order = np.argsort(nodes, kind="stable")
    return Rule(nodes[order], weights[order], rule.kernel, np.ones(len(nodes), dtype=bool))


def transport(a: Rule, b: Rule) -> float:
    """W₁ in nats between what two measures have outside the kernel, each taken as a whole."""
    if not (len(a.nodes) and len(b.nodes)):
        return 0.0 if len(a.nodes) == len(b.nodes) else float("inf")
    points = np.union1d(a.nodes, b.nodes)
    shares = [share_below(rule, points) / rule.weights.sum() for rule in (a, b)]
    return float(np.abs(shares[0] - shares[1])[:-1] @ np.diff(points))


def share_below(rule: Rule, points: Floats) -> Floats:
    """Σ of the weights of nodes ≤ each of the points; the kernel is not in it."""
    cumulated = np.concatenate(([0.0], np.cumsum(rule.weights)))
    return cumulated[np.searchsorted(rule.nodes, points, side="right")]


def _all_of(process: Bidiagonalisation, steps: int) -> bool:
    return process.exhausted and steps >= len(process.alpha)


def _rule(matrix: Floats, floor: float, coupling: float) -> Rule:
    """Of B or B̂ whose next entry is `coupling`, or about that."""
    if not matrix.size:  # Jv₁ = 0
        return Rule(np.empty(0), np.empty(0), 1.0, np.empty(0, dtype=bool))
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    weights = right[:, 0] ** 2
    has_zero = matrix.shape[1] > matrix.shape[0]
    last = right[:, -1] if has_zero else left[-1]
    counts = (values > floor * values[0])[::-1]
    nodes, weights, last = values[::-1][counts], weights[::-1], np.abs(last)[::-1][counts]
    kernel = float(weights[~counts].sum()) + (max(0.0, 1 - float(weights.sum())) if has_zero else 0.0)
    return Rule(np.log(nodes), weights[counts], kernel, coupling * last <= SHARP * nodes)
