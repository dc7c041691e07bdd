"""Statistics for batch norms that have seen no batch: in eval mode they would not normalise.

A new BatchNorm has a running mean of 0 and a running variance of 1. In eval mode it is then the identity,
and a stack of convolutions shrinks or blows up its stream as no training step would see it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normscope.anatomy import measuring
from normscope.subjects import Subject, untouched


@contextmanager
def settled_batch_norms(subject: Subject) -> Iterator[int]:
    """Within the block, each BatchNorm that has seen no batch has the statistics of the fixed batch.

    Yields the number of them; their buffers are restored. One forward where there is any.
    """
    fresh = [
        module for module in subject.model.modules() if isinstance(module, _BatchNorm) and _is_fresh(module)
    ]
    if not fresh:
        yield 0
        return
    statistics: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}

    def settle(module: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        axes = [axis for axis in range(x.ndim) if axis != 1]
        if module not in statistics and x.numel() > x.shape[1]:  # one value a channel has no variance
            statistics[module] = x.mean(axes), x.var(axes, correction=0)
            _write(module, *statistics[module])

    with untouched(subject.model):
        with ExitStack() as hooks, measuring(subject.model), torch.no_grad():
            for module in fresh:
                hooks.enter_context(_hooked(module, settle))
            subject.forward()
        yield len(statistics)


def _is_fresh(norm: _BatchNorm) -> bool:
    mean, var = norm.running_mean, norm.running_var
    return mean is not None and var is not None and not mean.any() and bool((var == 1).all())


def _write(norm: _BatchNorm, mean: Tensor, var: Tensor) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(var)


@contextmanager
def _hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
