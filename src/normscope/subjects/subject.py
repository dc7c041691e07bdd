"""Subject: a model with its batches and its loss."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from normscope.subjects.own_run import Run

if TYPE_CHECKING:
    from normscope.subjects.without_input import LossesWithoutInput

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""A tensor, a tuple of positional arguments, or a mapping of keyword arguments of the model's forward.

A mapping may also hold positional arguments, a tuple under `POSITIONAL`, and tensors that only the loss
reads, under `LOSS_INPUTS`.
"""

POSITIONAL = "positional arguments"
LOSS_INPUTS = "loss inputs"
LABEL_NAMES = ("targets", "labels", "target", "label", "y")
"""Names under which a mapping may hold its labels."""

LossFn = Callable[[Any, Batch], Tensor]
"""`loss_fn(output, batch)` gives a scalar tensor."""


class Baseline(NamedTuple):
    """The best loss of a model that ignores its input, None if unknown, and the unit of comparisons.

    The unit is 1 nat for a mean cross-entropy, the number of targets for their sum, and for other losses the
    baseline itself, because their size has no meaning. Only a cross-entropy `is_entropy`.
    """

    loss: float | None
    unit: float = 1.0
    is_entropy: bool = True

    @classmethod
    def of(cls, entropy: float | None, best_constant: float | None, unit: float = 1.0) -> "Baseline":
        """The baseline of targets with this entropy, or else of the best constant output.

        Args:
            unit: number of times that the loss is the mean cross-entropy.
        """
        if entropy is None and best_constant is not None:
            return cls(best_constant, best_constant, is_entropy=False)
        return cls(None if entropy is None else unit * entropy, unit)

    def above(self, loss: float) -> float:
        """Units by which a loss is above the baseline, which must be known."""
        assert self.loss is not None
        return (loss - self.loss) / self.unit


class Batches(Protocol):
    """Source of batches: each call gives the same endless sequence of them."""

    def __call__(self, start: int = 0) -> Iterator[Batch]:
        """The batches from index `start` on, at about the same cost for every `start`."""


@dataclass
class Subject:
    """Model with its batch, loss and data: the input of all analyses.

    Make one with `load` or `make_subject`, never by hand.

    Attributes:
        model: the module, on its device, in the mode in which it was given.
        batch: the fixed batch that every probe measures on.
        loss_fn: scalar loss of (output, batch), or None if none is known (`notes` gives the reason).
        batches: returns a fresh, deterministic, endless iterator over training batches at each call; the
            first one is `batch`.
        seed: seed of the generators before the model was built.
        spec: source of the model, as the user wrote it, or the class name of a bare module.
        input: description of the input, for the report.
        unigram_entropy: entropy in nats of the targets' frequencies (tokens, or classes of real images):
            the best loss of a model that ignores its input; None if targets are random or not ids.
        best_constant: loss of the best constant output, the same for a loss that is no cross-entropy; None if
            it is unknown.
        without_input: the baseline on each batch of `batches`, from which they differ; None if it is unknown.
        loss_unit: number of times that the loss is the mean cross-entropy of its targets; for a sum, their
            number.
        notes: remarks for the reader of the report ("a single batch is repeated").
        validation: like `batches`, over held-out data, the same at every seed; None if nothing is held out.
        run: the user's own optimizer, schedule, clipping and precision; None if options set them.
        has_own_batches: whether the batches are the user's, of whose text nothing else is known.
        recorded_steps: steps of a script whose batches are all in `batches`, each once; else 0.
    """

    model: nn.Module
    batch: Batch
    loss_fn: LossFn | None
    batches: Batches
    seed: int
    spec: str
    input: str
    unigram_entropy: float | None = None
    notes: tuple[str, ...] = field(default=())
    validation: Batches | None = None
    run: Run | None = None
    has_own_batches: bool = False
    best_constant: float | None = None
    without_input: "LossesWithoutInput | None" = None
    loss_unit: float = 1.0
    recorded_steps: int = 0

    @property
    def baseline(self) -> Baseline:
        """The loss to beat."""
        return Baseline.of(self.unigram_entropy, self.best_constant, self.loss_unit)

    def forward(self, batch: Batch | None = None, model: nn.Module | None = None) -> Any:
        """The model's output on `batch` (default: the fixed one); `model` replaces the model by a copy."""
        return call_model(self.model if model is None else model, self.batch if batch is None else batch)

    def loss(self, batch: Batch | None = None, model: nn.Module | None = None) -> Tensor:
        """Scalar loss on `batch` (default: the fixed one), for subjects with a `loss_fn`."""
        assert self.loss_fn is not None, "check `subject.loss_fn is not None` first"
        batch = self.batch if batch is None else batch
        return self.loss_fn(self.forward(batch, model), batch)


def arguments_in(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a forward: positional for a tensor or tuple, keywords for a mapping, see `Batch`."""
    if isinstance(batch, Mapping):
        keywords = {name: value for name, value in batch.items() if name not in (POSITIONAL, LOSS_INPUTS)}
        return tuple(batch.get(POSITIONAL, ())), keywords
    return ((batch,) if isinstance(batch, Tensor) else tuple(batch)), {}


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The output of `model` on `batch`, see `arguments_in`."""
    arguments, keywords = arguments_in(batch)
    return model(*arguments, **keywords)
