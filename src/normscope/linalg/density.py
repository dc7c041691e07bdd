"""Density of log σ by stochastic Lanczos quadrature, with error bars, without one dense matrix.

Each of a few random probes v₁, uniform on the sphere, sees the spectrum through k steps of Golub–Kahan
(`quadrature.py`); E ⟨v₁, v_i⟩² = 1/n, so that the mean over probes is the distribution of σ. Errors have two
parts, the probes' spread and the Krylov space's length (`estimates.py`), and both are in every figure.

A kernel and small σ: k steps tell σ from zero only above a resolution. Where the weight at zero (Gauss–Radau)
has come to rest, it is reported as the kernel, apart from the density. Where it still falls, the spectrum has
a tail that k steps do not see the end of, and the truncation error says so. A kernel that is known is better
named: probes start outside it, every vector stays outside, and the steps go to what is left.

Source: Ubaru, Chen & Saad 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature"; Lin, Saad &
Yang 2016 (arXiv 1308.5467); effective rank: Roy & Vetterli 2007.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, inf, pi, sqrt

import numpy as np
import torch

from normscope.linalg.estimates import (
    R_CURVE,
    R_SAFETY,
    SETTLED,
    Estimate,
    estimate,
    jackknife,
    still_to_come,
    students_t,
)
from normscope.linalg.golub_kahan import Bidiagonalisation, LinearMap, Status, round_off_of
from normscope.linalg.maps import Deflated, Transposed
from normscope.linalg.moments import (
    effective_share,
    mean_log,
    participation_share,
    round_off_log,
    stable_share,
    std_log,
)
from normscope.linalg.quadrature import Floats, Rule, gauss, pooled, radau, share_below, spread, transport
from normscope.linalg.smallest import LEAK_MARGIN, kernel_gain
from normscope.linalg.subspaces import Kernel, dimension

AT_REST = 0.1
"""The weight at zero is a kernel where further steps may change it by no more than this share of itself."""


@dataclass(frozen=True)
class LogDensity:
    """Distribution of the log σ of a map [m, n], over its min(m, n) singular values less the named kernels'.

    Attributes:
        size: how many singular values those are: min(n − r, m − l) for named kernels of dimensions r and l.
            All shares are of these, and all sums over them; the map's rank is at most this.
        mean, std: of log σ outside the kernel, in nats; nan where all is kernel.
        kernel: share of `size` that is zero, beside the named kernels: that k steps do not tell from zero,
            σ ≤ `resolution`. Its truncation reaches up to the Radau bound where no kernel was told apart.
        log_volume: Σ log σ outside the kernel.
        effective_rank: exp of the entropy of σ_i/Σσ (Roy & Vetterli).
        participation: (Σσ²)²/Σσ⁴.
        stable_rank: Σσ²/σ_max².
        distance: W₁ in nats from `distribution` to the truth, outside the kernel; an upper estimate, value 0.
        resolution: σ up to which the kernel reaches; 0 where none was found.
        kernel_gain: gain that a random vector of the named kernels had; it enters the errors.
        confidence: of all sampling errors. It is met where no part of the spectrum is a few σ far from the
            rest: what few probes have of those is skewed. With 3 of 250 σ at 1e-6 and the rest in [1, 7.4],
            12 of 150 intervals of the mean at 95 % missed it: more probes, or name what is known of them.
        products: Jv and Jᵀu spent.
        status: CONVERGED where the truncation of `distance` is ≤ tol · std, or round-off: then the sampling
            is what counts, and more probes help. NOT_CONVERGED: more steps.
        levels: the rules of all probes at k/4, k/2 and k steps.
    """

    size: int
    mean: Estimate
    std: Estimate
    kernel: Estimate
    log_volume: Estimate
    effective_rank: Estimate
    participation: Estimate
    stable_rank: Estimate
    distance: Estimate
    resolution: float
    kernel_gain: float
    confidence: float
    products: int
    status: Status
    levels: list[list[Rule]] = field(repr=False)

    @property
    def rule(self) -> Rule:
        """All probes in one: nodes log σ, weights, kernel; for moments."""
        return pooled(self.levels[-1])

    @property
    def distribution(self) -> Rule:
        """The same with the weights of unconverged nodes spread to their neighbours; see `distance`."""
        return pooled([spread(rule) for rule in self.levels[-1]])

    def cdf(self, points: Floats) -> tuple[Floats, Floats]:
        """Share of all singular values with log σ ≤ each point, the kernel included; and its error.

        The truncation part is rigorous for each probe: what the quadrature has at a node lies between the
        node before and the node after (Chebyshev–Markov–Stieltjes).
        """
        points = np.asarray(points, dtype=float)
        probes = self.levels[-1]
        shares = np.stack([rule.kernel + share_below(spread(rule), points) for rule in probes])
        sampling = students_t(len(probes), self.confidence) * shares.std(0, ddof=1) / sqrt(len(probes))
        if self._exact:
            return shares.mean(0), sampling
        return shares.mean(0), sampling + np.mean([_jump(rule, points) for rule in probes], 0)

    def density(self, points: Floats, bandwidth: float | None = None) -> tuple[Floats, Floats]:
        """Density per nat at each point, smoothed by a Gaussian, and its error (that of the smoothed one).

        Integrates to 1 − kernel. The bandwidth is in nats, by default std · (number of nodes)^(−1/5).
        """
        points = np.asarray(points, dtype=float)
        rule = self.rule
        if not len(rule.nodes):
            return np.zeros_like(points), np.zeros_like(points)
        h = bandwidth or max(self.std.value * len(rule.nodes) ** -0.2, 1e-6)

        def curves(rules: list[Rule], below: bool = True) -> Floats:
            return np.array([_smoothed(spread(rule, below=below), points, h) for rule in rules])

        last = curves(self.levels[-1])
        without = (last.sum(0) - last) / (len(last) - 1)
        # Of the whole curve: single points may rest a while.
        changes = _changes(
            self.levels, lambda a, b, below: np.abs(curves(a, below) - curves(b, below)).mean(0).max()
        )
        return last.mean(0), jackknife(without, self.confidence) + still_to_come(changes, least=R_CURVE)

    def quantile(self, share: float) -> float:
        """The log σ that this share of all singular values, the kernel included, does not exceed."""
        rule = self.distribution
        reached = rule.kernel + np.cumsum(rule.weights) >= share - 1e-12
        if share <= rule.kernel or not reached.any():
            return -inf
        return float(rule.nodes[np.argmax(reached)])

    @property
    def _exact(self) -> bool:
        return self.levels[0] is self.levels[-1]


def log_density(
    op: LinearMap,
    *,
    kernel: Kernel | None = None,
    left_kernel: Kernel | None = None,
    num_probes: int = 4,
    steps: int = 40,
    tol: float = 0.05,
    confidence: float = 0.95,
    seed: int = 0,
) -> LogDensity:
    """Distribution of the log σ of `op` [m, n] outside its known kernels.

    Costs 2 · `num_probes` · `steps` products, and one for each kernel that is named.

    Args:
        op: the map; probes are drawn on the side that is smaller without the kernels, so that a wide map has
            no kernel for its shape, and that of a norm's output is left out by `left_kernel` alone.
        kernel: {v : Jv = 0}: an orthonormal basis (n, r), or the projector onto it (…, n) → (…, n).
        left_kernel: {u : Jᵀu = 0}, likewise. One side is enough.
        num_probes: random starts, at least 2.
        steps: Golub–Kahan steps from each, at least 4; fewer where the Krylov space is exhausted before. For
            spectra of more than 5 nats half the probes of twice the steps come nearer, at the same cost, but
            of 2 probes the error bars are wide.
        tol: truncation error, as a share of the std of log σ, up to which the status is CONVERGED.
        confidence: of the sampling errors.
        seed: of the first probe; the others count on from it.

    Raises:
        ValueError: for fewer probes or steps, or a confidence that is none; a kernel of another size, or not
            orthonormal, or that leaves nothing.
        FloatingPointError: where a product is not finite.

    Example:
        >>> x = torch.linspace(-1, 1, 50, dtype=torch.float64)
        >>> found = log_density(JacobianOperator(torch.sinh, x))
        >>> exact = torch.cosh(x).log()
        >>> abs(found.mean.value - float(exact.mean())) <= found.mean.error
        True
    """
    if num_probes < 2 or steps < 4:
        raise ValueError(f"num_probes={num_probes}, steps={steps}: expected at least 2 probes of 4 steps")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: expected a probability between 0 and 1")
    look = _look(op, kernel, left_kernel, seed)
    runs = [_run(look.op, steps, seed + i) for i in range(num_probes)]
    return _figures(runs, look, tol, confidence)


@dataclass(frozen=True)
class _Look:
    """What is looked at: the map without its kernels, smaller side first; the kernels' gain, and its cost."""

    op: Deflated
    size: int
    gain: float
    spent: int


def _look(op: LinearMap, kernel: Kernel | None, left_kernel: Kernel | None, seed: int) -> _Look:
    left = [
        length - dimension(named, length, op.dtype, op.device)
        for length, named in zip(op.shape, (left_kernel, kernel), strict=True)
    ]
    if min(left) < 1:
        raise ValueError(
            f"kernels that leave nothing of a map of shape {op.shape}: expected at least 1 dimension"
        )
    if left[0] < left[1]:
        op, kernel, left_kernel = Transposed(op), left_kernel, kernel
    deflated = Deflated(op, kernel=kernel, left_kernel=left_kernel)
    return _Look(deflated, min(left), *kernel_gain(op, deflated, seed))


def _figures(runs: list[Bidiagonalisation], look: _Look, tol: float, confidence: float) -> LogDensity:
    levels, kernel_truncation, resolution = _rules(runs, look)
    whole, eps = pooled(levels[-1]), round_off_of(look.op)
    leak = LEAK_MARGIN * look.gain * exp(-whole.nodes[-1]) if len(whole.nodes) else 0.0
    noise, rounding = round_off_log(whole, 8 * eps + leak), 16 * _floor(look.op) + look.size * leak

    def taken(figure: Callable[[Rule], float], round_off: float = 0.0) -> Estimate:
        return estimate(lambda rules: figure(pooled(rules)), levels, confidence, round_off)

    share = taken(lambda rule: rule.kernel)
    std, distance = taken(std_log, noise), _distance(levels, confidence, noise)
    enough = tol * (0.0 if np.isnan(std.value) else std.value) + 16 * eps
    return LogDensity(
        size=look.size,
        mean=taken(mean_log, noise),
        std=std,
        kernel=Estimate(share.value, share.sampling, kernel_truncation),
        log_volume=taken(lambda rule: look.size * float(rule.weights @ rule.nodes), look.size * noise),
        effective_rank=taken(lambda rule: look.size * effective_share(rule), rounding),
        participation=taken(lambda rule: look.size * participation_share(rule), rounding),
        stable_rank=taken(lambda rule: look.size * stable_share(rule), rounding),
        distance=distance,
        resolution=resolution,
        kernel_gain=look.gain,
        confidence=confidence,
        products=look.spent + sum(run.products for run in runs),
        status=Status.CONVERGED if distance.truncation <= enough else Status.NOT_CONVERGED,
        levels=levels,
    )


def _run(op: Deflated, steps: int, seed: int) -> Bidiagonalisation:
    process = Bidiagonalisation(op, seed=seed, within=(op.keep_right, op.keep_left))
    while len(process.alpha) < steps and not process.exhausted:
        process.step()
    return process


def _floor(op: LinearMap) -> float:
    """What is no more than round-off, beside σ₁."""
    return max(max(op.shape) * torch.finfo(op.dtype).eps, round_off_of(op))


def _rules(runs: list[Bidiagonalisation], look: _Look) -> tuple[list[list[Rule]], float, float]:
    """Rules of all runs at three levels; the truncation of the kernel's share; and the resolution."""
    floor = _floor(look.op)
    if all(run.exhausted for run in runs):
        rules = [gauss(run, len(run.alpha), floor) for run in runs]
        top = max((rule.nodes[-1] for rule in rules if len(rule.nodes)), default=-inf)
        return [rules] * 3, 0.0, floor * exp(top) if any(rule.kernel > 0 for rule in rules) else 0.0
    levels = [[(run, max(1, len(run.alpha) // part)) for run in runs] for part in (4, 2, 1)]
    with_zero = [[radau(run, k, floor) for run, k in level] for level in levels]
    shares = np.array([[rule.kernel for rule in level] for level in with_zero])
    share, rest = float(shares[-1].mean()), float(still_to_come(np.abs(np.diff(shares.mean(1)))))
    without = [[gauss(run, k, floor) for run, k in level] for level in levels]
    if share > 1e-3 / look.size and rest <= AT_REST * share:  # of one direction a probe sees about 1/n
        lowest = [rule.nodes[0] for rule in without[-1] if len(rule.nodes)]
        return with_zero, rest, exp(max(lowest, default=-inf))
    return without, share, 0.0


def _distance(levels: list[list[Rule]], confidence: float, round_off: float) -> Estimate:
    """W₁ to the truth: ∫ t·se(F) dx between the probes, and what W₁ between levels lets expect."""
    probes = [spread(rule) for rule in levels[-1] if len(rule.nodes)]
    if len(probes) < 2:
        return Estimate(0.0, inf if probes else 0.0, 0.0)
    points = np.unique(np.concatenate([rule.nodes for rule in probes]))
    shares = np.stack([share_below(rule, points) / rule.weights.sum() for rule in probes])
    between = shares.std(0, ddof=1)[:-1] @ np.diff(points) / sqrt(len(probes))
    changes = _changes(
        levels, lambda a, b, below: transport(*(pooled([spread(r, below=below) for r in x]) for x in (a, b)))
    )
    rest = float(still_to_come(changes, max(round_off, SETTLED), R_CURVE))
    return Estimate(0.0, students_t(len(probes), confidence) * float(between), rest + round_off)


def _changes(levels: list[list[Rule]], change: Callable[[list[Rule], list[Rule], bool], float]) -> Floats:
    """The changes of a distribution from k/4 to k/2 and on to k steps [2].

    They are to shrink as those without a guess at the lower end do, or more slowly: where the guess was lucky
    once, the first is small; where it was lucky twice, the last is.
    """
    quarter, half, whole = levels
    last = change(half, whole, True)
    first, first_without = (change(quarter, half, below) for below in (True, False))
    last_without = change(half, whole, False)
    first = max(first, first_without)
    if last_without > 0:
        first = min(first, R_SAFETY * last * first_without / last_without)
    return np.array([first, last])


def _jump(rule: Rule, points: Floats) -> Floats:
    """The larger of the weights of the two nodes around each point."""
    weights = np.concatenate(([rule.kernel], rule.weights, [0.0]))
    at = np.searchsorted(rule.nodes, points, side="right")
    return np.maximum(weights[at], weights[at + 1])


def _smoothed(rule: Rule, points: Floats, h: float) -> Floats:
    z = (points[:, None] - rule.nodes) / h
    return np.exp(-0.5 * z * z) @ rule.weights / (h * sqrt(2 * pi))
