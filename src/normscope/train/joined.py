"""Joining the processes that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from normscope.errors import UsageError, suggest
from normscope.train.processes import Processes

Parallel = Literal["ddp", "fsdp"]
PARALLELS: tuple[str, ...] = get_args(Parallel)


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
    from normscope.train.distributed import Distributed

    processes = Distributed(parallel or "ddp", device)
    try:
        yield processes
    finally:
        processes.end()
