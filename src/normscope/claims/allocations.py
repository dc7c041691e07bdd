"""Bytes: what a forward pass keeps for the backward pass, and the peak of what a run holds."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile


def kept_for_backward(forward: Callable[[], Tensor], besides: Iterable[Tensor] = ()) -> dict[int, int]:
    """Bytes of each storage, by its address, that the graph of `forward()` keeps.

    Args:
        forward: what is differentiated; its graph lives until all is counted.
        besides: what is there anyway, such as parameters and inputs: their storages are not counted.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in besides}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    del result  # only now may an address be given to another tensor
    return kept


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that `run()` holds at once beyond what was there, by the count of the CPU's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    assert seen.profiler is not None
    results = seen.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        top = max(top, held)
    return top


def cuda_peak_bytes(run: Callable[[], object]) -> int:
    """The same on a GPU, by the count of PyTorch's allocator."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
