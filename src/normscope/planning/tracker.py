"""`Tracker`: the bytes that tensors hold at each moment of a run, on real or on fake tensors.

Every operation's outputs pass through a `TorchDispatchMode`. A storage counts from the operation that returns
it until Python's and autograd's last reference to it is gone, as in `torch.distributed._tools.MemTracker`: a
test compares the peaks. Memory that a kernel takes and gives back within one operation is not seen, but for
convolutions (`_scratch`).

Under any dispatch mode, autograd writes some results to a new tensor that it otherwise writes into an old one
(`_WRITTEN_IN_PLACE`), and drops the old one at once. For a moment there are both. That moment is no peak,
unless the old one is a view: its base is still referred to, so that autograd does not write to it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from normscope.planning.work import BY_AUTOGRAD, SAVED_AGAIN, Work, work_of

ROUND = {"cuda": 512}
"""Device type → bytes to a multiple of which PyTorch's allocator rounds each storage."""

_WRITTEN_IN_PLACE = frozenset(
    (
        torch.ops.aten.add.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter_add.default,
    )
)
"""Operations of the backward pass that autograd does in place, and not in place under a dispatch mode.

These are the sum of a tensor's gradients, and the gradients of indexing, `gather`, `max` and `topk`.
"""

_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


class Held(StrEnum):
    """Contents of a storage."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer state"
    BATCH = "batch"
    GRADIENTS = "gradients"
    BLOCKS = "activations of the blocks"
    ENDS = "embedding, logits and loss"
    BACKWARD = "temporary, backward pass"
    STEP = "temporary, optimizer step"


class Storage:
    """A storage: its number, which is never given again, its bytes, and what it holds."""

    __slots__ = ("held", "num_bytes", "number", "reference")

    def __init__(self, number: int, num_bytes: int, held: Held) -> None:
        self.number, self.num_bytes, self.held = number, num_bytes, held
        self.reference: weakref.ref[UntypedStorage] | None = None


class Tracker(TorchDispatchMode):
    """Mode that follows every storage that appears in its block.

    Attributes:
        live: bytes alive now, by what they hold.
        peak: the largest sum of `live` so far.
        at_peak: `live` at that moment.
        phase: what new storages hold; the caller sets it.
        moment: name of the present phase of the step; the caller sets it.
        peak_moment: `moment` at the peak.
        work: operations and bytes written so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[Held] = Counter()
        self.at_peak: Counter[Held] = Counter()
        self.peak = self._total = 0
        self.phase, self.moment, self.peak_moment = Held.ENDS, "forward", "forward"
        self.work = Work()
        self._storages: dict[int, Storage] = {}
        self._count = 0

    def hold(self, tensors: Iterable[Tensor], held: Held) -> None:
        """Count tensors that are there already, or say what known ones hold."""
        for storage in (each for tensor in tensors for each in self._seen(tensor, held)):
            if storage.held is not held:
                self.live[storage.held] -= storage.num_bytes
                self.live[held] += storage.num_bytes
                storage.held = held

    def storages(self, tensor: Tensor) -> list[Storage]:
        """The storages of a tensor: one, or two of a sparse tensor."""
        return self._seen(tensor, self.phase)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self._seen(tensor, self.phase)
        in_backward, is_again = self.phase is Held.BACKWARD, torch.is_grad_enabled()
        if not (in_backward and not is_again and func in _WRITTEN_IN_PLACE and not args[0]._is_view()):
            self._note_peak(_scratch(func, args, output))
        work = work_of(func, args, kwargs or {}, output)
        if in_backward:
            # A second run detaches each tensor that it saves, once from Python's hook and once from its end.
            is_saved = func is torch.ops.aten.detach.default
            share = 1.0 if is_again else SAVED_AGAIN / 2 if is_saved else BY_AUTOGRAD
            work = work._replace(calls=share * work.calls)
        self.work = self.work.plus(work)
        return output

    def _seen(self, tensor: Tensor, held: Held) -> list[Storage]:
        return [self._storage(part, held) for part in _strided(tensor)]

    def _storage(self, tensor: Tensor, held: Held) -> Storage:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._storages.get(key)
        if known is not None:
            return known
        step = ROUND.get(tensor.device.type, 1)
        self._count += 1
        new = Storage(self._count, -(-storage.nbytes() // step) * step, held)
        new.reference = weakref.ref(storage, self._forgetting(key, new))
        self._storages[key] = new
        self._total += new.num_bytes
        self.live[held] += new.num_bytes
        return new

    def _note_peak(self, scratch: int) -> None:
        if self._total + scratch > self.peak:
            self.peak, self.at_peak, self.peak_moment = self._total + scratch, self.live.copy(), self.moment
            self.at_peak[self.phase] += scratch

    def _forgetting(self, key: int, storage: Storage) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._total -= storage.num_bytes
            self.live[storage.held] -= storage.num_bytes
            self._storages.pop(key, None)

        return gone


def _scratch(func: Any, args: Any, output: Any) -> int:
    """Bytes that a convolution on a CPU takes and gives back: oneDNN copies its tensors into its own layout.

    Forward, the input and the weight, or the output; backward, the gradient, the input and the weight.
    """
    if func not in (_CONVOLUTION, _CONVOLUTION_BACKWARD) or args[0].device.type != "cpu":
        return 0
    if func is _CONVOLUTION:
        return max(args[0].nbytes + args[1].nbytes, output.nbytes)
    return sum(tensor.nbytes for tensor in args[:3])


def _strided(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the values of `tensor`, which may be sparse."""
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    return (tensor,) if tensor.layout is torch.strided else ()
