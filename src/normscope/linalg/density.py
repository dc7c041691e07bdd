"""Distribution of log σ, effective and stable rank of a large map, by stochastic Lanczos quadrature.

k steps of Golub–Kahan from v₁, uniform on the sphere, give nodes and weights of a Gauss rule: the singular
values of B_k and the squares of the first entries of its right singular vectors, with E ⟨v₁, v_i⟩² = 1/n.
The mean over probes is the distribution of σ.

Few probes weight a few large values badly: the stable rank would be too small, even under 1. So a first run
finds the largest values, which count once each, and the probes see only the rest (deflation, the idea of
Hutch++). Errors have two parts: the probes' spread (jackknife, Student's t), and the change that further
steps would make, extrapolated from the changes between k/4, k/2 and k steps (Aitken).

With B̂ [k, k+1] in place of B there is a node at zero (Gauss–Radau), whose weight bounds that of the kernel
from above. A weight that no longer changes is the kernel's; one that still falls is an error of truncation.

Sources: Ubaru, Chen & Saad 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature"; Meyer et
al. 2021, "Hutch++"; Golub & Meurant 2010, ch. 6; effective rank: Roy & Vetterli 2007.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, inf, log, nan, sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.linalg.golub_kahan import (
    Bidiagonalisation,
    LinearMap,
    Status,
    check_confidence,
    combine,
    round_off_of,
)
from normscope.linalg.maps import Deflated
from normscope.linalg.smallest import LEAK_MARGIN, kernel_gain, without_kernels
from normscope.linalg.subspaces import Kernel, Projector

Floats = NDArray[np.float64]

AT_REST = 0.1
"""Largest relative change that further steps may make in a weight at zero that counts as a kernel."""

CONVERGED = 1e-3  # largest relative residual of a node that counts as a singular value

R_SAFETY, R_LEAST, R_CURVE = 1.2, 0.25, 0.7
"""Changes shrink by r per doubling of steps. r is 1.2 times the observed one, and at least 1/4; at least 0.7
for whole distributions, whose part between nodes and below the lowest shrinks about as 1/k."""

SHARES = (np.arange(400) + 0.5) / 400
"""Points at which quantile functions are compared: their mean distance is W₁."""


@dataclass(frozen=True)
class Estimate:
    """A figure of the whole map with its errors.

    Attributes:
        value: the figure.
        sampling: half-width of its interval at the stated confidence, from the spread between probes.
        truncation: change that further Lanczos steps could still make; inf where that is unknown.
    """

    value: float
    sampling: float
    truncation: float

    @property
    def error(self) -> float:
        """Sum of both errors."""
        return self.sampling + self.truncation


@dataclass(frozen=True)
class Measure:
    """Weights (k,) at nodes log σ (k,), ascending; the weight missing to 1 is at σ = 0.

    A node that is `sharp` (k,) is a singular value itself; the others represent parts of the spectrum.
    """

    nodes: Floats
    weights: Floats
    sharp: NDArray[np.bool_]

    @property
    def kernel(self) -> float:
        """The weight of σ = 0."""
        return max(0.0, 1 - float(self.weights.sum()))

    @property
    def mean(self) -> float:
        """Mean of log σ outside the kernel; nan where all is kernel."""
        return float(self.weights @ self.nodes / self.weights.sum()) if len(self.nodes) else nan

    @property
    def std(self) -> float:
        """Standard deviation of log σ outside the kernel; nan where all is kernel."""
        if not len(self.nodes):
            return nan
        return sqrt(self.weights @ (self.nodes - self.mean) ** 2 / self.weights.sum())

    @property
    def effective(self) -> float:
        """exp(H)/n for H the entropy of σ_i/Σσ: log n + log⟨σ⟩ − ⟨σ log σ⟩/⟨σ⟩."""
        if not len(self.nodes):
            return 0.0
        logs = self.nodes - self.nodes[-1]
        weighted = self.weights * np.exp(logs)
        return float(weighted.sum() * exp(-(weighted @ logs) / weighted.sum()))

    def quantiles(self, shares: Floats) -> Floats:
        """Log σ at shares of all singular values, those in the kernel not counted; −inf where all are."""
        if not len(self.nodes):
            return np.full(len(shares), -inf)
        reached = np.cumsum(self.weights)
        half = np.where(self.sharp, 0.0, self.weights / 2)
        ends = np.stack((reached - self.weights + half, reached - half), 1).reshape(-1)
        return np.interp(shares - 1e-12, ends, np.repeat(self.nodes, 2))


@dataclass(frozen=True)
class LogDensity:
    """Distribution of the log σ of a map [m, n], over its min(m, n) singular values less the named kernels'.

    Attributes:
        size: number of those singular values; the map's rank is at most this.
        mean, std: of log σ outside the kernel, in nats; nan where all is kernel.
        kernel: share of `size` that is zero in addition to the named kernels. Its truncation reaches up to
            the Radau bound where no kernel was found.
        effective_rank: exp of the entropy of σ_i/Σσ (Roy & Vetterli); from 1 to `size`.
        stable_rank: Σσ²/σ_max²; from 1 to `size`.
        distance: W₁ in nats from `measure` to the truth, outside the kernel: value 0, and an upper estimate
            as its error.
        kernel_gain: gain of a random vector in the named kernels; it enters the errors.
        confidence: of all sampling errors.
        products: Jv and Jᵀu spent.
        status: CONVERGED where the truncation of `distance` is ≤ tol · std, or round-off: then only more
            probes help. NOT_CONVERGED: more steps help.
        measure: nodes and weights of all probes together.
    """

    size: int
    mean: Estimate
    std: Estimate
    kernel: Estimate
    effective_rank: Estimate
    stable_rank: Estimate
    distance: Estimate
    kernel_gain: float
    confidence: float
    products: int
    status: Status
    measure: Measure = field(repr=False)

    def quantile(self, share: float) -> float:
        """Log σ that this share of all singular values, the kernel included, does not exceed."""
        rest = share - self.measure.kernel
        return float(self.measure.quantiles(np.array([rest]))[0]) if rest > 1e-12 else -inf


def log_density(
    op: LinearMap,
    *,
    kernel: Kernel | None = None,
    left_kernel: Kernel | None = None,
    num_probes: int = 4,
    steps: int = 32,
    tol: float = 0.1,
    confidence: float = 0.95,
    seed: int = 0,
) -> LogDensity:
    """Distribution of the log σ of `op` [m, n] outside its known kernels.

    Costs 2 · (`num_probes` + 1) · `steps` products, and one for each named kernel.

    Args:
        op: the map; probes are drawn on the side that is smaller without the kernels.
        kernel, left_kernel: as in `sigma_min`.
        num_probes: random starts after the first run, at least 2.
        steps: Golub–Kahan steps of each, at least 4; fewer where the Krylov space is exhausted before.
        tol: truncation error, as a share of the std of log σ, up to which the status is CONVERGED.
        confidence: of the sampling errors.
        seed: of the first run; the probes use the following ones.

    Raises:
        ValueError: too few probes or steps; a confidence outside (0, 1); a kernel of another size, not
            orthonormal, or that leaves nothing.
        FloatingPointError: where a product is not finite.

    Examples:
        >>> x = torch.linspace(-1, 1, 50, dtype=torch.float64)
        >>> found = log_density(JacobianOperator(torch.sinh, x))
        >>> exact = torch.cosh(x).log()
        >>> abs(found.mean.value - float(exact.mean())) <= found.mean.error
        True
    """
    if num_probes < 2 or steps < 4:
        raise ValueError(f"num_probes={num_probes}, steps={steps}: expected at least 2 probes of 4 steps")
    check_confidence(confidence)
    whole, size = without_kernels(op, kernel, left_kernel)
    gain, spent = kernel_gain(whole, seed)
    first = _run(whole, (whole.keep_right, whole.keep_left), steps, seed)
    head, rest, within = _without_largest(whole, first, min(steps // 2, size - 1))
    runs = [_run(rest, within, steps, seed + 1 + i, first.largest) for i in range(num_probes)]
    spent += first.products + sum(run.products for run in runs)
    return _Figures(whole, size, first, head, runs, gain, confidence).all(tol, spent)


_Within = tuple[Projector, Projector]


def _run(op: LinearMap, within: _Within, steps: int, seed: int, scale: float = 0.0) -> Bidiagonalisation:
    process = Bidiagonalisation(op, seed=seed, within=within, scale=scale)
    while len(process.alpha) < steps and not process.exhausted:
        process.step()
    return process


def _floor(op: LinearMap) -> float:
    """Largest value, relative to σ_max, that may be only round-off."""
    return max(max(op.shape) * torch.finfo(op.dtype).eps, round_off_of(op))


def _without_largest(
    whole: Deflated, first: Bidiagonalisation, most: int
) -> tuple[Floats, Deflated, _Within]:
    """Logs of the largest values that have converged, ascending; the map without them, and its subspaces."""
    left, values, right = np.linalg.svd(first.known, full_matrices=False)
    coupling = 0.0 if first.exhausted else first.beta[-1]
    kept = np.abs(left[-1:]).reshape(-1) * coupling <= CONVERGED * values
    kept &= values > _floor(whole) * first.largest
    count = min(most, int(np.cumprod(kept).sum()))
    v, u = combine(first.right, right[:count].T), combine(first.left, left[:, :count])
    rest = Deflated(whole, kernel=v.T, left_kernel=u.T)
    within = (
        lambda x: rest.keep_right(whole.keep_right(x)),
        lambda y: rest.keep_left(whole.keep_left(y)),
    )
    return np.log(values[:count])[::-1], rest, within


class _Figures:
    """All figures from the first run's largest values and the probes of the rest, at three levels."""

    def __init__(
        self,
        op: LinearMap,
        size: int,
        first: Bidiagonalisation,
        head: Floats,
        runs: list[Bidiagonalisation],
        gain: float,
        confidence: float,
    ) -> None:
        from scipy.special import stdtrit  # imported late: it is slow to import

        self.size, self.head, self.gain, self.confidence = size, head, gain, confidence
        self.quantile = float(stdtrit(len(runs) - 1, (1 + confidence) / 2))
        self.largest = max(run.largest for run in [first, *runs])
        self.largest_error = first.error(confidence)
        self.eps = round_off_of(op)
        self.relative_floor = _floor(op)
        self.floor = self.relative_floor * self.largest
        self.kernel_truncation = 0.0
        self.levels = self._levels(runs)

    def _levels(self, runs: list[Bidiagonalisation]) -> list[list[Measure]]:
        """Measures of all probes after k/4, k/2 and k steps; a node at zero where its weight has settled."""
        if all(run.exhausted for run in runs):
            return [[self._rule(run, len(run.alpha), 1) for run in runs]] * 3
        count = [[(run, max(1, len(run.alpha) // part)) for run in runs] for part in (4, 2, 1)]
        radau, gauss = ([[self._rule(*each, zero) for each in level] for level in count] for zero in (1, 0))
        shares = np.array([np.mean([rule.kernel for rule in level]) for level in radau])
        to_come = float(still_to_come(np.abs(np.diff(shares))))
        if shares[-1] > 1e-3 / self.size and to_come <= AT_REST * shares[-1]:
            self.kernel_truncation = to_come
            return radau
        self.kernel_truncation = float(shares[-1])
        return gauss

    def _rule(self, run: Bidiagonalisation, steps: int, zero: int) -> Measure:
        """Gauss (zero = 0) or Gauss–Radau (1) rule of the first steps; under the floor a value is zero."""
        matrix = run.bidiagonal()
        if not run.exhausted or steps < len(run.alpha):
            matrix = matrix[:steps, : steps + zero]
        if not matrix.size:  # Jv₁ = 0
            return Measure(np.empty(0), np.empty(0), np.empty(0, dtype=bool))
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        counts = np.flatnonzero(values > self.floor)[::-1]
        coupling = np.abs(left[-1]) * (run.beta[steps - 1] if steps <= len(run.beta) else 0.0)
        sharp = coupling[counts] <= CONVERGED * values[counts]
        return Measure(np.log(values[counts]), right[counts, 0] ** 2, sharp)

    def together(self, rules: list[Measure]) -> Measure:
        """The largest values, each once, and the mean of the probes on the rest."""
        share = (self.size - len(self.head)) / self.size / len(rules)
        nodes = np.concatenate([self.head, *(rule.nodes for rule in rules)])
        weights = np.concatenate([self.head * 0 + 1 / self.size, *(share * rule.weights for rule in rules)])
        order = np.argsort(nodes, kind="stable")
        sharp = np.concatenate([self.head == self.head, *(rule.sharp for rule in rules)])
        return Measure(nodes[order], weights[order], sharp[order])

    def estimate(self, figure: Callable[[Measure], float], round_off: float = 0.0) -> Estimate:
        """`figure` of all probes; its jackknife and bias, and the change still to come."""
        probes = self.levels[-1]
        value = figure(self.together(probes))
        without = [figure(self.together(probes[:i] + probes[i + 1 :])) for i in range(len(probes))]
        bias = abs((len(probes) - 1) * (float(np.mean(without)) - value))
        between = sqrt((len(probes) - 1) * float(np.var(without)))
        each = np.array([[figure(self.together([rule])) for rule in level] for level in self.levels])
        changes = np.abs(np.diff(each, axis=0)).mean(1)
        rest = float(still_to_come(changes, max(round_off, 1e-10 * float(np.abs(each).max()))))
        return Estimate(value, self.quantile * between + bias, rest + round_off)

    def all(self, tol: float, products: int) -> LogDensity:
        """Every figure, with its errors."""
        measure = self.together(self.levels[-1])
        leak = LEAK_MARGIN * self.gain / self.largest if self.largest else 0.0
        noise = _round_off_log(measure, 8 * self.eps + leak)
        rounding = 16 * self.relative_floor + self.size * leak
        kernel = self.estimate(lambda m: m.kernel)
        std, distance = self.estimate(lambda m: m.std, noise), self._distance(noise)
        enough = tol * (0.0 if np.isnan(std.value) else std.value) + 16 * self.eps
        return LogDensity(
            size=self.size,
            mean=self.estimate(lambda m: m.mean, noise),
            std=std,
            kernel=Estimate(kernel.value, kernel.sampling, self.kernel_truncation),
            effective_rank=self.estimate(lambda m: _at_least_one(self.size * m.effective, m), rounding),
            stable_rank=self._stable_rank(rounding),
            distance=distance,
            kernel_gain=self.gain,
            confidence=self.confidence,
            products=products,
            status=Status.CONVERGED if distance.truncation <= enough else Status.NOT_CONVERGED,
            measure=measure,
        )

    def _stable_rank(self, rounding: float) -> Estimate:
        """‖J‖_F² over σ_max²; a larger σ_max than was seen would make it smaller."""
        top = log(self.largest) if self.largest else 0.0
        found = self.estimate(
            lambda m: _at_least_one(self.size * float(m.weights @ np.exp(2 * (m.nodes - top))), m), rounding
        )
        above = found.value * (1 - (1 + self.largest_error) ** -2)
        return Estimate(found.value, found.sampling, found.truncation + above)

    def _distance(self, round_off: float) -> Estimate:
        """W₁ between the probes' quantile functions, and the extrapolated change of further steps."""
        measures = [[self.together([rule]) for rule in level] for level in self.levels]
        curves = np.array([[m.quantiles(SHARES * m.weights.sum()) for m in level] for level in measures])
        if not np.isfinite(curves).all():
            return Estimate(0.0, 0.0 if len(self.levels[-1][0].nodes) == 0 else inf, 0.0)
        spread = float(curves[-1].std(0, ddof=1).mean()) / sqrt(curves.shape[1])
        changes = np.abs(np.diff(curves, axis=0)).mean((1, 2))
        rest = float(still_to_come(changes, max(round_off, 1e-10), R_CURVE))
        return Estimate(0.0, self.quantile * spread, rest + round_off)


def still_to_come(changes: Floats, settled: float = 1e-10, least: float = R_LEAST) -> Floats:
    """Rest of two changes [2, ...] that shrink by a steady factor r ≥ `least`: change · r/(1 − r).

    inf where they do not shrink, unless the last is no more than `settled`.
    """
    before, last = changes
    with np.errstate(over="ignore"):  # after a change of zero, any change means no shrinking
        r = np.maximum(least, R_SAFETY * last / np.maximum(before, np.finfo(float).tiny))
    r = np.minimum(r, 1.0)
    rest = np.where(r < 1, last * r / np.maximum(1 - r, sqrt(np.finfo(float).eps)), np.inf)
    return np.where(last <= settled, last, rest)


def _at_least_one(rank: float, measure: Measure) -> float:
    """The rank, at least 1 where the map is not zero."""
    return max(1.0, rank) if len(measure.nodes) else 0.0


def _round_off_log(measure: Measure, error: float) -> float:
    """Error of the mean log σ where each σ is off by `error` σ_max."""
    if not len(measure.nodes):
        return 0.0
    share = measure.weights / measure.weights.sum()
    return float(np.minimum(error * np.exp(measure.nodes[-1] - measure.nodes), 1e3) @ share)
