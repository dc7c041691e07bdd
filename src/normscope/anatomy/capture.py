"""Capture tensors at sites, with their autograd graph, for the probes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normscope.anatomy.calls import ModuleCalls
from normscope.anatomy.record import changed_by, op_identity, outputs_of
from normscope.anatomy.types import Site

T = TypeVar("T")
OpKey = tuple[str, int, str, int]
"""The call of a module, the name of an op, and its number among ops of that name in the call."""


class AtSites(TorchDispatchMode):
    """A mode that counts ops as the recorder does, and knows which of `sites` each op is.

    Attributes:
        ops: the ops so far, in their order.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, sites: Iterable[Site]) -> None:
        super().__init__()
        self.calls = ModuleCalls(model)
        self.ops: list[OpKey] = []
        self._wanted: dict[OpKey, list[Site]] = defaultdict(list)
        for site in sites:
            self._wanted[site.module, site.call, site.op, site.nth].append(site)

    def sites_of(self, func: Any) -> tuple[Sequence[Site], bool]:
        """The sites of the op that is about to run, which counts it; and whether it may write in place."""
        name, _, mutable = op_identity(func)
        call = self.calls.current
        key = (call.path, call.nth, name, call.count(name))
        self.ops.append(key)
        return self._wanted.get(key, ()), mutable


class _Catcher(AtSites):
    """Keeps the tensors at `sites`."""

    def __init__(self, model: nn.Module, sites: Iterable[Site]) -> None:
        super().__init__(model, sites)
        self.found: dict[Site, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sites, mutable = self.sites_of(func)
        for site in sites:
            if site.output < 0:
                tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
                self.found.setdefault(site, tensors[-1 - site.output])
        changed = changed_by(func, args, kwargs) if mutable else []
        if changed:
            self._save_overwritten(changed)
        result = func(*args, **kwargs)
        for site in sites:
            if site.output >= 0:
                self.found.setdefault(site, outputs_of(result, changed)[site.output])
        return result

    def _save_overwritten(self, tensors: list[Tensor]) -> None:
        """Copy the captured tensors of a storage before an in-place op writes into it."""
        storages = {t.untyped_storage()._cdata for t in tensors}
        for site, tensor in self.found.items():
            if tensor.untyped_storage()._cdata in storages:
                with enable_reentrant_dispatch():
                    self.found[site] = tensor.clone()


def capture(model: nn.Module, run: Callable[[], T], sites: Iterable[Site]) -> tuple[T, dict[Site, Tensor]]:
    """Run `run()` once, with grad enabled, and return its result and the tensors at `sites`.

    Call it inside `measuring(model)`: sites name the ops of that state. The tensors are those of the autograd
    graph, so `torch.autograd.grad(loss, tensors)` works. A tensor that a later in-place op overwrites is
    returned as an earlier copy, on which the loss does not depend. Sites that did not run are absent.
    """
    result, found, _ = capture_and_ops(model, run, sites)
    return result, found


def capture_and_ops(
    model: nn.Module, run: Callable[[], T], sites: Iterable[Site]
) -> tuple[T, dict[Site, Tensor], Sequence[OpKey]]:
    """As `capture`, and the ops of the run. Where two runs have equal ops, a site is the same op in both."""
    catcher = _Catcher(model, sites)
    with catcher.calls.watching(), torch.enable_grad(), catcher:
        result = run()
    return result, catcher.found, catcher.ops
