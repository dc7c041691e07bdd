"""Requests of the function part to a side, each in the process that holds the model: see `Side.run`."""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, named_modules
from normscope.compare.exact import exact
from normscope.compare.feed import Fed, batch_with, parts_of
from normscope.compare.holdings import Holdings, holdings_of
from normscope.compare.made import made_in, values_of
from normscope.compare.side import NotGivenError
from normscope.compare.types import Patch, Step
from normscope.compare.walk import Twin, reread, twin_of
from normscope.subjects.subject import Subject

_OPEN: dict[int, "tuple[Anatomy, _Built | None, Twin | None]"] = {}


@dataclass(eq=False)
class _Built:
    """A model that was built in float64, and whether its weights are the same at two seeds."""

    model: nn.Module
    is_given: bool | None


@dataclass(frozen=True)
class Opened:
    """A side, ready to walk.

    Attributes:
        holdings: its parameters.
        parts: tensors of its batch, by role.
        vocabulary: number of its token embeddings, None without a table.
    """

    holdings: Holdings
    parts: dict[str, Tensor]
    vocabulary: int | None


def build_exactly(build: Callable[[int], nn.Module], anatomy: Anatomy, seeds: Sequence[int]) -> bool:
    """Build the model in float64 at two seeds, for `open_twin`; False where that fails."""
    try:
        with exact(), contextlib.redirect_stdout(io.StringIO()):
            first, second = (build(seed) for seed in seeds)
    except Exception:  # a factory may refuse float64; then its float32 model is widened
        return False
    _OPEN[id(anatomy)] = (anatomy, _Built(first, _is_given(first, second)), None)
    return True


def open_twin(subject: Subject, anatomy: Anatomy) -> Opened:
    """The model in float64 with its holdings; at most two forwards."""
    _, built, _ = _OPEN.get(id(anatomy), (anatomy, None, None))
    if quantised := _quantised(subject.model):
        raise NotGivenError(f"has quantised maps, which do not run in float64: {quantised}")
    twin = twin_of(subject, None if built is None else built.model)
    _OPEN[id(anatomy)] = (anatomy, None, twin)
    holdings = holdings_of(twin, None if built is None else built.is_given)
    tables = (p for held in holdings.held for p in held.pieces if p.slot.role == "embedding")
    table = next(tables, None)
    vocabulary = None if table is None else int(table.elements.shape[0])
    return Opened(holdings, parts_of(subject), vocabulary)


def reopen_twin(subject: Subject, anatomy: Anatomy, opened: Opened, parts: Mapping[str, Tensor]) -> Opened:
    """The model read again on the batch that it is fed, of other shapes; one forward."""
    _, _, twin = _OPEN[id(anatomy)]
    assert twin is not None
    again = reread(twin, batch_with(subject, parts).batch)
    _OPEN[id(anatomy)] = (anatomy, None, again)
    return replace(opened, holdings=holdings_of(again, opened.holdings.is_given))


def feed_twin(subject: Subject, anatomy: Anatomy, parts: Mapping[str, Tensor]) -> Fed:
    """The subject's batch with the tensors of another one."""
    return batch_with(subject, parts)


def walk_twin(
    subject: Subject,
    anatomy: Anatomy,
    parts: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None,
    patches: Sequence[Patch] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[Step, ...]:
    """One forward, see `Twin.walk`."""
    twin = _OPEN[id(anatomy)][2]
    assert twin is not None
    return twin.walk(batch_with(subject, parts).batch, weights, patches, **(options or {}))


def close_twin(subject: Subject, anatomy: Anatomy) -> int:
    """Free the model in float64; the number of its forwards."""
    _, _, twin = _OPEN.pop(id(anatomy), (anatomy, None, None))
    return 0 if twin is None else twin.forwards


def _quantised(model: nn.Module) -> str:
    """The maps whose weights are packed, as `torch.ao` does with quantised ones; "" without any."""
    names = [
        name
        for name, module in named_modules(model)
        if hasattr(module, "_packed_params") and callable(getattr(module, "weight", None))
    ]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_given(model: nn.Module, other: nn.Module) -> bool | None:
    """Whether the weights at two seeds are the same; None where all are constants."""
    theirs = dict(other.named_parameters())
    drawn = [
        (name, p.detach()) for name, p in model.named_parameters() if p.numel() > 1 and not _is_constant(p)
    ]
    pairs = [
        (p, theirs[name].detach()) for name, p in drawn if name in theirs and theirs[name].shape == p.shape
    ]
    if not pairs:
        return None
    return all(torch.equal(p, q) for p, q in pairs)


def values_made(subject: Subject, anatomy: Anatomy, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of the computed weights, for other values of the parameters."""
    twin = _OPEN[id(anatomy)][2]
    assert twin is not None
    made = made_in(twin.graph, twin.model)
    return values_of(made, lambda name: values.get(name, twin.own(name)))


def without_constants(holdings: Holdings) -> Holdings:
    """The same with other values for parameters that are constants.

    Fresh biases are zero and fresh gains one, and a branch that begins at zero hides itself: with such values
    many differences do not show.
    """
    generator = torch.Generator().manual_seed(1)
    held = []
    for each in holdings.held:
        value = each.value
        if not each.made_of and value.is_floating_point() and _is_constant(value):
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            width = value.shape[-1] if value.ndim > 1 else 1
            scale = 0.2 if value.ndim < 2 or width == value.numel() else 0.5 / width**0.5
            value = value + scale * noise
        held.append(replace(each, value=value))
    return replace(holdings, held=tuple(held))


def _is_constant(value: Tensor) -> bool:
    return value.numel() > 0 and bool((value == value.flatten()[0]).all())
