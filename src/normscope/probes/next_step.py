"""The next step: from which learning rate it raises the loss, and the sharpness of the loss.

    step/critical-rate         η_c = min {η > 0 : L(θ − ηΔθ) > L(θ)}, Δθ the optimiser's update at learning
                               rate 1, with clipping and weight decay
    step/critical-sharpness    2/η_c (Kalra et al. 2026, arXiv:2601.16979)
    step/critical-over-lr      η_c over the run's full learning rate; under 1, its step raises the loss
    step/lambda-max            largest eigenvalue of the loss's Hessian H
    step/lambda-max-times-lr   the same times the learning rate; gradient descent is unstable above 2
    step/preconditioned-lambda-max, step/preconditioned-lambda-max-times-lr
                               the same of P⁻¹H, P of Adam's first step; unstable above (2 + 2β₁)/(1 − β₁), 38

On the first batch, in eval mode, on a copy of the model. η_c costs one gradient and about as many forwards as
its distance from the learning rate has doublings, plus five. λ_max needs `--budget deep`. The norm of the
gradient, the third cheap predictor, is `gradient/total`.

These are measurements. They predict whether the next step raises the loss, not whether a run trains: see
docs/predictors.md.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, measuring
from normscope.errors import describe
from normscope.probes.jacobian import Budget, Spending
from normscope.probes.jacobian.budget import OverBudget
from normscope.probes.measurement import Measurement, Measurements, not_measured
from normscope.probes.sharpness import STEPS, Largest, loss_eigenvalue, preconditioner, stable_below
from normscope.probes.token_axes import batch_shape
from normscope.subjects import Subject, untouched
from normscope.subjects.memory import available_bytes, gigabytes, is_out_of_memory
from normscope.train import LiveOptimizers, Recipe, working_copy
from normscope.train.pacing import pacing
from normscope.train.trial import after_step

TOLERANCE = 1 / 16
"""Relative distance of the bounds of η_c at which the search ends, as in the paper."""
DRAWS = 0
"""Seed before each loss, so that a model that draws random numbers in eval mode has the same ones."""
MOST, MOST_OF_CHECK = 60, 24
"""Most doublings or halvings of the search, and those of a check: a factor of 10⁷."""

SHARPNESS = "sharpness of the loss"
"""Name of the part in `--budget`."""
FORWARDS_A_PRODUCT = 4
"""Price of a product with H, in forwards of the batch: a backward through the graph of the gradient."""

CRITICAL = ("step/critical-rate", "step/critical-sharpness", "step/critical-over-lr")
PLAIN = ("step/lambda-max", "step/lambda-max-times-lr")
PRECONDITIONED = ("step/preconditioned-lambda-max", "step/preconditioned-lambda-max-times-lr")
_OF_RATE = {
    CRITICAL[2]: (CRITICAL[0], -1),
    PLAIN[1]: (PLAIN[0], 1),
    PRECONDITIONED[1]: (PRECONDITIONED[0], 1),
}
"""Quantities that are another one times a power of the learning rate: that quantity, and the power."""
NO_LOSS = "no loss function is known for this model; give one, as loss_fn or from the factory"
NO_GRADIENT = "no parameter of the model gets a gradient from the loss"


Found = TypeVar("Found")
LossGradients = tuple[float, list[nn.Parameter], list[Tensor]]
"""Loss of the fixed batch, the parameters that it depends on, and its gradients by them."""


class _NotMeasured(Exception):
    """The reason why a figure has no value."""


@dataclass(frozen=True)
class CriticalRate:
    """Bounds of η_c, and the number of losses that were computed; equal bounds: the search found no end."""

    lower: float
    upper: float
    evaluations: int

    @property
    def rate(self) -> float:
        """η_c, the mean of the bounds."""
        return (self.lower + self.upper) / 2

    @property
    def found(self) -> bool:
        """Whether the loss rises at the upper bound and not at the lower one."""
        return self.lower < self.upper


def critical_rate(
    loss_at: Callable[[float], float], before: float, guess: float, most: int = MOST
) -> CriticalRate:
    """Search for the learning rate from which `loss_at` is above `before`.

    The search is that of the paper and of its code: doubling or halving from a first guess, then bisection
    until the bounds differ by a sixteenth. A loss that is not finite counts as raised, which their code
    leaves open.
    """

    def rises(rate: float) -> bool:
        loss = loss_at(rate)
        return not loss <= before  # nan too

    up = not rises(guess)
    rate, count = guess, 1
    while count <= most:
        rate *= 2 if up else 0.5
        count += 1
        if rises(rate) == up:
            break
    else:
        return CriticalRate(rate, rate, count)
    lower, upper = (rate / 2, rate) if up else (rate, 2 * rate)
    while 1 - lower / upper > TOLERANCE:
        middle, count = (lower + upper) / 2, count + 1
        lower, upper = (lower, middle) if rises(middle) else (middle, upper)
    return CriticalRate(lower, upper, count)


@contextmanager
def at_start(subject: Subject, *, in_place: bool = False) -> Iterator[nn.Module]:
    """A copy of the model at its present weights, in eval mode, with attention that has second derivatives.

    Eval mode, because a loss with another dropout mask cannot be compared.
    """
    with working_copy(subject.model, in_place=in_place) as model, measuring(model):
        yield model


def loss_gradients(subject: Subject, model: nn.Module, *, keep_graph: bool = False) -> LossGradients:
    """Loss of the fixed batch, the parameters that it depends on, and its gradients by them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(DRAWS)
    with torch.enable_grad():
        loss = subject.loss(model=model)
        if not trained or not loss.requires_grad:
            return float(loss.detach()), [], []
        found = torch.autograd.grad(loss, trained, create_graph=keep_graph, allow_unused=True)
    pairs = [(p, g) for p, g in zip(trained, found, strict=True) if g is not None]
    return float(loss.detach()), [p for p, _ in pairs], [g for _, g in pairs]


def first_update(
    model: nn.Module, recipe: Recipe, weights: list[nn.Parameter], gradients: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """θ₀ and Δθ of the optimiser's next step, θ₁ = θ₀ − lr·Δθ, with weight decay; the weights stay.

    A user's own optimizers step copies of their state, each group at its share of the largest full rate. The
    gradients are used up.
    """
    start = [w.detach().clone() for w in weights]
    model.zero_grad(set_to_none=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.detach()
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(weights, recipe.clip)
    live = recipe.optimizer if isinstance(recipe.optimizer, LiveOptimizers) else None
    optimizers = pacing(model, recipe if live else replace(recipe, lr=1.0)).optimizers
    if live is not None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, live.full_rates, strict=True):
            group["lr"] = rate / live.lr
    for optimizer in optimizers:
        optimizer.step()
    del optimizers  # frees Adam's moments
    model.zero_grad(set_to_none=True)
    updates = []
    with torch.no_grad():
        for weight, old in zip(weights, start, strict=True):
            updates.append(old - weight)
            weight.copy_(old)
    return start, updates


@torch.no_grad()
def loss_after(
    subject: Subject,
    model: nn.Module,
    weights: list[nn.Parameter],
    start: list[Tensor],
    updates: list[Tensor],
    rate: float,
) -> float:
    """Loss of the fixed batch after a step of this length; the weights stay."""
    try:
        for weight, old, change in zip(weights, start, updates, strict=True):
            weight.copy_(old - rate * change)
        after_step(model)
        torch.manual_seed(DRAWS)
        return float(subject.loss(model=model))
    finally:
        for weight, old in zip(weights, start, strict=True):
            weight.copy_(old)


def critical_rate_of(
    subject: Subject,
    model: nn.Module,
    recipe: Recipe,
    first: LossGradients,
    *,
    guess: float,
    most: int = MOST,
) -> CriticalRate:
    """η_c of `model` on the fixed batch; `first` is what `loss_gradients` gave."""
    before, weights, gradients = first
    start, updates = first_update(model, recipe, weights, gradients)
    gradients.clear()
    return critical_rate(
        lambda rate: loss_after(subject, model, weights, start, updates, rate), before, guess, most
    )


def measure_next_step(
    subject: Subject, anatomy: Anatomy, recipe: Recipe | None = None, spending: Spending | None = None
) -> Iterator[Measurement]:
    """Critical rate of the next step of `recipe` (the default one), and λ_max with a deep `spending`."""
    recipe = Recipe() if recipe is None else recipe
    spending = Spending() if spending is None else spending
    with untouched(subject.model):
        yield from _critical_rows(subject, recipe)
        yield from _sharpness_rows(subject, recipe, spending)


def at_learning_rate(rows: Measurements, lr: float) -> Measurements:
    """The same measurements, with those that compare the next step with the learning rate at `lr`."""

    def value(row: Measurement) -> float | None:
        of, power = _OF_RATE.get(row.quantity, ("", 0))
        found = rows.of(of).get(row.site)
        return None if found is None else found * lr**power

    new = ((row, value(row)) for row in rows)
    return Measurements(row if found is None else replace(row, value=found) for row, found in new)


def _critical_rows(subject: Subject, recipe: Recipe) -> Iterator[Measurement]:
    try:
        found = _reasoned(lambda: _critical(subject, recipe))
    except _NotMeasured as reason:
        yield from (not_measured(quantity, "", str(reason)) for quantity in CRITICAL)
        return
    how = f"bisection to 1/16, {found.evaluations} forwards of the first batch, eval mode"
    for quantity, value in zip(CRITICAL, (found.rate, 2 / found.rate, found.rate / recipe.lr), strict=True):
        yield Measurement(quantity, "", value, how=how)


@contextmanager
def _with_gradients(
    subject: Subject, *, keep_graph: bool = False
) -> Iterator[tuple[nn.Module, LossGradients]]:
    """A copy of the model, or the model where its loss holds it, with what `loss_gradients` gives."""
    for in_place in (False, True):  # a loss that holds the original never reaches a copy
        with at_start(subject, in_place=in_place) as model:
            first = loss_gradients(subject, model, keep_graph=keep_graph)
            _require_finite(first)
            if first[1]:
                yield model, first
                return
    raise _NotMeasured(NO_GRADIENT)


def _critical(subject: Subject, recipe: Recipe) -> CriticalRate:
    _require_step(subject, recipe)
    with _with_gradients(subject) as (model, first):
        found = critical_rate_of(subject, model, recipe, first, guess=recipe.lr, most=MOST_OF_CHECK)
    if not found.found and found.rate > recipe.lr:
        raise _NotMeasured(f"no learning rate up to {found.rate:.1e} raises the loss in one step")
    if not found.found:
        raise _NotMeasured(f"every learning rate down to {found.rate:.1e} raises the loss in one step")
    return found


def _sharpness_rows(subject: Subject, recipe: Recipe, spending: Spending) -> Iterator[Measurement]:
    parts: list[tuple[tuple[str, str], bool]] = [(PLAIN, False)]
    if recipe.optimizer in ("adam", "adamw"):
        parts.append((PRECONDITIONED, True))
    for quantities, is_adam in parts:
        try:
            found = _reasoned(lambda is_adam=is_adam: _sharpness(subject, recipe, spending, is_adam))  # type: ignore[misc]
        except (_NotMeasured, OverBudget) as reason:
            yield from (not_measured(quantity, "", str(reason)) for quantity in quantities)
            continue
        error = found.residual / max(abs(found.value), 1e-300)
        how = f"iterative, {found.products} Lanczos steps, relative residual {error:.1e}"
        how += f"; unstable above {stable_below(recipe) if is_adam else 2.0:g}"
        yield Measurement(quantities[0], "", found.value, how=how)
        yield Measurement(quantities[1], "", found.value * recipe.lr, how=how)


def _sharpness(subject: Subject, recipe: Recipe, spending: Spending, is_adam: bool) -> Largest:
    sequences = _num_sequences(subject)
    price = FORWARDS_A_PRODUCT * (STEPS + 1) * sequences
    spending.require(SHARPNESS, price, Budget.DEEP)
    _require_step(subject, recipe)
    _require_room(subject)
    with spending.timed(SHARPNESS), _with_gradients(subject, keep_graph=True) as (_, first):
        flat = torch.cat([g.reshape(-1) for g in first[2]])
        if not flat.requires_grad:
            raise _NotMeasured("the loss has no second derivative by the weights")
        scale = preconditioner(flat.detach(), recipe) if is_adam else None
        found = loss_eigenvalue(flat, first[1], scale)
    spending.add(SHARPNESS, FORWARDS_A_PRODUCT * (found.products + 1) * sequences)
    return found


def _num_sequences(subject: Subject) -> int:
    shape = batch_shape(subject.batch)
    return shape[0] if shape else 1


def _require_step(subject: Subject, recipe: Recipe) -> None:
    """Raise `_NotMeasured` where there is no next step of this model."""
    if subject.loss_fn is None:
        raise _NotMeasured(NO_LOSS)
    trained = [p for p in subject.model.parameters() if p.requires_grad]
    if not trained:
        raise _NotMeasured("no parameter of the model requires a gradient")
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in trained):
        raise _NotMeasured("weights in half precision round away steps of a small learning rate")
    if isinstance(recipe.optimizer, LiveOptimizers):
        if reason := recipe.optimizer.why_not_stepped():
            raise _NotMeasured(reason)
        if any("lr" not in group for group in recipe.optimizer.groups):
            raise _NotMeasured("the optimizer has no learning rate that could be scaled")
        if not any(recipe.optimizer.full_rates):
            raise _NotMeasured("the learning rate is 0 at the start, and no other one is known")


def _require_finite(first: LossGradients) -> None:
    loss, _, gradients = first
    if not math.isfinite(loss):
        raise _NotMeasured(f"the loss of the first batch is {loss}")
    if not all(bool(torch.isfinite(g).all()) for g in gradients):
        raise _NotMeasured("the gradients of the first batch are not finite")
    if gradients and not any(bool(g.any()) for g in gradients):
        raise _NotMeasured("the gradients of the first batch are all zero")


def _require_room(subject: Subject) -> None:
    """Raise `_NotMeasured` where the Lanczos vectors do not fit into half of the free memory."""
    trained = [p for p in subject.model.parameters() if p.requires_grad]
    needed = 2 * STEPS * sum(p.numel() * p.element_size() for p in trained)
    room = available_bytes(trained[0].device)
    if room is not None and needed > room / 2:
        raise _NotMeasured(f"its Lanczos vectors need {gigabytes(needed)}, with {gigabytes(room)} free")


def _reasoned(measure: Callable[[], Found]) -> Found:
    """`measure()`, with an error of the model, its loss or its optimiser as the reason of `_NotMeasured`."""
    try:
        return measure()
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        raise _NotMeasured(f"a step raised {describe(error)}") from error
