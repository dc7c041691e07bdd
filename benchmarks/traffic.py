"""Collectives of a piece of code, with their bytes: as DTensor and functional collectives start them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

WIRE: dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda size, ranks: 2 * (ranks - 1) / ranks * size,
    "all_gather_into_tensor": lambda size, ranks: (ranks - 1) * size,
    "reduce_scatter_tensor": lambda size, ranks: (ranks - 1) / ranks * size,
    "all_to_all_single": lambda size, ranks: (ranks - 1) / ranks * size,
}
"""Bytes that a rank sends in a ring, from the bytes of its input and the number of ranks."""


class Traffic(TorchDispatchMode):
    """Records the functional collectives that run within it.

    Attributes:
        counts: number of calls by name.
        payload: bytes of this rank's inputs, all calls together.
        sent: bytes that this rank sends if each collective is a ring (`WIRE`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.payload, self.sent = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor runs first and starts its collectives on local tensors
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name[0] != "_" and name != "wait_tensor":
            self._record(name, args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: tuple[Any, ...]) -> None:
        part: Tensor = args[0]
        group = distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]
        size = part.numel() * part.element_size()
        self.counts[name] += 1
        self.payload += size
        self.sent += WIRE[name](size, group.size())
