"""`Plan`: the memory of a training step, and the modules to recompute so that it fits."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from normscope.planning.recompute import Applied, recompute
from normscope.planning.step import Footprint

WITHOUT_DEVICE = "planned with the operations of a CPU: the weights do not fit"
"""Note of a plan for another device whose memory does not hold the model."""


@dataclass(frozen=True)
class Row:
    """Bytes that one part of the model saves for the backward pass.

    Attributes:
        path: a block or a part of one, or the name of what lies outside the blocks.
        kind: "block" (what its parts do not save), the kind of a branch, or "outside".
        saved: bytes, each storage counted once, where it is saved first.
        recomputed: whether the plan recomputes it, alone or with its block.
    """

    path: str
    kind: str
    saved: int
    recomputed: bool


@dataclass(frozen=True)
class Plan:
    """Memory of one training step in bytes, without and with the modules that the plan recomputes.

    The memory of the framework, such as a CUDA context, and fragmentation are not included.

    Attributes:
        model: the MODEL, or the class of a module.
        input: description of the batch.
        optimizer, precision: of the step.
        memory: the limit; None without one.
        recompute: paths of the modules to recompute; empty if nothing has to be.
        before: the step without recomputation.
        after: the step as planned.
        rows: what is saved for the backward pass, by part; without recomputation.
        device: type of the device whose operations were followed: "cpu", "cuda".
        tensors: "fake" where shapes alone were followed, "real" where the step was run.
        notes: remarks for the reader.
    """

    model: str
    input: str
    optimizer: str
    precision: str
    memory: int | None
    recompute: tuple[str, ...]
    before: Footprint
    after: Footprint
    rows: tuple[Row, ...]
    device: str
    tensors: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        from normscope.planning.words import text  # it needs this module

        return text(self)

    @property
    def peak(self) -> int:
        """Peak bytes of the step as planned."""
        return self.after.peak

    @property
    def added_flops(self) -> float:
        """Floating-point operations that recomputation adds, as a fraction of forward and backward pass."""
        before = self.before.work.flops
        return (self.after.work.flops - before) / before if before else 0.0

    @property
    def added_time(self) -> float:
        """Estimate of the added time, as a fraction of forward and backward pass; see `Work.cost`."""
        before = self.before.work.cost
        return (self.after.work.cost - before) / before if before else 0.0

    def apply(self, model: nn.Module) -> Applied:
        """Recompute the plan's modules in `model` from now on, see `recompute`.

        Returns:
            What was applied: its `undo()` ends it, and so does the end of a `with` block.

        Raises:
            UsageError: the model has no module of that path.
        """
        return recompute(model, self.recompute)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return {
            "model": self.model,
            "input": self.input,
            "optimizer": self.optimizer,
            "precision": self.precision,
            "memory": self.memory,
            "recompute": list(self.recompute),
            "added_flops": round(self.added_flops, 4),
            "added_time": round(self.added_time, 4),
            "before": _footprint(self.before),
            "after": _footprint(self.after),
            "saved": [vars(row) for row in self.rows],
            "device": self.device,
            "tensors": self.tensors,
            "notes": list(self.notes),
        }


def _footprint(footprint: Footprint) -> dict[str, Any]:
    return {
        "peak": footprint.peak,
        "moment": footprint.moment,
        "at_peak": {held.value: count for held, count in footprint.at_peak.items()},
        "stays": {held.value: count for held, count in footprint.stays.items()},
        "flops": footprint.work.flops,
    }
