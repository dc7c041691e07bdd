"""Run a forward with the tensors at some sites replaced, for the probes."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normscope.anatomy.capture import AtSites
from normscope.anatomy.record import changed_by, outputs_of
from normscope.anatomy.types import Site

T = TypeVar("T")
Change = Callable[[Tensor], Tensor]
"""Maps the tensor of a site to another one of the same shape and dtype."""


class _Replacer(AtSites):
    """Replaces the outputs at the sites of `changes`."""

    def __init__(self, model: nn.Module, changes: Mapping[Site, Change]) -> None:
        super().__init__(model, changes)
        assert all(site.output >= 0 for site in changes), "an input of an op has other readers too"
        self.replaced: set[Site] = set()
        self._changes = changes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sites, mutable = self.sites_of(func)
        changed = changed_by(func, args, kwargs) if mutable and sites else []
        result = func(*args, **kwargs)
        for site in sites:
            result = self._replace(site, result, changed)
        return result

    def _replace(self, site: Site, result: Any, changed: list[Tensor]) -> Any:
        old = outputs_of(result, changed)[site.output]
        new = self._changes[site](old)
        self.replaced.add(site)
        if any(old is tensor for tensor in changed):  # an in-place op: others hold the tensor already
            old.copy_(new)
            return result
        return tree_map_only(Tensor, lambda tensor: new if tensor is old else tensor, result)


def replace(model: nn.Module, run: Callable[[], T], changes: Mapping[Site, Change]) -> tuple[T, set[Site]]:
    """Run `run()` once, without grad, and return its result and the sites whose tensors were replaced.

    Everything that reads the tensor later reads the new one. Call it inside `measuring(model)`: sites name
    the ops of that state. A site must be an output of its op.
    """
    if not changes:
        with torch.no_grad():
            return run(), set()
    replacer = _Replacer(model, changes)
    with replacer.calls.watching(), torch.no_grad(), replacer:
        result = run()
    return result, replacer.replaced
