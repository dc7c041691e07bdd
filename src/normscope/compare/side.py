"""Side: one of the two models of a comparison, in this process, in another one, or saved as a report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from normscope.anatomy import Anatomy
from normscope.compare.structure import read_for_structure
from normscope.subjects import Subject, fake_mode_of, memory_refusals


@dataclass(frozen=True)
class Settings:
    """Options with which both sides are loaded, as plain data.

    Attributes:
        seed: seed of the weights and of the batches.
        batch_size, seq_len, text: sequences per batch, tokens per sequence, and text of the input.
        device: device of models and batches.
        dtype: type of the floating-point tensors, such as "bfloat16"; None keeps the model's own.
        check: options of `normscope.check`, for the verdict part.
        find_loss: whether a loss is looked for where none is given; only checks need one.
    """

    seed: int = 0
    batch_size: int = 4
    seq_len: int = 64
    text: Path | None = None
    device: str = "cpu"
    dtype: str | None = None
    check: Mapping[str, Any] = field(default_factory=dict)
    find_loss: bool = True

    def loading(self) -> dict[str, Any]:
        """The arguments of `load`."""
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        names = ("seed", "batch_size", "seq_len", "text", "device", "find_loss")
        return {name: getattr(self, name) for name in names} | {"dtype": dtype}


class NotGivenError(Exception):
    """A side cannot give what a part needs; the text goes on after its name: "is a report"."""


class Side(Protocol):
    """One of the two models of a comparison.

    Attributes:
        spec: where it came from, as the user wrote it.
        notes: facts that a reader must know.
    """

    spec: str

    @property
    def notes(self) -> tuple[str, ...]: ...

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """`work(subject, anatomy, *arguments)`, in the process that holds the model.

        Args:
            work: a function of a module, which another process can import by its name.
            arguments: plain data, dataclasses and tensors.

        Raises:
            NotGivenError: there is no model, only a report; or its weights do not fit into memory.
            UsageError: the model cannot be used so.
        """

    def read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """`run` for what needs shapes only: `subject` may have fake tensors."""

    def start(self, work: Callable[..., Any], seeds: tuple[int, ...]) -> Any:
        """`work(build, anatomy, seeds)`, where `build(seed)` is the model with fresh weights."""

    def report(self) -> Mapping[str, Any]:
        """The data of the saved report, `normscope.report/1` or `normscope.run/1`.

        Raises:
            NotGivenError: the side is a model.
        """

    def reports(self, options: Mapping[str, Any], seeds: tuple[int, ...]) -> list[Mapping[str, Any]]:
        """The data of checks of the model at `seeds`, with `options` of `normscope.check`.

        The saved report is the only one of its side; a module that cannot be built again has one too.
        """

    @property
    def is_saved(self) -> bool:
        """Whether only a report of the model is there."""

    def close(self) -> None:
        """End its process and remove its temporary files."""


class LiveSide:
    """A model in this process; it is read once.

    Args:
        subject: the model with its batch.
        build: the model with fresh weights from a seed; None where it cannot be built again.
        load: the subject from a seed; None likewise.
    """

    is_saved = False

    def __init__(
        self,
        subject: Subject,
        build: Callable[[int], nn.Module] | None = None,
        load: Callable[[int], Subject] | None = None,
    ) -> None:
        self.spec, self._subject, self._build, self._load = subject.spec, subject, build, load

    @property
    def notes(self) -> tuple[str, ...]:
        return self._subject.notes

    @cached_property
    def anatomy(self) -> Anatomy:
        """The reading of the model."""
        with memory_refusals(self.spec):
            return read_for_structure(self._subject)

    def read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        with memory_refusals(self.spec):
            return work(self._subject, self.anatomy, *arguments)

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        self._require_values()
        return self.read(work, *arguments)

    def start(self, work: Callable[..., Any], seeds: tuple[int, ...]) -> Any:
        self._require_values()
        if self._build is None:
            raise NotGivenError("was given as a module, which cannot be built again at other seeds")
        with memory_refusals(self.spec):
            return work(self._build, self.anatomy, seeds)

    def report(self) -> Mapping[str, Any]:
        raise NotGivenError("is a model, not a report")

    def reports(self, options: Mapping[str, Any], seeds: tuple[int, ...]) -> list[Mapping[str, Any]]:
        self._require_values()
        from normscope.pipeline import check

        found: list[Mapping[str, Any]] = [check(self._subject, **options).to_dict()]
        if self._load is not None:
            found += [check(self._load(s), **{**options, "seed": s}).to_dict() for s in seeds[1:]]
        return found

    def _require_values(self) -> None:
        if fake_mode_of(self._subject.model) is not None:
            raise NotGivenError("has weights that do not fit into memory")

    def close(self) -> None:
        """Nothing is held outside of this process."""


class SavedSide:
    """A model of which only a report is there.

    Args:
        spec: where the report came from, as the user wrote it.
        report: its data, `normscope.report/1` or `normscope.run/1`.
    """

    is_saved = True

    def __init__(self, spec: str, report: Mapping[str, Any]) -> None:
        self.spec, self._report = spec, report

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._report.get("notes") or ())

    def report(self) -> Mapping[str, Any]:
        return self._report

    def reports(self, options: Mapping[str, Any], seeds: tuple[int, ...]) -> list[Mapping[str, Any]]:
        return [self._report]

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        raise NotGivenError("is a report, without weights")

    def read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        raise NotGivenError("is a report, without a model")

    def start(self, work: Callable[..., Any], seeds: tuple[int, ...]) -> Any:
        raise NotGivenError("is a report, without weights")

    def close(self) -> None:
        """Nothing is held."""
