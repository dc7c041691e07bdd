"""A norm that is computed ahead is read once, for its tensor as it was, in the modes of then."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from normscope.kernels.ahead import ReadsAhead

AHEAD = torch.full((2, 4), 7.0)


class Ahead(ReadsAhead, nn.LayerNorm):
    """A LayerNorm that reads ahead."""


def expecting(x: Tensor) -> Ahead:
    norm = Ahead(4)
    norm.expect(x, AHEAD)
    return norm


def test_a_norm_is_read_once() -> None:
    x = torch.randn(2, 4)
    norm = expecting(x)
    assert norm(x) is AHEAD
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, (4,)))
    norm.expect(x, AHEAD)
    norm.forget()
    assert norm(x) is not AHEAD


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_norm_is_read_only_for_its_tensor_as_it_was(mode: Callable[[], AbstractContextManager]) -> None:
    x = torch.randn(2, 4)
    with mode():
        assert expecting(x)(x) is AHEAD
        assert expecting(x)(x.clone()) is not AHEAD
        norm = expecting(x)
        x.add_(1)
        assert norm(x) is not AHEAD


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ],
)
def test_a_norm_is_read_only_in_the_modes_in_which_it_was_computed(
    mode: Callable[[], AbstractContextManager],
) -> None:
    x = torch.randn(2, 4)
    for computed, asked in ((nullcontext, mode), (mode, nullcontext)):
        with computed():
            norm = expecting(x)
        with asked():
            assert norm(x) is not AHEAD
    with mode():
        assert expecting(x)(x) is AHEAD
