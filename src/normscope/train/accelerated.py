"""Several processes, joined by accelerate: DDP copies the model to each, FSDP2 shards it over all.

Every process makes every batch and takes its share of the sequences, so that all together step on the batch
that one process alone would step on.
"""

from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from normscope.nn import Block
from normscope.subjects import Batch, Subject, untouched
from normscope.train.batches import require_share, share_of, weight_of
from normscope.train.processes import Processes


class Accelerated(Processes):
    """This process among several of one run."""

    def __init__(self, parallel: str, device: str) -> None:
        self._parallel = parallel
        self._on_cpu = torch.device(device).type == "cpu"
        self._ddp = DistributedDataParallelKwargs()
        self._accelerator = Accelerator(cpu=self._on_cpu, kwargs_handlers=[self._ddp])
        self.rank, self.size = self._accelerator.process_index, self._accelerator.num_processes

    def device(self, wanted: str) -> str:
        """Each process on a device of its own, `cuda` being all of the machine's."""
        return wanted if self._on_cpu else str(self._accelerator.device)

    def wrapped(self, subject: Subject) -> nn.Module:
        """The subject's model in DDP, or sharded block by block in place."""
        require_share(subject.batch, self.size)
        if self._parallel == "ddp":
            self._ddp.find_unused_parameters = _leaves_some_out(subject)
            return self._accelerator.prepare(subject.model)
        # accelerate 1.15 itself shards on GPUs only; on CPUs it falls back to DDP without a word.
        mesh = init_device_mesh(self._accelerator.device.type, (self.size,))
        for block in _blocks(subject.model):
            fully_shard(block, mesh=mesh)
        fully_shard(subject.model, mesh=mesh)
        return subject.model

    def loss(self, subject: Subject, model: nn.Module, batch: Batch) -> Tensor:
        """Of this process's sequences, weighed by their share of the labels that count."""
        loss = subject.loss(share_of(batch, self.rank, self.size), model)
        return loss * weight_of(batch, self.rank, self.size)

    def mean(self, value: float) -> float:
        """The mean of a number over all processes."""
        return float(self._sum([value])[0]) / self.size

    def any(self, flags: tuple[bool, ...]) -> tuple[bool, ...]:
        """For each flag whether it is up in any process."""
        return tuple(bool(count) for count in self._sum(list(map(float, flags))))

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every process, on the CPU."""
        every = self._accelerator.gather(tensor[None].to(self._accelerator.device))
        return list(cast(Tensor, every).cpu())

    def take_device(self) -> None:
        """Make this process's device the current one of the thread that asks."""
        if not self._on_cpu:
            torch.cuda.set_device(self._accelerator.device)

    def end(self) -> None:
        """Leave the others."""
        self._accelerator.end_training()

    def _sum(self, values: list[float]) -> Tensor:
        here = torch.tensor(values, dtype=torch.float64, device=self._accelerator.device)
        return cast(Tensor, self._accelerator.reduce(here, reduction="sum"))


def _leaves_some_out(subject: Subject) -> bool:
    """Whether the loss does not reach some parameter, which DDP must be told."""
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    with untouched(subject.model), torch.enable_grad():
        subject.loss().backward()
        return any(p.grad is None for p in parameters)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The parts that are sharded one by one: the blocks of our models, of Hugging Face's and of PyTorch's."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    kinds = (Block, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return [m for m in model.modules() if isinstance(m, kinds) or type(m).__name__ in names]
