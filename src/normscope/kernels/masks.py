"""Masks of dropout, from PyTorch's own generators."""

import torch
from torch import Tensor

from normscope.kernels.form import Form


def draw_mask(form: Form, branch: Tensor, generator: torch.Generator | None) -> Tensor:
    """True with probability 1 − p, like branch."""
    return torch.empty_like(branch, dtype=torch.bool).bernoulli_(1 - form.drop, generator=generator)


class Masked:
    """Part of a kernel whose draw is the mask itself."""

    def draw(self, form: Form, branch: Tensor, generator: torch.Generator | None) -> Tensor:
        """The mask."""
        return draw_mask(form, branch, generator)

    def mask(self, form: Form, branch: Tensor, draw: Tensor) -> Tensor:
        """The draw."""
        return draw
