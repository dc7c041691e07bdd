"""Models of fake tensors: shapes without values, which make a model of any size readable."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from normscope.nn.tensors import put, tensors_of
from normscope.subjects.feed import map_tensors
from normscope.subjects.subject import Batch


class _Faking(FakeTensorMode):
    """Mode that multiplies matrices in groups in any type, as real tensors are; PyTorch takes bfloat16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) != "aten._grouped_mm.default" or args[0].dtype == torch.bfloat16:
            return super().__torch_dispatch__(func, types, args, kwargs)
        left, right, *others = args
        product: Any = super().__torch_dispatch__(
            func, types, (left.bfloat16(), right.bfloat16(), *others), kwargs
        )
        return product.to(left.dtype)


@contextmanager
def faking() -> Iterator[FakeTensorMode]:
    """A mode for fake tensors, with PyTorch's warnings about them silenced."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _Faking(allow_non_fake_inputs=True) as mode:
            # Copying a module, as nn.TransformerEncoder does, asks each parameter for its address.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield mode
    finally:
        logger.setLevel(level)


def fake_mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode that a fake model was built in, and that its forwards need; None for a real model."""
    return next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)


def to_fake(batch: Batch, mode: FakeTensorMode | None) -> Batch:
    """`batch` in fake tensors; unchanged if `mode` is None."""
    if mode is None:
        return batch
    return map_tensors(lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t), batch)


def moved(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """`model.to(device, dtype)`, also for fake tensors, which PyTorch cannot move: they are replaced."""
    if fake_mode_of(model) is None:
        return model.to(device, dtype)
    if dtype is None:
        return model
    return _replaced(model, lambda t: t.to(dtype) if t.is_floating_point() else t)


def fake_from_meta(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replace the tensors of a model that was built on the meta device by fake tensors on the CPU."""
    with mode:
        return _replaced(model, lambda t: torch.empty_like(t, device="cpu"))


def _replaced(model: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replace each parameter and buffer by `make(tensor)`; tied ones stay tied."""
    put(
        model,
        {path: make(t.detach()).requires_grad_(t.requires_grad) for path, t in tensors_of(model).items()},
    )
    return model
