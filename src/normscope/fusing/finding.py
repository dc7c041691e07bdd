"""The pairs of a model: from its anatomy, and from one forward in which they are seen."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy
from normscope.anatomy.measuring import measuring
from normscope.anatomy.names import named_modules
from normscope.anatomy.types import Norm, Site
from normscope.fusing.adds import Add, Adds
from normscope.fusing.pairs import Pair
from normscope.kernels.form import Norm as Kind
from normscope.subjects import untouched
from normscope.subjects.subject import Batch, call_model

_INLINE = "it is written out in a larger module, or takes the stream otherwise than as its only argument"
_KINDS: dict[str, Kind] = {"layernorm": "layer", "rmsnorm": "rms"}


@dataclass(frozen=True)
class Seen:
    """A pair and its add in one forward."""

    pair: Pair
    add: Add


@dataclass(frozen=True)
class Left:
    """A norm behind a residual add that stays as it is, and why."""

    norm: str
    why: str


@dataclass
class _Record:
    """The adds of one forward with their results, and the inputs of its norms."""

    adds: list[tuple[str, int, Add, Tensor]] = field(default_factory=list)
    norms: list[tuple[str, Tensor]] = field(default_factory=list)

    def note(self, path: str, nth: int, add: Add) -> Tensor:
        total = add.total()
        self.adds.append((path, nth, add, total))
        return total


def find_pairs(model: nn.Module, batch: Batch, anatomy: Anatomy) -> tuple[list[Seen], list[Left]]:
    """The pairs that one forward shows, and the norms behind adds that cannot be fused."""
    norms = _behind_adds(anatomy)
    record = _recorded(model, batch, {site.module for site, _ in norms}, {norm.path for _, norm in norms})
    modules = dict(named_modules(model))
    seen: dict[tuple[str, int], Seen] = {}
    left: dict[str, str] = {}
    for path, norm in {norm.path: norm for _, norm in norms}.items():
        found = _seen(norm, modules[path], record)
        if isinstance(found, str):
            left[path] = found
        for each in () if isinstance(found, str) else found:
            before = seen.setdefault((each.pair.holder, each.pair.nth), each)
            if before.pair != each.pair:
                left[path] = f"the add in {each.pair.holder} is also read by {before.pair.norm}"
    return list(seen.values()), [Left(path, why) for path, why in left.items()]


def _behind_adds(anatomy: Anatomy) -> list[tuple[Site, Norm]]:
    """The LayerNorms and RMSNorms that read a residual sum, with the sums."""
    sums = {branch.sum for branch in anatomy.branches}
    norms = [norm for branch in anatomy.branches for norm in branch.norms]
    norms += [stack.final_norm for stack in anatomy.stacks if stack.final_norm is not None]
    unique = dict.fromkeys(norm for norm in norms if norm.kind in _KINDS and norm.input in sums)
    return [(norm.input, norm) for norm in unique]


def _recorded(model: nn.Module, batch: Batch, holders: set[str], norms: set[str]) -> _Record:
    """One forward in eval mode, with its residual adds and norms."""
    record = _Record()
    adds = Adds(record.note)

    def reads(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            first, *rest = args or (None,)
            alone = all(each is None for each in (*rest, *kwargs.values()))
            if alone and isinstance(first, Tensor) and isinstance(output, Tensor):
                record.norms.append((path, first))

        return hook

    with untouched(model), measuring(model), ExitStack() as held:
        held.callback(adds.unwatch)
        adds.watch(model, holders, norms)
        for path, module in named_modules(model):
            if path in norms:
                held.callback(module.register_forward_hook(reads(path), with_kwargs=True).remove)
        with torch.no_grad(), adds.mode():
            call_model(model, batch)
    return record


def _seen(norm: Norm, module: nn.Module, record: _Record) -> list[Seen] | str:
    """The pairs of a norm in the record, one for each add that it reads; or why there is none."""
    read = [given for path, given in record.norms if path == norm.path]
    if not read:
        return _INLINE
    gains = _gains(norm, module)
    if isinstance(gains, str):
        return gains
    found: dict[tuple[str, int], Seen] = {}
    for given in read:
        for holder, nth, add, total in record.adds:
            if total is given:
                eps = 0.0 if norm.eps is None else norm.eps
                pair = Pair(holder, nth, norm.path, _KINDS[norm.kind], eps, norm.weight_offset, *gains)
                found.setdefault((holder, nth), Seen(pair, add))
    return list(found.values()) or "the add before it is written in another form than skip + branch"


def _gains(norm: Norm, module: nn.Module) -> tuple[str | None, str | None] | str:
    """Names of the norm's weight and bias among its own parameters; a reason where it has others."""
    own = dict(module.named_parameters(recurse=False))
    weight = None if norm.weight is None else norm.weight.rpartition(".")[2]
    rest = own.keys() - {weight}
    if weight is not None and weight not in own:
        return _INLINE
    if others := rest - {"bias"}:
        return f"it has other parameters than a weight and a bias: {', '.join(sorted(others))}"
    return weight, "bias" if "bias" in rest else None
