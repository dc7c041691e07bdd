"""Conditions under which a fused backend may run.

A fused operation returns zero tangents where forward mode is not written for it, and hides its inside from
what records operations. The formula in PyTorch's own operations is right in all these cases.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether tensors are ordinary and nothing compiles, transforms or records the call."""
    return not (torch.compiler.is_dynamo_compiling() or is_recorded() or is_transformed(tensors))


def is_transformed(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a transform of torch.func is active, or a tensor has a tangent or a type of its own."""
    if torch._C._are_functorch_transforms_active():
        return True
    return any(
        each is not None
        and (
            type(each) not in _PLAIN
            or torch._C._functorch.is_functorch_wrapped_tensor(each)
            or torch._C._functorch.is_legacy_batchedtensor(each)  # autograd.grad(…, is_grads_batched=True)
            or forward_ad.unpack_dual(each).tangent is not None
        )
        for each in tensors
    )


def is_recorded() -> bool:
    """Whether a mode of PyTorch sees the operations that run."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    depth = torch._C._len_torch_function_stack()
    modes = (torch._C._get_function_stack_at(index) for index in range(depth))
    return any(type(mode).__name__ != "DeviceContext" for mode in modes)  # that of torch.set_default_device
