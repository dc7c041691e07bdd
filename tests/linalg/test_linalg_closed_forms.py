"""Closed forms of the norms against autograd in float64."""

import pytest
import torch
from torch import Tensor

from normscope.linalg.closed_forms import left_kernel_share

D = 12


def norm(z: Tensor, gamma: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """(ẑ, y), written out."""
    middle = z - z.mean(-1, keepdim=True) if centred else z
    normalised = middle / torch.sqrt(middle.square().mean(-1, keepdim=True) + eps)
    return normalised, normalised if gamma is None else gamma * normalised


def gammas() -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(D, generator=generator, dtype=torch.float64) + 0.3
    one, two = dense.clone(), dense.clone()
    one[4] = 0
    two[[1, 7]] = 0
    wide = torch.logspace(-3, 3, D, dtype=torch.float64)
    return {"none": None, "dense": dense, "one-zero": one, "two-zeros": two, "wide": wide}


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("gamma", gammas().values(), ids=gammas())
def test_erased_share_is_that_of_the_dense_left_kernel(gamma: Tensor | None, centred: bool) -> None:
    z = torch.randn(D, dtype=torch.float64) * 3 + 1
    g = torch.randn(D, dtype=torch.float64) * 1e-30  # float32 squares of it would be zero
    jacobian = torch.autograd.functional.jacobian(lambda x: norm(x, gamma, 0.0, centred)[1], z)
    u, s, _ = torch.linalg.svd(jacobian)
    kernel = u[:, s < 1e-12 * s[0]]
    expected = (kernel.T @ g).square().sum() / g.square().sum()
    share = left_kernel_share(g, norm(z, gamma, 0.0, centred)[0], gamma, centred)
    torch.testing.assert_close(share, expected, rtol=1e-8, atol=1e-12)
