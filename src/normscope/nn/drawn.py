"""A few initial entries of each matrix, kept to detect later whether the weights were trained."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_ENTRIES = 8
DRAWN = "drawn"
"""Name of the buffer. It moves and changes its precision with the weights; a state dict does not hold it."""


@torch.no_grad()
def remember(model: nn.Module) -> None:
    """Keep what the matrices of `model` are now. Vectors are left out: some are set from data before training
    (Admin's ω, a bias of the logits from the frequencies of a text)."""
    model.register_buffer(DRAWN, torch.cat([*_samples(model)]), persistent=False)


@torch.no_grad()
def is_trained(model: nn.Module) -> bool:
    """True where some matrix is no longer what the build drew; False where no values can be read."""
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
    # Both were rounded when the model changed its precision; a module on its own may have changed alone.
    narrower = min(now.dtype, drawn.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return not torch.equal(now.to(narrower), drawn.to(now.device, narrower))
