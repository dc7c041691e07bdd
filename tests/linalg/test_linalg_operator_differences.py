"""Tests of the comparison with finite differences: round-off, kinks, cost."""

import pytest
import torch
from torch import Tensor

from normscope.linalg import JacobianOperator, Method, TangentError
from normscope.linalg.differences import HIDDEN


class Quantised(torch.autograd.Function):
    """Rounds to quarters; the backward is that of the identity."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def mostly_detached(z: Tensor) -> Tensor:
    return z + (100 * z).detach()


UNDER_ROUND_OFF = {
    "quantised": lambda z: 1e5 + 10 * Quantised.apply(z),
    "offset": lambda z: 1e6 + mostly_detached(z),
    "offset of 1e5": lambda z: 1e5 + mostly_detached(z),
    "small gain": lambda z: 1 + 1e-7 * mostly_detached(z),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("f", UNDER_ROUND_OFF.values(), ids=UNDER_ROUND_OFF)
def test_wrong_derivatives_are_refused_under_a_large_offset_too(f, seed: int) -> None:
    with pytest.raises(TangentError, match="finite differences"):
        JacobianOperator(f, torch.randn(64, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(
    "f", [lambda z: 1e9 + mostly_detached(z), lambda z: 1 + 1e-10 * mostly_detached(z), lambda z: 1e9 + z]
)
def test_what_round_off_hides_at_every_step_is_noted(f) -> None:
    x = torch.randn(64)
    assert "tangent not compared" in JacobianOperator(f, x).note


SMOOTH = [torch.tanh, lambda z: z**2, lambda z: z @ torch.ones(64, 9)]


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("f", SMOOTH)
def test_longer_steps_show_right_derivatives_under_an_offset(f, offset: float) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert JacobianOperator(lambda z: offset + f(z), x).note == ""


@pytest.mark.parametrize("offset", 10.0 ** torch.arange(9))
@pytest.mark.parametrize("f", [*SMOOTH, torch.relu, lambda z: torch.tanh(3 * z)])
def test_right_derivatives_are_not_refused_under_any_offset(f, offset: Tensor) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    op = JacobianOperator(lambda z: float(offset) + f(z), x)
    assert op.note in ("", HIDDEN)


@pytest.mark.parametrize("f", [lambda z: 0 * z, lambda z: 1 + 0 * z, lambda z: 1e6 + 0 * z])
def test_constants_are_compared(f) -> None:
    assert JacobianOperator(f, torch.randn(64)).note == ""


def test_kinks_are_named_where_they_may_be_the_cause() -> None:
    with pytest.raises(TangentError, match="or f has a kink"):
        JacobianOperator(torch.relu, torch.zeros(8))
    with pytest.raises(TangentError, match="or f has a kink"):
        JacobianOperator(torch.relu, torch.zeros(8), method="central differences")


def test_functions_that_are_another_at_each_call_are_reported() -> None:
    calls: list[int] = []

    def other_each_time(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin() * len(calls)

    with pytest.raises(TangentError, match="f is not the same at each call"):
        JacobianOperator(other_each_time, torch.randn(8))


def test_set_up_is_two_forwards_where_all_is_well() -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(x)

    assert JacobianOperator(counted, torch.randn(8)).method is Method.DOUBLE_BACKWARD
    assert len(calls) == 2
