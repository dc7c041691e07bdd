"""Record of what autograd saves for the backward pass, storage by storage, and which units save it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from normscope.anatomy import named_modules
from normscope.planning.tracker import Held, Storage, Tracker
from normscope.planning.units import Group, Unit, Watch
from normscope.planning.work import RUN_AGAIN, SAVED_AGAIN, Work

FIRST, BETWEEN, LAST = "before the blocks", "between the blocks", "after the blocks: logits and loss"
_ACTIVATIONS = (Held.BLOCKS, Held.ENDS)


@dataclass
class Saved:
    """Record of one forward pass with its loss.

    Attributes:
        storages: storages that are saved, by number, without parameters, buffers and the batch.
        savers: for each of them, the units that ran when it was saved, one tuple each time.
        place: for each of them, the innermost unit at the first time, or the part outside the blocks.
        inputs: for each unit, the storages that it was given.
        work: for each unit, the work from its call to the last tensor that it saved: what a second run does.
        calls: for each unit, how often it ran.
        unsafe: units that call modules of others whose buffers change, as a branch given as a function: a
            second run would not restore these.
        arrived: for each parameter's `id`, the bytes of the gradients before its own, in the backward pass.
    """

    storages: dict[int, Storage] = field(default_factory=dict)
    savers: dict[int, list[tuple[Unit, ...]]] = field(default_factory=lambda: defaultdict(list))
    place: dict[int, Unit | str] = field(default_factory=dict)
    inputs: dict[Unit, dict[int, Storage]] = field(default_factory=lambda: defaultdict(dict))
    work: dict[Unit, Work] = field(default_factory=lambda: defaultdict(Work))
    calls: Counter[Unit] = field(default_factory=Counter)
    unsafe: set[Unit] = field(default_factory=set)
    arrived: dict[int, int] = field(default_factory=dict)

    def bytes_at(self) -> dict[Unit | str, int]:
        """Bytes by the place that saves them first."""
        found: dict[Unit | str, int] = defaultdict(int)
        for number, storage in self.storages.items():
            found[self.place[number]] += storage.num_bytes
        return dict(found)

    def places_freed_by(self, paths: frozenset[str]) -> set[Unit | str]:
        """The places of which something is no longer saved where the units of these paths are recomputed."""
        return {
            self.place[number]
            for number, savers in self.savers.items()
            if all(any(unit.path in paths for unit in running) for running in savers)
        }

    def freed_by(self, units: Iterable[Unit], among: Iterable[int]) -> int:
        """Bytes that are no longer saved where `units` are recomputed, of the storages with these numbers.

        A storage stays if something outside of the units saves it, or if a unit was given it.
        """
        chosen = frozenset(units)
        given = {number: storage for unit in chosen for number, storage in self.inputs[unit].items()}
        freed = sum(
            self.storages[number].num_bytes
            for number in among
            if number not in given and all(not chosen.isdisjoint(each) for each in self.savers[number])
        )
        kept_anew = sum(each.num_bytes for number, each in given.items() if number not in self.storages)
        return freed - kept_anew

    def first_saved_in(self, group: Group) -> list[int]:
        """Numbers of the storages that a block or its parts save first."""
        units = frozenset(group.units)
        return [number for number, place in self.place.items() if place in units]


class Recorder(Watch):
    """Watch that records what is saved, see `Saved`; `tracker` follows the storages."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker, self.saved = tracker, Saved()
        self._begun: dict[Unit, Work] = {}
        self._last: dict[Unit, Work] = {}
        self._num_saved: Counter[Unit] = Counter()

    @contextmanager
    def recording(self, model: nn.Module, groups: tuple[Group, ...]) -> Iterator[Saved]:
        """Record the forward pass in the block."""
        self._num_groups, modules = len(groups), dict(named_modules(model))
        units = [unit for group in groups for unit in group.units]
        self._own = {unit: {id(module) for module in modules[unit.path].modules()} for unit in units}
        self._versions: list[list[int]] = []
        hooks = (register_module_forward_pre_hook(self._begin), register_module_forward_hook(self._end))
        try:
            with self.over(model, groups), self.tracker, saved_tensors_hooks(self._pack, lambda each: each):
                yield self.saved
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._versions.append([buffer._version for buffer in module.buffers(recurse=False)])

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        changed = [buffer._version for buffer in module.buffers(recurse=False)] != self._versions.pop()
        keeps_statistics = isinstance(module, _NormBase) and module.track_running_stats
        if changed or keeps_statistics:
            self.saved.unsafe |= {unit for unit in self.running if id(module) not in self._own[unit]}

    def enter(self, unit: Unit, inputs: list[Tensor]) -> None:
        """Note the storages that the unit is given."""
        self._begun[unit] = self._last[unit] = self.tracker.work
        self._num_saved[unit] = 0
        for storage in (each for tensor in inputs for each in self.tracker.storages(tensor)):
            if storage.held in _ACTIVATIONS:
                self.saved.inputs[unit][storage.number] = storage

    def leave(self, unit: Unit) -> None:
        """Note the work until the last tensor that was saved."""
        self.saved.calls[unit] += 1
        done = self._last[unit].minus(self._begun[unit])
        again = Work(calls=RUN_AGAIN + SAVED_AGAIN * self._num_saved[unit])
        self.saved.work[unit] = self.saved.work[unit].plus(done).plus(again)

    def _pack(self, tensor: Tensor) -> Tensor:
        running = tuple(self.running)
        for unit in running:
            self._last[unit] = self.tracker.work
            self._num_saved[unit] += 1
        for storage in self.tracker.storages(tensor):
            if storage.held in _ACTIVATIONS:
                self.saved.storages[storage.number] = storage
                self.saved.savers[storage.number].append(running)
                self.saved.place.setdefault(storage.number, running[-1] if running else self._outside())
        return tensor

    def _outside(self) -> str:
        if self.entered == 0:
            return FIRST
        return LAST if self.left >= self._num_groups else BETWEEN
