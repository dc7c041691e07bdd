"""The processes that train one model together: `Processes` is a single one, `distributed.py` has several."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normscope.errors import UsageError, suggest
from normscope.subjects import Batch, Subject

PARALLELS = ("ddp", "fsdp")


class Processes:
    """A single process."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """True if this process writes files and prints."""
        return self.rank == 0

    def device(self, wanted: str) -> str:
        """Device of this process in a run on `wanted`."""
        return wanted

    def wrapped(self, subject: Subject) -> nn.Module:
        """The subject's model, wrapped for joint training."""
        return subject.model

    def loss(self, subject: Subject, model: nn.Module, batch: Batch) -> Tensor:
        """Loss on this process's part of the batch; the mean over processes is the whole batch's."""
        return subject.loss(batch, model)

    def means(self, values: Sequence[float]) -> list[float]:
        """The mean of each number over all processes, in one exchange."""
        return list(values)

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every process, on the CPU."""
        return [tensor]

    def take_device(self) -> None:
        """Make this process's device the current one of the calling thread."""
        if torch.cuda.is_initialized():
            torch.cuda.set_device(torch.cuda.current_device())


@contextmanager
def joined(parallel: str | None, device: str) -> Iterator[Processes]:
    """This process among those of torchrun, or a single one without torchrun.

    Args:
        parallel: "ddp" (also for None) or "fsdp".

    Raises:
        UsageError: the name is unknown, or is given without torchrun.
    """
    if parallel is not None and parallel not in PARALLELS:
        do = suggest(parallel, PARALLELS, "choose one")
        raise UsageError(f"--parallel {parallel}", " or ".join(PARALLELS), do)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        if parallel is not None:
            do = "start it as `torchrun --nproc-per-node 2 -m normscope train …`"
            raise UsageError(f"--parallel {parallel} in one process", "several processes of torchrun", do)
        yield Processes()
        return
    from normscope.train.distributed import Distributed, leave

    processes = Distributed(parallel or "ddp", device)
    try:
        yield processes
    except BaseException:
        leave(together=False)
        raise
    else:
        leave(together=True)
