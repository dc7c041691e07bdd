"""One branch, or the way in or out of the stack, of both models: the tensors by which reasons are found."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normscope.anatomy import Branch, Norm, Site
from normscope.compare.formulas import MASKED
from normscope.compare.layout import Layout
from normscope.compare.patched_ops import Formula
from normscope.compare.types import Patch

FITS = 1e-6
"""Largest relative residual of a formula that describes a tensor; tables in float32 leave 1e-7."""
ROUNDING = 1e-12
"""Residuals below it are rounding in float64: which of two is smaller says nothing."""
SAME = 1e-9
"""Two tensors with a smaller relative difference are one, in float64."""


@dataclass(frozen=True)
class At:
    """Site of a step's tensor in a model, and the way to the form that steps have.

    `is_part` says that the site has the first of several heads, each with an attention of its own.
    """

    site: Site
    layout: Layout | None = None
    rows: Tensor | None = None
    is_part: bool = False


@dataclass(frozen=True)
class Half:
    """One side of a scene.

    Attributes:
        steps: name of the step → its tensor, features last, an attention's operands (B, H, T, K).
        parameters: by name, of the model that ran.
        branch: the branch, None outside of the blocks.
        norms: the norms, "norm 0" or "final norm" → `Norm`.
        places: name of the step → where its tensor is in the model.
        block_entry: the stream at the entry of the block.
        gradients: gradient of the loss in a step, by name.
        slots: "in", "out" or "stream" → name of the norm there.
        before, after: steps that are outputs of the branches before and after this one that are parallel to
            it: their sum with the stream is one.
    """

    steps: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    branch: Branch | None = None
    norms: Mapping[str, Norm] = field(default_factory=dict)
    places: Mapping[str, At] = field(default_factory=dict)
    block_entry: Tensor | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def parallel(self) -> tuple[str, ...]:
        """Steps that are outputs of parallel branches."""
        return (*self.before, *self.after)

    def all_of(self, *names: str) -> tuple[Tensor, ...] | None:
        """The tensors of these steps, None where one is missing."""
        found = [self.steps[name] for name in names if name in self.steps]
        return tuple(found) if len(found) == len(names) else None

    def patch(
        self, step: str, formula: str, sources: tuple[str, ...] = (), **options: Any
    ) -> tuple[Patch, ...]:
        """Patch that computes a step anew; none where a site is unknown."""
        parameters = options.pop("parameters", {})
        if any(name not in self.places for name in (step, *sources)):
            return ()
        at = [self.places[name] for name in (step, *sources)]
        formula_ = Formula(
            at[0].site,
            formula,
            tuple(each.site for each in at[1:]),
            options,
            parameters,
            tuple(each.layout for each in at),
            tuple(each.rows for each in at),
        )
        return (Patch("site", "", formula_),)


@dataclass(frozen=True)
class Scene:
    """Both sides of one branch, or of the way in ("embedding") or out ("head").

    Attributes:
        a, b: the sides.
        kind: "attention", "cross-attention", "feed-forward", "other", "embedding" or "head".
        ids: the batch's token ids (B, T), for the embedding.
        tolerance: largest relative difference of equal tensors.
        real: (B, T), true at the tokens that count; None where all do.
    """

    a: Half
    b: Half
    kind: str
    ids: Tensor | None = None
    tolerance: float = SAME
    real: Tensor | None = None

    def is_same(self, step: str, of_b: str | None = None) -> bool:
        """Whether a step has the same values on both sides; False where one lacks it.

        Args:
            of_b: the step of B, where it has another name.
        """
        a, b = self.a.steps.get(step), self.b.steps.get(of_b or step)
        if a is None or b is None:
            return False
        return distance(real_rows(a, self.real), real_rows(b, self.real)) < self.tolerance

    @property
    def is_alike(self) -> bool:
        """Whether both attentions have the same number of heads, as far as both show it."""
        both = self.both("logits")
        return both is None or len({logits.shape[1] for (logits,) in both if logits.dim() == 4}) < 2

    def both(self, *names: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """The tensors of these steps on both sides."""
        a, b = self.a.all_of(*names), self.b.all_of(*names)
        return None if a is None or b is None else (a, b)


@dataclass(frozen=True)
class Reason:
    """Reason why two models part at a step.

    Attributes:
        name: name of the difference, a key of `NAMES`.
        step: the step at which it acts.
        a, b: what the two models do, as plain data.
        message: a sentence with both.
        patches: the changes of B that undo it; empty where it cannot be undone.
        others: further sentences, such as on reasons that could not be tried.
    """

    name: str
    step: str
    a: Any
    b: Any
    message: str
    patches: tuple[Patch, ...] = ()
    others: tuple[str, ...] = ()


Reasons = Iterator[Reason]


def real_rows(tensor: Tensor, real: Tensor | None) -> Tensor:
    """The rows of the tokens that count: of (B, T, …), of (B, H, T, …), of (B·T, …)."""
    if real is None:
        return tensor
    if tensor.shape[:2] == real.shape:
        return tensor[real]
    if tensor.ndim == 4 and (tensor.shape[0], tensor.shape[2]) == tuple(real.shape):
        return tensor.transpose(1, 2)[real]
    if tensor.ndim == 2 and len(tensor) == real.numel():
        return tensor[real.flatten()]
    return tensor


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / max(‖a‖, ‖b‖) over the keys that both see; 1 where they see other ones."""
    if a.shape != b.shape:
        if a.numel() != b.numel():
            return 1.0
        b = b.reshape(a.shape)
    masked_a, masked_b = ~(a > MASKED), ~(b > MASKED)
    if bool((masked_a != masked_b).any()):
        return 1.0
    return residual(a[~masked_a], b[~masked_a])


def residual(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / max(‖a‖, ‖b‖); 0 for two zeros, 1 where it is not finite."""
    whole = max(float(a.norm()), float(b.norm()))
    part = float((a - b).norm())
    if not torch.isfinite(torch.tensor([whole, part])).all():
        return 1.0
    return part / whole if whole else 0.0


def factor(a: Tensor, b: Tensor) -> tuple[float, float]:
    """c and the residual of a ≈ c·b."""
    square = float(b.square().sum())
    if square == 0:
        return 0.0, residual(a, b)
    c = float((a * b).sum()) / square
    return c, residual(a, c * b)


def figure(value: Any) -> str:
    """A number for a sentence; other values as they are."""
    if isinstance(value, float):
        rounded = float(f"{value:.6g}")
        return f"{int(rounded)}" if rounded == int(rounded) and abs(rounded) < 1e6 else f"{rounded:g}"
    return str(value)


def clean(value: float) -> float:
    """A fitted number, without the rounding of the fit."""
    for digits in (3, 6, 9):
        rounded = float(f"{value:.{digits}g}")
        if abs(rounded - value) <= 1e-12 * abs(value):
            return rounded
    return value


def also(what: str, half_words: Iterable[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    """Sentences on what else explains a side's tensors equally well, from ("A", its other names)."""
    return tuple(
        f"On this batch {what} in {side} is also explained by {' or '.join(names)}."
        for side, names in half_words
        if names
    )


def tell(subject: str, a: Any, b: Any) -> str:
    """ "SUBJECT is a in A and b in B."."""
    return f"{subject} is {figure(a)} in A and {figure(b)} in B."
