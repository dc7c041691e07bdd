"""Loss of the best constant output, for losses that are no cross-entropy: the baseline of a regression.

The loss is evaluated on outputs that are the same for every input, and minimised over them. That takes no
forward of the model beyond the first, and it holds for any loss of one output: squared, absolute, Huber.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normscope.anatomy import measuring
from normscope.forecast.evaluator import same
from normscope.forecast.targets import NoTargetsError, UnknownEntropyError
from normscope.subjects import Batch, Subject
from normscope.subjects.feed import tensors_in
from normscope.train import endless

FEWEST = 8
"""Batches from which the constant can be found."""
NUMBERS_OF_BATCHES = (64, 256, 1024)
"""Numbers of batches that are read, until the loss of the constant is known to `LARGEST_SHARE`."""
MOST_VALUES = 2**22
"""Values of the output, over all batches, from which no further batch is read."""
WIDEST = 4096
"""Largest size of the output's last axis: the constant has a value for each place on it."""
LARGEST_SHARE = 0.1
"""Largest error of the baseline, as a share of it: the margin that means "trains"."""
SLACK = 1.5
"""Factor by which an error may be overestimated: a few rare batches with a large loss make it uncertain."""

FAR = 1e4
"""A constant at which the losses of most batches are alike, but for their sizes."""

_SUM = 1e-4  # sum of a row's gradient, as a share of its size, below which a loss is one of a softmax


class BestConstant(NamedTuple):
    """Least mean loss of an output that is the same at every place, and the loss of a batch with it."""

    value: float
    of_batch: Callable[[Batch], float | None]


def best_constant(subject: Subject) -> BestConstant:
    """The least mean loss of an output that is the same at every place, on the user's own batches.

    The output has one value for each place on its last axis.

    Raises:
        NoTargetsError: the loss is one of a softmax, does not read exactly one floating-point output, or does
            not depend on the batch beside the output.
        UnknownEntropyError: too few batches, a loss that is not above 0 or differs much between them, or a
            sum over batches of different shapes.
    """
    with measuring(subject.model):
        at, shape = _losses_of(subject, subject.batch)
        _require_no_sum(subject, at, shape)
    constant = torch.zeros(shape[-1], requires_grad=True)
    for batches in _samples(subject):
        if len(batches) < FEWEST:
            raise UnknownEntropyError(f"{len(batches)} batches are different, and {FEWEST} are needed")
        losses = _least_losses(at, constant, batches)
        if _is_known(losses) or _is_hopeless(losses):
            break
    value = _value(losses)
    if bool((losses == losses[0]).all()):
        raise NoTargetsError("the loss of a constant output is the same on all batches")
    shapes = _shapes(subject.batch)

    def of_batch(batch: Batch) -> float | None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # the loss may draw; the trial draws on
            return float(at(constant, batch)) if _shapes(batch) == shapes else None

    return BestConstant(value, of_batch)


def _require_no_sum(subject: Subject, at: Callable[[Tensor, Batch], Tensor], shape: torch.Size) -> None:
    """Compare the loss of a distant constant with that on the batch whose size differs most, if there is one.

    Raises:
        UnknownEntropyError: the two losses differ rather as the sizes of the outputs do than not at all.
    """
    batches = list(itertools.islice(endless(subject.batches), NUMBERS_OF_BATCHES[0]))
    size = _num_values(subject.batch)
    other = max(batches, key=lambda batch: abs(math.log(_num_values(batch) / size)))
    elsewhere, other_shape = _losses_of(subject, other)
    if other_shape == shape:
        return
    losses = (
        float(at(torch.full(shape[-1:], FAR), subject.batch)),
        float(elsewhere(torch.full(other_shape[-1:], FAR), other)),
    )
    if min(losses) <= 0:
        return
    change, expected = math.log(losses[1] / losses[0]), math.log(other_shape.numel() / shape.numel())
    if abs(change - expected) < abs(change):
        raise UnknownEntropyError(
            "the loss depends on the size of a batch, and batches have different shapes: divide a sum by the "
            "number of its values"
        )


def _num_values(batch: Batch) -> int:
    return max(1, sum(tensor.numel() for tensor in tensors_in(batch)))


def _least_losses(
    at: Callable[[Tensor, Batch], Tensor], constant: Tensor, batches: Sequence[Batch]
) -> Tensor:
    """The losses (N,) of N batches at the constant with the least mean, which `constant` (D,) becomes."""
    search = torch.optim.LBFGS([constant], max_iter=50, line_search_fn="strong_wolfe")

    def mean() -> Tensor:
        search.zero_grad()
        loss = sum((at(constant, batch) for batch in batches), torch.zeros(())) / len(batches)
        loss.backward()
        return loss

    search.step(mean)
    with torch.no_grad():
        return torch.stack([at(constant, batch) for batch in batches]).double()


def _share_of_error(losses: Tensor) -> float:
    """Half the 95 % interval of the mean of losses (N,), as a share of the mean."""
    return 2 * float(losses.std()) / math.sqrt(len(losses)) / float(losses.mean())


def _is_known(losses: Tensor) -> bool:
    """Whether more batches would not change what `_value` says of these losses (N,)."""
    return not float(losses.mean()) > 0 or _share_of_error(losses) <= LARGEST_SHARE


def _is_hopeless(losses: Tensor) -> bool:
    """Whether the error of these losses (N,) stays too large with all batches: it falls as 1/√N."""
    return _num_needed(losses) / SLACK**2 > NUMBERS_OF_BATCHES[-1]


def _num_needed(losses: Tensor) -> float:
    """Number of batches with losses as these (N,) that show their mean to `LARGEST_SHARE`."""
    return len(losses) * (_share_of_error(losses) / LARGEST_SHARE) ** 2


def _value(losses: Tensor) -> float:
    """The mean of the losses (N,) of the best constant; UnknownEntropyError if it is no baseline."""
    value = float(losses.mean())
    if not (math.isfinite(value) and value > 0):
        raise UnknownEntropyError(f"the best constant output has a loss of {value:.3g}, expected one above 0")
    error = _share_of_error(losses)
    if error > LARGEST_SHARE:
        raise UnknownEntropyError(
            f"{len(losses)} batches show the loss of the best constant output only to {100 * error:.0f} %, "
            f"and {100 * LARGEST_SHARE:.0f} % are needed: about {_in_two_digits(_num_needed(losses))} batches"
        )
    return value


def _in_two_digits(number: float) -> str:
    """A number from 10 on, rounded: "53,000"."""
    return f"{float(f'{number:.2g}'):,.0f}"


def _losses_of(subject: Subject, batch: Batch) -> tuple[Callable[[Tensor, Batch], Tensor], torch.Size]:
    """The loss of a constant (D,) in place of the output on `batch` that it reads, and the output's shape."""
    loss_fn = subject.loss_fn
    assert loss_fn is not None
    with torch.no_grad():
        output = subject.forward(batch)
    leaves, structure = pytree.tree_flatten(output)
    floats = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim]
    for index in floats:
        leaves[index] = leaves[index].detach().float().requires_grad_()
    with torch.enable_grad():
        loss = loss_fn(pytree.tree_unflatten(leaves, structure), batch)
    if not loss.requires_grad:
        raise NoTargetsError("the loss does not depend on the model's output")
    gradients = torch.autograd.grad(loss, [leaves[i] for i in floats], allow_unused=True)
    read = [(i, each) for i, each in zip(floats, gradients, strict=True) if each is not None]
    if len(read) != 1:
        raise NoTargetsError("the loss reads several outputs")
    ((place, gradient),) = read
    shape = gradient.shape
    if shape[-1] > WIDEST or _is_of_softmax(gradient):
        raise NoTargetsError("the loss is a cross-entropy")

    def at(constant: Tensor, batch: Batch) -> Tensor:
        changed = [*leaves[:place], constant.to(gradient.device).expand(shape), *leaves[place + 1 :]]
        with torch.enable_grad():
            found: Tensor = loss_fn(pytree.tree_unflatten(changed, structure), batch)
        return found.float().cpu()

    return at, shape


def _is_of_softmax(gradient: Tensor) -> bool:
    """Whether a constant that is added to a row of the output (…, D) leaves the loss as it is."""
    sums, sizes = gradient.sum(-1).abs(), gradient.abs().sum(-1)
    return gradient.shape[-1] > 1 and bool((sums <= _SUM * sizes).all()) and bool(sizes.any())


def _samples(subject: Subject) -> Iterator[list[Batch]]:
    """The first batches, for each of `NUMBERS_OF_BATCHES` read, or until they repeat.

    Those of another shape than the first are left out.
    """
    first, found, values = _shapes(subject.batch), list[Batch](), 0
    for number, batch in enumerate(itertools.islice(endless(subject.batches), NUMBERS_OF_BATCHES[-1])):
        if (number and same(batch, subject.batch)) or values > MOST_VALUES:
            break
        if number in NUMBERS_OF_BATCHES:
            yield found
        if _shapes(batch) == first:
            values += max((tensor.numel() for tensor in tensors_in(batch)), default=0)
            found.append(batch)
    yield found


def _shapes(batch: Any) -> Sequence[torch.Size]:
    return [tensor.shape for tensor in tensors_in(batch)]
