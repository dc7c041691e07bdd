"""Samples of the initial matrices, kept to detect later whether the weights were trained."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_ENTRIES = 8
DRAWN = "drawn"
"""Name of the buffer. It follows the weights' device and dtype, and is not part of a state dict."""


@torch.no_grad()
def remember(model: nn.Module) -> None:
    """Keep samples of the current matrices of `model`.

    Vectors are left out, because some are set from data before training (Admin's ω, a bias of the logits).
    """
    model.register_buffer(DRAWN, torch.cat([*_samples(model)]), persistent=False)


@torch.no_grad()
def is_trained(model: nn.Module) -> bool:
    """True if a matrix differs from its initial values; False if values cannot be read."""
    samples = [*_samples(model)]
    kept = getattr(model, DRAWN).split([len(sample) for sample in samples])
    return any(_differ(now, drawn) for now, drawn in zip(samples, kept, strict=True))


def _samples(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            step = max(1, parameter.numel() // _ENTRIES)
            yield parameter.detach().flatten()[::step][:_ENTRIES]


def _differ(now: Tensor, drawn: Tensor) -> bool:
    if now.is_meta or isinstance(now, FakeTensor):
        return False
    # A change of dtype rounds both; a single module may have changed its dtype alone.
    narrower = min(now.dtype, drawn.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return not torch.equal(now.to(narrower), drawn.to(now.device, narrower))
