"""Several processes of torchrun: DDP copies the model to each, FSDP2 shards it over all.

Every process makes every batch and takes its share of the sequences, so that together they step on the same
batch as one process alone.
"""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from normscope.nn import Block
from normscope.subjects import Batch, Subject, untouched
from normscope.train.batches import require_share, share_of, with_a_label
from normscope.train.processes import Processes


class Distributed(Processes):
    """One of several processes of a run; see `Processes` for the methods."""

    def __init__(self, parallel: str, device: str) -> None:
        self._parallel = parallel
        kind, number = torch.device(device).type, int(os.environ.get("LOCAL_RANK", "0"))
        self._device = torch.device(kind) if kind == "cpu" else torch.device(kind, number)
        self.take_device()
        dist.init_process_group("gloo" if kind == "cpu" else dist.get_default_backend_for_device(kind))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def device(self, wanted: str) -> str:
        return str(self._device)  # each process has its own GPU, but `cuda` names none in particular

    def wrapped(self, subject: Subject) -> nn.Module:
        require_share(subject.batch, self.size)
        if self._parallel == "ddp":
            devices = None if self._device.type == "cpu" else [self._device.index]
            unused = _leaves_some_out(subject)
            return DistributedDataParallel(subject.model, devices, find_unused_parameters=unused)
        mesh = init_device_mesh(self._device.type, (self.size,))
        for block in _blocks(subject.model):
            fully_shard(block, mesh=mesh)
        fully_shard(subject.model, mesh=mesh)
        return subject.model

    def loss(self, subject: Subject, model: nn.Module, batch: Batch) -> Tensor:
        share, weight = with_a_label(batch, share_of(batch, self.rank, self.size), self.size)
        return subject.loss(share, model) * weight

    def means(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return (total / self.size).tolist()

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.to(self._device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        return [each.cpu() for each in every]

    def take_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)


def leave(*, together: bool) -> None:
    """Leave the group of processes; `together`: wait for the others first, as PyTorch recommends.

    A thread of Gloo drops the result of its last collective when it likes. If Python is ending by then, the
    process aborts. `monitored_barrier` waits in the calling thread and leaves nothing behind.
    """
    try:
        if together:
            wait = dist.monitored_barrier if dist.get_backend() == "gloo" else dist.barrier
            wait()
    finally:
        dist.destroy_process_group()


def _leaves_some_out(subject: Subject) -> bool:
    """True if the loss does not reach some parameter; DDP needs to know this."""
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    with untouched(subject.model), torch.enable_grad():
        subject.loss().backward()
        return any(p.grad is None for p in parameters)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one: blocks of normscope's, Hugging Face's or PyTorch's models."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    kinds = (Block, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return [m for m in model.modules() if isinstance(m, kinds) or type(m).__name__ in names]
