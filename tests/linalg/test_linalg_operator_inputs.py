"""Tests of inputs: unusable points and outputs are reported; f and its module are restored."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from normscope.linalg import JacobianOperator, Method, dense

WRONG_POINTS = {
    "list": ([1.0, 2.0], TypeError, "x of type list: expected a floating-point tensor"),
    "integers": (torch.ones(3, dtype=torch.int64), ValueError, r"x of dtype torch\.int64"),
    "empty": (torch.ones(0, 3), ValueError, r"x of shape \(0, 3\): expected at least one element"),
}

WRONG_OUTPUTS = {
    "tuple": (lambda x: (x, x), "f returned tuple: expected a floating-point tensor"),
    "integers": (lambda x: x.long(), r"f returned a tensor of dtype torch\.int64"),
    "empty": (lambda x: x[..., :0], r"f returned a tensor of shape .*0,?\): expected at least one element"),
}


@pytest.mark.parametrize(("x", "kind", "words"), WRONG_POINTS.values(), ids=WRONG_POINTS)
def test_points_that_cannot_be_measured_are_reported(x, kind, words) -> None:
    with pytest.raises(kind, match=words):
        JacobianOperator(torch.sin, x)


@pytest.mark.parametrize(("f", "words"), WRONG_OUTPUTS.values(), ids=WRONG_OUTPUTS)
def test_outputs_that_cannot_be_measured_are_reported(f, words) -> None:
    with pytest.raises(ValueError, match=words):
        JacobianOperator(f, torch.randn(3))


def test_tensors_on_a_graph_are_held_to_the_same() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="inputs of type list"):
        JacobianOperator.on_graph(x * 2, [x])
    with pytest.raises(ValueError, match=r"outputs of shape \(0,\)"):
        JacobianOperator.on_graph(x[:0], x)


def test_no_rows_at_once_is_reported() -> None:
    with pytest.raises(ValueError, match="chunk=0: expected at least 1"):
        dense(JacobianOperator(torch.sin, torch.randn(3)), chunk=0)


@pytest.mark.parametrize("f", [lambda x: x.mul_(2).sin(), lambda x: x[..., :2].mul_(2).sin()])
def test_functions_that_write_into_their_input_are_reported(f) -> None:
    x = torch.randn(4)
    before = x.clone()
    with pytest.raises(ValueError, match=r"f writes into x: expected .* \(lambda x: f\(x\.clone\(\)\)\)"):
        JacobianOperator(f, x)
    assert torch.equal(x, before)
    JacobianOperator(lambda x: f(x.clone()), x)


MOVING = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "shared": lambda: nn.Sequential(*2 * [nn.BatchNorm1d(6)]),
}


WAYS = {
    "itself": lambda module: module,
    "a function that calls it": lambda module: lambda x: 2 * module(x),
    "its forward, a part of it": lambda module: nn.Sequential(nn.Identity(), module).forward,
}
"""Ways to use a module in the measured function."""


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("method", [Method.DOUBLE_BACKWARD, Method.CENTRAL_DIFFERENCES])
@pytest.mark.parametrize("make", MOVING.values(), ids=MOVING)
def test_the_buffers_of_a_module_do_not_move(make, method: Method, way) -> None:
    module = make().double()
    own, before = dict(module.named_buffers()), deepcopy(module.state_dict())
    x = torch.randn(5, 6, dtype=torch.float64)
    op = JacobianOperator(way(module), x, method=method)
    v = torch.randn(30, dtype=torch.float64)
    torch.testing.assert_close(op.matvec(v), op.matmat(torch.stack([v, v, -v]))[1])
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(tensor is own[name] for name, tensor in module.named_buffers())
    module(x)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_buffer_that_two_parts_share_stays_one() -> None:
    class Counts(nn.Module):
        def __init__(self, seen: Tensor) -> None:
            super().__init__()
            self.register_buffer("seen", seen)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x * self.seen.clone()

    seen = torch.zeros(())
    twice = nn.Sequential(Counts(seen), Counts(seen))  # x · 1 · 2
    for f in (twice, lambda x: twice(x)):
        op = JacobianOperator(f, torch.randn(3))
        torch.testing.assert_close(op.matvec(torch.ones(3)), torch.full((3,), 2.0))
        assert twice[0].seen is twice[1].seen is seen
        assert float(seen) == 0


def test_no_hook_is_left_behind() -> None:
    before = len(nn.modules.module._global_forward_pre_hooks)
    JacobianOperator(lambda x: nn.LayerNorm(3)(x), torch.randn(3))
    assert len(nn.modules.module._global_forward_pre_hooks) == before


def test_buffers_are_put_back_after_an_exception() -> None:
    class Fails(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("inside")

    module = Fails(6)
    with pytest.raises(KeyError, match="inside"):
        JacobianOperator(module, torch.randn(5, 6))
    assert int(module.num_batches_tracked) == 0
