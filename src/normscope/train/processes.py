"""The processes that train one model together: what differs between one of them and several.

`Processes` is one process alone, where everything is trivial; `distributed.py` has several.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normscope.errors import UsageError, suggest
from normscope.subjects import Batch, Subject

PARALLELS = ("ddp", "fsdp")


class Processes:
    """One process alone."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """True if this is the one that writes and speaks."""
        return self.rank == 0

    def device(self, wanted: str) -> str:
        """Device on which this process computes when the run is on `wanted`."""
        return wanted

    def wrapped(self, subject: Subject) -> nn.Module:
        """The subject's model, ready to be trained together."""
        return subject.model

    def loss(self, subject: Subject, model: nn.Module, batch: Batch) -> Tensor:
        """Loss on this process's part of the batch; the mean over processes is the whole batch's."""
        return subject.loss(batch, model)

    def means(self, values: Sequence[float]) -> list[float]:
        """The means of some numbers over all processes, in one exchange."""
        return list(values)

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every process, on the CPU."""
        return [tensor]

    def take_device(self) -> None:
        """Make this process's device the current one of the thread that asks."""
        if torch.cuda.is_initialized():
            torch.cuda.set_device(torch.cuda.current_device())


@contextmanager
def joined(parallel: str | None, device: str) -> Iterator[Processes]:
    """This process among those of torchrun, or alone where it did not start it.

    Args:
        parallel: "ddp" (also where None) or "fsdp".

    Raises:
        UsageError: an unknown name, or a name without torchrun.
    """
    if parallel is not None and parallel not in PARALLELS:
        do = suggest(parallel, PARALLELS, "choose one")
        raise UsageError(f"--parallel {parallel}", " or ".join(PARALLELS), do)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        if parallel is not None:
            do = "start it as `torchrun --nproc-per-node 2 -m normscope train …`"
            raise UsageError(f"--parallel {parallel} in one process", "several, from torchrun", do)
        yield Processes()
        return
    from torch import distributed as dist

    from normscope.train.distributed import Distributed

    processes = Distributed(parallel or "ddp", device)
    try:
        yield processes
    finally:
        dist.destroy_process_group()
