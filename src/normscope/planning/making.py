"""`plan`: from a model and a limit to a `Plan`."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normscope.anatomy import read_anatomy
from normscope.checks import one_of
from normscope.errors import UsageError, describe
from normscope.planning.result import WITHOUT_DEVICE, Plan, Row
from normscope.planning.saved import FIRST, Saved
from normscope.planning.search import Found, Misfit, Progress, most_sequences, search
from normscope.planning.sizes import in_words, parse_bytes
from normscope.planning.stand_in import fake_stand_in, num_sequences, real_stand_in, to_read
from normscope.planning.step import Footprint, MakeOptimizers, Step, makes
from normscope.planning.tracker import Held
from normscope.planning.units import Group, Unit, groups_of
from normscope.subjects import Batch, LossFn, Run, Subject, fake_mode_of, load, load_to_read, make_subject
from normscope.subjects.feed import num_bytes, tensors_of
from normscope.subjects.memory import memory_refusals
from normscope.subjects.rng import generators_kept
from normscope.train import OPTIMIZERS, PRECISIONS

NAMES = (*OPTIMIZERS, "adafactor")
_OPTIMIZER, _PRECISION = one_of(NAMES), one_of(PRECISIONS)
NO_LOSS = "no loss is known: the mean of the outputs stands for it"


@torch.inference_mode(mode=False)  # the step has a backward pass
def plan(
    model: str | nn.Module | Run | Subject,
    memory: str | int | None = None,
    *,
    batch: Batch | None = None,
    loss_fn: LossFn | None = None,
    batch_size: int = 4,
    seq_len: int = 64,
    optimizer: str | Callable[[nn.Module], Optimizer | Sequence[Optimizer]] = "adamw",
    precision: str = "float32",
    seed: int = 0,
    text: Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Plan:
    """Measure the memory of a training step, and choose modules to recompute so that it fits into `memory`.

    The step is followed on fake tensors, which have shapes and no values, so that a model of any size can be
    planned. A model whose forward depends on values is run on real tensors. The model is not changed.

    Args:
        model: a MODEL spec, a module, a `Run`, or a subject.
        memory: the limit: "16GB", "500MB", "24GiB", or bytes; None only measures.
        batch, loss_fn: of a module, as in `check`.
        batch_size, seq_len, seed, text, device, dtype: as in `load`; unused with a subject.
        optimizer: "adamw", "adam", "sgd" (momentum 0.9), "muon" or "adafactor"; or a function that makes the
            optimizer, or several, of a model.
        precision: "float32" keeps the model's own type; "bfloat16" and "float16" use autocast.
        progress: called with (stage, done, total).

    Raises:
        UsageError: an argument or the model cannot be used, or no choice fits; the error then names the least
            memory and a batch size that fits.
    """
    limit = None if memory is None else Limit(parse_bytes(memory), f"{memory}")
    make, name = _making(optimizer)
    _PRECISION.require("precision", precision)
    portions: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "seed": seed, "text": text}
    subject = _subject(model, batch, loss_fn, portions, {"device": device, "dtype": dtype})
    plans = _Planner(make, name, precision, limit, progress)
    try:
        with generators_kept(), fake_stand_in(subject) as fake:
            return plans.plan(fake, "fake")
    except UsageError:
        raise
    except Exception as error:
        if fake_mode_of(subject.model) is not None:
            if not isinstance(model, str):
                raise
            subject = load(model, **portions, device=device, dtype=dtype)
        because = f"fake tensors cannot run this model ({describe(error)}): a step was run"
        return _run(plans, dataclasses.replace(subject, notes=(*subject.notes, because)))


def _run(plans: "_Planner", subject: Subject) -> Plan:
    """The plan from steps of a copy of the model, on real tensors."""
    given = f'"{subject.spec}"'
    try:
        with generators_kept(), real_stand_in(subject) as real, memory_refusals(given):
            return plans.plan(real, "real")
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"a training step of {given} in {plans.precision} ({describe(error)})",
            "a model whose forward, loss and backward run",
            "take another precision, or fix what the error names",
        ) from error


def _making(optimizer: Any) -> tuple[MakeOptimizers, str]:
    if not callable(optimizer):
        _OPTIMIZER.require("optimizer", optimizer)
        return makes(optimizer), optimizer

    def make(model: nn.Module) -> Sequence[Optimizer]:
        made = optimizer(model)
        return [made] if isinstance(made, Optimizer) else list(made)

    return make, getattr(optimizer, "__name__", type(optimizer).__name__)


def _subject(
    model: Any, batch: Any, loss_fn: Any, portions: dict[str, Any], place: dict[str, Any]
) -> Subject:
    if isinstance(model, Subject):
        return model
    if not isinstance(model, str):
        return make_subject(model, batch, loss_fn, **portions)
    if batch is not None or loss_fn is not None:
        given = "a MODEL spec together with a batch or a loss_fn"
        raise UsageError(given, "a module with its batch", "let a factory return (module, batch, loss_fn)")
    if not str(place["device"]).startswith("cpu"):  # fake tensors are made on the CPU, and copied on a device
        subject = load_to_read(model, **portions, **place)
        if fake_mode_of(subject.model) is not None:
            subject.notes = (*subject.notes, WITHOUT_DEVICE)
        return subject
    if not model.startswith(("nn:", "hf:")):
        return load_to_read(model, **portions, **place)
    return load(model, **portions, **place, fake=True)


class Limit(NamedTuple):
    """A limit in bytes, and as the user gave it."""

    bytes: int
    given: str

    def __str__(self) -> str:
        """As it was given, and in the units of the figures beside it: "16GB (14.9 GiB)"."""
        return f"{self.given} ({in_words(self.bytes)})"


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Settings of a plan."""

    make: MakeOptimizers
    optimizer: str
    precision: str
    memory: Limit | None
    progress: Progress

    def plan(self, subject: Subject, tensors: str) -> Plan:
        """The plan of a subject, whose model is trained a few steps.

        Raises:
            UsageError: no choice fits.
        """
        subject = with_loss(subject)
        self.progress("reading", 0, 3)
        groups = groups_of(subject.model, read_anatomy(to_read(subject)))
        step = Step(subject, self.make, self.precision)
        self.progress("measuring", 1, 3)
        saved = step.record(groups)
        self.progress("measuring", 2, 3)
        before = step.measure(groups)
        found = Found((), before)
        if self.memory is not None:
            always = sum(before.stays.values()) + num_bytes(trainable(subject.model))
            if always > self.memory.bytes:
                raise self._hopeless(subject, before, always)
            try:
                found = search(step, groups, saved, before, self.memory.bytes, self.progress)
            except Misfit as misfit:
                raise self._refusal(subject, groups, misfit) from None
        return Plan(
            model=subject.spec,
            input=subject.input,
            optimizer=self.optimizer,
            precision=self.precision,
            memory=None if self.memory is None else self.memory.bytes,
            recompute=found.paths,
            before=before,
            after=found.footprint,
            rows=tuple(_rows(groups, saved, found.paths)),
            device=step.device,
            tensors=tensors,
            notes=subject.notes,
        )

    def _hopeless(self, subject: Subject, step: Footprint, always: int) -> UsageError:
        """The refusal of what no recomputation changes: weights, gradients and optimizer state."""
        assert self.memory is not None, "a plan without a limit always fits"
        state = step.stays.get(Held.OPTIMIZER, 0)
        helps = always - state <= self.memory.bytes  # without any state
        other = f"an optimizer with less state than {in_words(state)} or " if state and helps else ""
        return UsageError(
            f'"{subject.spec}" in {self.memory}',
            f"over {in_words(always)}, which weights, gradients and optimizer state take at any batch size",
            f"take {other}a smaller model",
        )

    def _refusal(self, subject: Subject, groups: tuple[Group, ...], misfit: Misfit) -> UsageError:
        assert self.memory is not None, "a plan without a limit always fits"
        sequences, least = num_sequences(subject), misfit.least.footprint
        words = f" with {sequences} sequences" if sequences is not None else ""
        return UsageError(
            f'"{subject.spec}"{words} in {self.memory} (lowest peak: {_largest(least)})',
            f"at least {in_words(least.peak)}, with everything recomputed that can be",
            self._advice(subject, groups, misfit, self.memory.bytes),
        )

    def _advice(self, subject: Subject, groups: tuple[Group, ...], misfit: Misfit, memory: int) -> str:
        self.progress("batch size", 2, 3)
        fits = most_sequences(subject, groups, self.make, self.precision, misfit.ways, memory)
        if fits:
            return f"a batch of {fits} fits: use --batch-size {fits}, or lower --seq-len"
        return "no batch size fits: lower --seq-len, or take another optimizer or a smaller model"


def trainable(model: nn.Module) -> list[Tensor]:
    """The parameters that get gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def with_loss(subject: Subject) -> Subject:
    """The subject, with the mean of its outputs as the loss where none is known."""
    if subject.loss_fn is not None:
        return subject
    return dataclasses.replace(subject, loss_fn=_mean, notes=(*subject.notes, NO_LOSS))


def _mean(output: Any, batch: Any) -> Tensor:
    parts = [t.float().mean() for t in tensors_of(output) if t.is_floating_point() and t.requires_grad]
    if not parts:
        raise UsageError(
            "a model without a differentiable output", "a loss or a floating tensor", "give a loss"
        )
    return torch.stack(parts).sum()


def _largest(footprint: Footprint) -> str:
    """The largest parts of the peak: "10.0 GiB optimizer state, 5.0 GiB parameters"."""
    parts = sorted(footprint.at_peak.items(), key=lambda each: -each[1])[:3]
    return ", ".join(f"{in_words(count)} {held.value}" for held, count in parts)


def _rows(groups: tuple[Group, ...], saved: Saved, paths: Sequence[str]) -> Iterator[Row]:
    """Rows in the order of the model: what lies before, each block and its parts, what lies behind."""
    at, freed = saved.bytes_at(), saved.places_freed_by(frozenset(paths))
    outside = [place for place in at if isinstance(place, str)]
    order: list[Unit | str] = [unit for group in groups for unit in group.units]
    order = [
        *(each for each in outside if each == FIRST),
        *order,
        *(each for each in outside if each != FIRST),
    ]
    for place in order:
        if isinstance(place, str):
            yield Row(place, "outside", at[place], False)
        elif at.get(place):
            yield Row(place.path, place.kind, at[place], place in freed)
