"""Parts that experiments share: drawn numbers, models that read text, and calls of modules."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.claims.evidence import Case
from normscope.claims.setup import Setup
from normscope.subjects import Subject
from normscope.train import RunConfig

ROUND_OFF = 1e-10
"""Largest relative error that float64 explains, at the widths and scales that experiments draw."""


def distance(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖, over all elements."""
    return float((found - truth).norm() / truth.norm())


def jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂f/∂x [n, n] by autograd at x of n elements, whatever its shape, without fused kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        found: Tensor = torch.autograd.functional.jacobian(f, x, vectorize=True)
    return found.reshape(x.numel(), x.numel())


def identity(x: Tensor) -> Tensor:
    """I [n, n] for x of n elements."""
    return torch.eye(x.numel(), dtype=x.dtype)


def spread(values: Iterable[float], digits: str = ".2g") -> str:
    """`0.5 to 2`: smallest and largest value."""
    found = list(values)
    return f"{min(found):{digits}} to {max(found):{digits}}"


def of_part(cases: Iterable[Case], part: str = "") -> list[Case]:
    """The cases of a part; by default those of the claim's own sentence."""
    return [case for case in cases if case.part == part]


def share_held(cases: Iterable[Case]) -> float:
    """The share of the cases that hold."""
    return statistics.fmean(case.holds for case in cases)


def values(cases: Iterable[Case], part: str = "") -> list[float]:
    """The values of the cases of a part; by default those of the claim's own sentence."""
    return [case.value for case in of_part(cases, part)]


def gaussian(seed: int, *shape: int) -> Tensor:
    """N(0, 1) of a shape, float64, from `seed` alone."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def on_text(model: str, seed: int, setup: Setup) -> Subject:
    """The model of a spec at its start, with texts of 32 tokens to read."""
    given = {"model": model, "seed": seed, "validation": 0.0, "seq_len": 32}
    return setup.on_text(RunConfig.from_dict(given)).subject()


@contextmanager
def calls_of(modules: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """Each call of `modules` made inside, in order: the module, its first input, its output."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda module, given, out: calls.append((module, given[0], out)))
        for module in modules
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
