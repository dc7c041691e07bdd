"""Memory: the free memory of the machine, the needs of a model and a batch, and errors if they exceed it."""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.errors import UsageError
from normscope.subjects.fake import faking, to_fake
from normscope.subjects.feed import tensors_in
from normscope.subjects.subject import Batch, arguments_in
from normscope.subjects.untouched import untouched


class NoRoomError(UsageError):
    """The model or the batch does not fit into memory."""


COPIES = 5
"""Weights, gradients, two Adam moments, and the copy that the forecast trains."""
_FAR_BEYOND = 2.0  # a forward writes about twice what training keeps: refuse only above this ratio
_SMALL_IDS, _SMALL_FLOATS = 2**13, 2**21
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Free bytes on `device`; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = [limit for limit in (_machine_bytes(), _cgroup_bytes()) if limit is not None]
    return min(limits) if limits else None


def _machine_bytes() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_bytes() -> int | None:
    """The tightest limit of this process's control groups, minus what they use and cannot free."""
    rooms = []
    for folder, limit_name, used_name, cache_name in _cgroup_folders():
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            rooms.append(limit - used + _cache(folder / "memory.stat", cache_name))
    return max(0, min(rooms)) if rooms else None


def _cgroup_folders() -> Iterator[tuple[Path, str, str, str]]:
    own = Path("/proc/self/cgroup")
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            root, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUP / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        leaf = root / group.lstrip("/")
        for folder in (leaf, *leaf.parents):
            if folder.is_relative_to(root):
                yield folder, *names


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no file, or "max": no limit
        return None


def _cache(path: Path, name: str) -> int:
    if not path.is_file():
        return 0
    return sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name)


def require_room_for_model(
    parameters: Iterable[Tensor], given: str, device: torch.device, *, built: bool = False
) -> None:
    """Raise UsageError if training in float32 would need more memory than `device` has free.

    Args:
        parameters: the model's parameters, possibly on the meta device.
        built: whether the weights are in memory already.
    """
    count = sum(parameter.numel() for parameter in parameters)
    needed, room = 4 * count * (COPIES - built), available_bytes(device)
    if room is not None and needed > room:
        raise NoRoomError(
            f"{given} ({count:,} parameters, {gigabytes(needed)} with gradients, Adam moments and a copy)",
            f"at most the {gigabytes(room)} that this machine has free",
            "make it smaller, or only read it: normscope anatomy needs no memory for weights",
        )


def require_room_for_ids(batch_size: int, seq_len: int) -> None:
    """Raise UsageError if the ids of one batch alone exceed the free memory."""
    needed, room = 8 * batch_size * seq_len, available_bytes(torch.device("cpu"))
    if room is not None and 4 * needed > room:
        raise NoRoomError(
            f"{batch_size:,} sequences of {seq_len:,} tokens ({gigabytes(needed)} of ids)",
            f"a batch for the {gigabytes(room)} that this machine has free",
            "lower --batch-size or --seq-len",
        )


def require_room_for_batch(model: nn.Module, batch: Batch, given: str) -> None:
    """Raise UsageError if one forward on `batch` would write far more than the device has.

    The forward runs under FakeTensorMode. Small batches, and models that cannot run so, are not checked.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    room = available_bytes(device)
    if room is None or _is_small(batch):
        return
    written = bytes_written(model, batch)
    if written is not None and written > _FAR_BEYOND * room:
        raise NoRoomError(
            f"{given} (one forward writes {gigabytes(written)})",
            f"a batch for the {gigabytes(room)} that this machine has free",
            "lower --batch-size or --seq-len",
        )


def bytes_written(model: nn.Module, batch: Batch) -> int | None:
    """Bytes of all tensors that one forward creates, without views; None if a fake forward is impossible."""
    counter = _Written()
    with untouched(model):
        model.eval()
        try:
            with torch.no_grad(), faking() as mode, sdpa_kernel(SDPBackend.MATH):
                state = itertools.chain(model.named_parameters(), model.named_buffers())
                stand_ins: dict[str, Tensor] = {name: mode.from_tensor(t) for name, t in state}
                given = arguments_in(to_fake(batch, mode))
                with counter:
                    torch.func.functional_call(model, stand_ins, *given)
        except Exception:  # the forward depends on values: no estimate
            return None
    return counter.bytes


class _Written(TorchDispatchMode):
    """Mode that counts the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.is_mutable:
            outputs = output if isinstance(output, tuple | list) else (output,)
            self.bytes += sum(t.numel() * t.element_size() for t in outputs if isinstance(t, Tensor))
        return output


def _is_small(batch: Batch) -> bool:
    sizes = {True: 0, False: 0}
    for tensor in tensors_in(batch):
        sizes[tensor.is_floating_point()] += tensor.numel()
    return sizes[False] < _SMALL_IDS and sizes[True] < _SMALL_FLOATS


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` says that memory was refused."""
    refused = ("can't allocate memory", "not enough memory", "out of memory", "failed to allocate")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in refused)
    )


@contextmanager
def memory_refusals(given: str) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a UsageError about `given`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise NoRoomError(
            f"{given} (out of memory)",
            "a model and a batch that fit into the device's memory",
            "lower --batch-size or --seq-len, or make the model smaller",
        ) from error


def gigabytes(count: float) -> str:
    """A number of bytes as "1.5 GiB"."""
    return f"{count / 2**30:,.1f} GiB"
