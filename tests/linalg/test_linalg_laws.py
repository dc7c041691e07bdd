"""One law for every operator, algorithm and spectrum, and for real blocks of every scheme:

    EXACT or CONVERGED  ⇒  the true error, against a dense float64 SVD, is no larger than the stated one,

and where the spectrum is easy the algorithm must come to that status: one that never does cannot pass.
A new algorithm is one entry of ALGORITHMS; operators, spectra and blocks are those of `law_subjects`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import inf

import numpy as np
import pytest
import torch
from drawn_maps import drawn
from law_subjects import OPERATORS, SMALL, Subject, real_blocks, spectra_of, synthetic
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.linalg import (
    Status,
    TangentError,
    layerwise_sigma_min,
    log_density,
    product_log_singular_values,
    sigma_max,
    sigma_min,
    top_singular,
)
from normscope.nn import SCHEMES
from thinned import thinned

SLACK = 1e-13
"""Accuracy of the dense reference, relative to σ_max."""


@dataclass(frozen=True)
class Claim:
    """An algorithm's result for one figure, and the true value; errors are absolute."""

    what: str
    status: Status
    value: float
    stated: float
    true: float
    slack: float

    @property
    def holds(self) -> bool:
        """Assert the law."""
        return self.status is Status.NOT_CONVERGED or abs(self.value - self.true) <= self.stated + self.slack


def values_of(matrix: torch.Tensor) -> np.ndarray:
    return torch.linalg.svdvals(matrix).numpy()


def nonzero(values: np.ndarray) -> np.ndarray:
    return values[values > SMALL * values[0]]


def largest(subject: Subject, budget: int = 256) -> Iterator[Claim]:
    true = values_of(subject.whole.dense)
    found = sigma_max(subject.whole.op, max_products=budget)
    yield Claim("σ_max", found.status, found.value, found.error * found.value, true[0], SLACK * true[0])


def top(subject: Subject) -> Iterator[Claim]:
    true = values_of(subject.whole.dense)
    found = top_singular(subject.whole.op, 4)
    for i, (value, error) in enumerate(zip(found.values, found.errors, strict=True)):
        stated = max(float(error * value), found.round_off)
        yield Claim(f"σ_{i + 1}", found.status, float(value), stated, true[i], SLACK * true[0])


def smallest(subject: Subject, budget: int = 400) -> Iterator[Claim]:
    true = nonzero(values_of(subject.whole.dense))
    factor = subject.whole
    found = sigma_min(factor.op, kernel=factor.kernel, left_kernel=factor.left_kernel, max_products=budget)
    yield Claim("σ_min", found.status, found.value, found.error * found.value, true[-1], SLACK * true[0])


def smallest_with_kernels_unnamed(subject: Subject) -> Iterator[Claim]:
    true = values_of(subject.whole.dense)
    found = sigma_min(subject.whole.op, max_products=200)
    yield Claim("σ_min", found.status, found.value, found.error * found.value, true[-1], SLACK * true[0])


def smallest_of_a_stack(subject: Subject) -> Iterator[Claim]:
    rank = min(len(nonzero(values_of(factor.dense))) for factor in subject.factors)
    true = values_of(subject.product)[:rank]  # a factor shows which values are zero, a product does not
    found = layerwise_sigma_min([factor.layer for factor in subject.factors], max_products=300)
    yield Claim("σ_min", found.status, found.value, found.error * found.value, true[-1], SLACK * true[0])


def product(subject: Subject) -> Iterator[Claim]:
    found = product_log_singular_values([factor.op for factor in subject.factors], tol=1e-6)
    with np.errstate(divide="ignore"):
        true = np.log(values_of(subject.product))
    for i, (value, error) in enumerate(zip(found.log_values.tolist(), found.error.tolist(), strict=True)):
        relative = SLACK * np.exp(true[0] - true[i]) if true[i] > true[0] + np.log(SMALL) else inf
        if value == -inf:
            yield Claim(f"log σ_{i + 1} is −∞", found.status, 0, 0, true[i] - true[0] > np.log(SMALL), 0)
        elif relative < inf:
            yield Claim(f"log σ_{i + 1}", found.status, value, error, true[i], relative)


def density(subject: Subject, steps: int = 12) -> Iterator[Claim]:
    true = values_of(subject.whole.dense)
    found = log_density(subject.whole.op, steps=steps, confidence=0.999)
    above = np.log(true[true > SMALL * true[0]])
    share = above.size / true.size
    figures = {"mean": above.mean(), "std": above.std(), "kernel": 1 - share}
    for name, expected in figures.items():
        figure = getattr(found, name)
        yield Claim(name, found.status, figure.value, figure.error, expected, 1e-9 * (1 + abs(expected)))
    zero = found.measure.kernel
    shares = zero + (1 - zero) * (np.arange(above.size) + 0.5) / above.size
    far = float(np.abs([found.quantile(share) for share in shares] - np.sort(above)).mean())
    yield Claim("W₁", found.status, far, found.distance.error, 0.0, 1e-9)


EASY = ("condition 1", "random", "rank deficient", "condition 35")
FULL = ("condition 1", "random", "clustered", "condition 35")
WELL = (*EASY, "clustered", "condition 1000")
ALL = (*WELL, "condition 1e+06", "condition 1e+09")

ALGORITHMS: dict[str, tuple[Callable[[Subject], Iterator[Claim]], tuple[str, ...]]] = {
    "sigma_max": (largest, ALL),
    "sigma_max, few products": (partial(largest, budget=8), ("condition 1",)),
    "top_singular": (top, ALL),
    "sigma_min": (smallest, EASY),
    "sigma_min, few products": (partial(smallest, budget=30), ("condition 1",)),
    "sigma_min, no kernel named": (smallest_with_kernels_unnamed, ()),
    "layerwise_sigma_min": (smallest_of_a_stack, WELL),
    "product_log_singular_values": (product, WELL),
    "log_density": (density, EASY[:1]),
    "log_density, all steps": (partial(density, steps=50), WELL),
}
"""Name → what it claims of a subject, and the spectra on which it must come to a status other than "not
converged", whatever the operator."""

made = cache(synthetic)
blocks = cache(real_blocks)


REFUSED = ("gpas",)
"""Schemes whose backward is not the derivative of their forward: they stop a gradient on purpose."""
GROWING = ("attnres", "block-attnres")
"""Schemes whose state grows: the Jacobians of their blocks are not square."""

EASY_ON_BLOCKS = ("sigma_max", "top_singular", "sigma_min")


@pytest.fixture(autouse=True)
def _math_attention() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


# One of three is run always: in these, each pair of an operator, a spectrum or an algorithm occurs.
@pytest.mark.parametrize(
    ("operator", "spectrum", "algorithm"), thinned(OPERATORS, spectra_of(4), ALGORITHMS, every=3)
)
def test_no_status_flatters(operator: str, spectrum: str, algorithm: str) -> None:
    run, easy = ALGORITHMS[algorithm]
    claims = list(run(made(operator, spectrum)))
    assert claims
    for claim in claims:
        assert claim.holds, claim
        assert claim.status is not Status.NOT_CONVERGED or spectrum not in easy, claim


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    thinned(
        [name for name in SCHEMES if name not in REFUSED + GROWING],
        [name for name in ALGORITHMS if "," not in name],
        every=3,
    ),
)
def test_no_status_flatters_on_real_blocks(scheme: str, algorithm: str) -> None:
    claims = list(ALGORITHMS[algorithm][0](blocks(scheme)))
    assert claims
    for claim in claims:
        assert claim.holds, claim
        assert claim.status is not Status.NOT_CONVERGED or algorithm not in EASY_ON_BLOCKS, claim


@pytest.mark.parametrize("scheme", REFUSED)
def test_a_scheme_without_a_jacobian_is_refused(scheme: str) -> None:
    with pytest.raises(TangentError, match="finite differences"):
        blocks(scheme)


def test_a_kernel_that_is_not_named_is_not_called_a_singular_value() -> None:
    for operator in OPERATORS:
        found = smallest_with_kernels_unnamed(made(operator, "rank deficient"))
        assert next(found).status is Status.NOT_CONVERGED


def test_the_law_sees_an_error_that_is_too_small() -> None:
    for status in (Status.EXACT, Status.CONVERGED):
        assert Claim("σ", status, 1.0, 0.1, 1.05, 0.0).holds
        assert not Claim("σ", status, 1.0, 0.1, 1.2, 0.0).holds
    assert Claim("σ", Status.NOT_CONVERGED, 1.0, 0.1, 1.2, 0.0).holds


def test_the_operators_are_their_matrices() -> None:
    subjects = [made(operator, "random") for operator in OPERATORS] + [blocks("post"), blocks("siamesenorm")]
    for subject in subjects:
        for factor in subject.factors:
            m, n = factor.dense.shape
            assert factor.op.shape == (m, n)
            v, u = drawn(n), drawn(m)
            torch.testing.assert_close(factor.op.matvec(v).cpu(), factor.dense @ v)
            torch.testing.assert_close(factor.op.rmatvec(u).cpu(), factor.dense.T @ u)
