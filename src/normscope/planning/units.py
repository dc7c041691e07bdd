"""Units: the modules that can be recomputed, block by block, and the watch over their calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from normscope.anatomy import Anatomy, named_modules

MOST_PARTS = 5
"""Parts of one block that are weighed against each other."""


@dataclass(frozen=True)
class Unit:
    """A module that can be recomputed.

    Attributes:
        path: its path, wrappers stripped.
        kind: "block", or the kind of its branch: "attention", "cross-attention", "feed-forward" or "other".
    """

    path: str
    kind: str


@dataclass(frozen=True)
class Group:
    """A block and its parts: the modules of its branches, and its other children with parameters.

    No part lies in another.
    """

    block: Unit
    parts: tuple[Unit, ...]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The block, then its parts."""
        return (self.block, *self.parts)


def groups_of(model: nn.Module, anatomy: Anatomy) -> tuple[Group, ...]:
    """The blocks that `anatomy` names, in order; without any, the items of the model's longest ModuleList.

    A module that is called several times, as in ALBERT, is one unit.
    """
    modules = dict(named_modules(model))
    kinds: dict[str, dict[str, str]] = {}
    for block in anatomy.blocks:
        if block.path:  # else the model itself is the block
            kinds.setdefault(block.path, {}).update({each.path: each.kind for each in block.branches})
    if not kinds:
        kinds = {path: {} for path in _listed(model)}
    return tuple(
        Group(Unit(path, "block"), _parts(path, branches, modules))
        for path, branches in kinds.items()
        if path in modules
    )


def _parts(block: str, branches: dict[str, str], modules: dict[str, nn.Module]) -> tuple[Unit, ...]:
    found = {path: kind for path, kind in branches.items() if path in modules and path != block}
    for name, child in modules[block].named_children():
        path = f"{block}.{name}"
        is_part = not any(_nested(path, each) for each in found)
        if is_part and next(child.parameters(), None) is not None:
            found[path] = "other"
    outermost = [path for path in found if not any(path.startswith(f"{each}.") for each in found)]
    return tuple(Unit(path, found[path]) for path in outermost[:MOST_PARTS])


def _nested(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def _listed(model: nn.Module) -> list[str]:
    lists = [
        (path, module)
        for path, module in named_modules(model)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    ]
    if not lists:
        return []
    path, longest = max(lists, key=lambda each: len(each[1]))
    return [f"{path}.{index}" if path else str(index) for index in range(len(longest))]


class Watch:
    """The units whose forward is running, and what was given to them.

    Attributes:
        running: the units that run now, outermost first.
        entered, left: calls of blocks so far, begun and done.
    """

    def __init__(self) -> None:
        self.running: list[Unit] = []
        self.entered = self.left = 0

    @contextmanager
    def over(self, model: nn.Module, groups: tuple[Group, ...]) -> Iterator["Watch"]:
        """Watch the calls of the units of `groups` in the block."""
        modules, handles = dict(named_modules(model)), []
        try:
            for unit in (unit for group in groups for unit in group.units):
                module = modules[unit.path]
                before, after = self._before(unit), self._after(unit)
                handles += [module.register_forward_pre_hook(before, with_kwargs=True)]
                handles += [module.register_forward_hook(after, always_call=True)]
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def enter(self, unit: Unit, inputs: list[Tensor]) -> None:
        """Note that a unit begins."""

    def leave(self, unit: Unit) -> None:
        """Note that a unit ends."""

    def _before(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(unit)
            self.entered += unit.kind == "block"
            self.enter(unit, [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)])

        return hook

    def _after(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if unit in self.running:
                self.leave(unit)
                self.running.remove(unit)
                self.left += unit.kind == "block"

        return hook
