"""Several processes through accelerate: DDP, which copies the model to each, and FSDP2, which shards it.

Every process makes every batch and takes its share of the sequences, so that all together step on the batch
that one process alone would step on.
"""

from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn import Block
from normscope.subjects import Batch, Subject, untouched
from normscope.subjects.feed import map_tensors
from normscope.train.batches import tensors_in
from normscope.train.processes import Processes

IGNORED = -100
"""The label that cross-entropy leaves out."""


class Accelerated(Processes):
    """This process among several of one run."""

    def __init__(self, parallel: str, device: str) -> None:
        self._parallel = parallel
        self._on_cpu = torch.device(device).type == "cpu"
        options: dict[str, Any] = {"cpu": True} if self._on_cpu else {}
        if parallel == "fsdp":
            self._plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
            )
            options["fsdp_plugin"] = self._plugin
        self._ddp = DistributedDataParallelKwargs()
        self._accelerator = Accelerator(kwargs_handlers=[self._ddp], **options)
        self.rank, self.size = self._accelerator.process_index, self._accelerator.num_processes

    def device(self, wanted: str) -> str:
        """Each process on a device of its own, `cuda` being all of the machine's."""
        return wanted if self._on_cpu else str(self._accelerator.device)

    def wrapped(self, subject: Subject) -> nn.Module:
        """The subject's model in DDP, or sharded block by block in place."""
        self._require_share(subject.batch)
        if self._parallel == "ddp":
            self._ddp.find_unused_parameters = _leaves_some_out(subject)
            return self._accelerator.prepare(subject.model)
        self._plugin.transformer_cls_names_to_wrap = _block_names(subject.model)
        # accelerate wants an optimiser beside; the trial makes its own, of the shards.
        beside = torch.optim.SGD(subject.model.parameters(), lr=0.0)
        model, _ = self._accelerator.prepare(subject.model, beside)
        return model

    def loss(self, subject: Subject, model: nn.Module, batch: Batch) -> Tensor:
        """Of this process's sequences, weighed by their share of the labels that count."""
        share = self._share(batch)
        loss = subject.loss(share, model)
        labels, own = _num_labels(batch), _num_labels(share)
        return loss if labels is None or own is None else loss * (own * self.size / max(1, labels))

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

    def _require_share(self, batch: Batch) -> None:
        rows = _num_rows(batch)
        if rows % self.size:
            raise UsageError(
                f"a batch of {rows} sequences for {self.size} processes",
                "as many sequences for each",
                f"make --batch-size a multiple of {self.size}",
            )

    def _share(self, batch: Batch) -> Batch:
        rows = _num_rows(batch)
        part = rows // self.size
        start = self.rank * part

        def cut(tensor: Tensor) -> Tensor:
            return tensor[start : start + part] if tensor.ndim and len(tensor) == rows else tensor

        return cast(Batch, map_tensors(cut, batch))


def _num_rows(batch: Batch) -> int:
    """Sequences of a batch: the rows of its first tensor."""
    return len(tensors_in(batch)[0])


def _num_labels(batch: Batch) -> int | None:
    """Labels that count; None where none is left out by `IGNORED`, or there are none by that name."""
    labels = batch.get("labels") if isinstance(batch, dict) else None
    return (
        int((labels != IGNORED).sum())
        if isinstance(labels, Tensor) and not labels.is_floating_point()
        else None
    )


def _leaves_some_out(subject: Subject) -> bool:
    """Whether the loss does not reach some parameter, which DDP must be told."""
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    with untouched(subject.model), torch.enable_grad():
        subject.loss().backward()
        return any(p.grad is None for p in parameters)


def _block_names(model: nn.Module) -> list[str]:
    """Class names of the parts that are sharded one by one."""
    if any(isinstance(module, Block) for module in model.modules()):
        return [Block.__name__]
    return list(getattr(model, "_no_split_modules", None) or [])
