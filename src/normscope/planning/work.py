"""Work of one operation: floating-point operations, by PyTorch's formulas, and bytes written."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

INTENSITY = 24.0
"""Floating-point operations that take as long as writing one byte."""
CALL = 3e6
"""Floating-point operations that take as long as calling one operator from Python."""
BY_AUTOGRAD, SAVED_AGAIN, RUN_AGAIN = 0.3, 1.0, 7.0
"""Calls that take as long as one by autograd, one tensor that a second run saves, and starting such a run.

All were fitted to forward and backward passes of 16 small models on one thread of an x86 CPU.
"""


class Work(NamedTuple):
    """Floating-point operations, bytes that operators write, and calls of operators from Python."""

    flops: float = 0.0
    written: float = 0.0
    calls: float = 0.0

    def plus(self, other: "Work") -> "Work":
        """The work of both."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: "Work") -> "Work":
        """The work without that of `other`."""
        return Work(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def cost(self) -> float:
        """The time in floating-point operations: `flops` + `INTENSITY` · `written` + `CALL` · `calls`."""
        return self.flops + INTENSITY * self.written + CALL * self.calls


def work_of(func: Any, args: Any, kwargs: Any, output: Any) -> Work:
    """The work of a call of an operator with this output; views write nothing."""
    if func.namespace == "prim":  # fake tensors ask for their device so; real ones do not
        return Work()
    if func.is_view:
        return Work(calls=1)
    packet = func._overloadpacket
    count = _MORE.get(packet) or flop_registry.get(packet)
    flops = 0 if count is None else count(*args, **kwargs, out_val=output)
    tensors = [each for each in tree_iter(output) if isinstance(each, Tensor)]
    return Work(flops, sum(each.numel() * each.element_size() for each in tensors), 1)


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _grouped(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """(M, K) by (G, K, N), or (G, M, K) by (G, K, N): 2·M·K·N in all, of the rows that are there."""
    return 2 * left.numel() * right.shape[-1]


_MORE: dict[Any, Any] = {
    getattr(torch.ops.aten, name): count
    for name, count in (
        ("_scaled_dot_product_flash_attention_for_cpu", _attention),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward),
        ("_grouped_mm", _grouped),
    )
    if hasattr(torch.ops.aten, name)
}
"""Operators that `flop_registry` lacks: attention on a CPU, and matmuls of mixtures of experts."""
