"""Attention figures of a training forward, on a sample of its queries.

    attention/max-logit       largest |logit| over the keys that a query may see
    attention/entropy         −Σ p log p / log(visible keys), mean over heads and queries that see two keys or
                              more: 1 is uniform, 0 is one-hot
    attention/head-max-logit  the largest |logit| of one head, at "<branch>.head<number>"
    attention/head-entropy    the entropy of one head

The sample of each attention is `SEQUENCES` evenly spaced sequences and `QUERIES` evenly spaced queries of
each, the last one among them, with all heads and keys. So the largest logit is a lower bound of that of the
batch. Logits have their mask and bias, and are those before dropout. A key is masked where its logit is at
most `MASKED_LOGIT`. Of several forwards in a step the last counts.

A dispatch mode sees the softmaxes and the fused attentions. It is on only in a module with an attention, from
the end of the last child before it, in a forward of a step with all figures. Functions that `torch.compile`
has made run as without it.
"""

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _python_dispatch as modes
from torch.utils.hooks import RemovableHandle

from normscope.anatomy import Anatomy, Site, measuring
from normscope.anatomy.names import named_modules
from normscope.anatomy.ops import FUSED_ATTENTION, base_name
from normscope.errors import describe
from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.hook import Hook
from normscope.monitor.logits import MOST_LOGITS, Sample, num_heads, sample, tallies
from normscope.monitor.row import Layout
from normscope.probes.attention import ENTROPY, LOGIT
from normscope.subjects import Batch, call_model, untouched

HEAD_ENTROPY, HEAD_LOGIT = "attention/head-entropy", "attention/head-max-logit"
Floats = NDArray[np.float64]
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


class _Op(NamedTuple):
    """One softmax, or fused attention, among those of its kind in a call of a module."""

    call: int
    is_fused: bool
    nth: int


Place = tuple[str, _Op]
"""Path of a module, and the op in it."""


def _place(probabilities: Site) -> Place:
    """The op that makes the probabilities; a fused attention was read as the math backend's softmax."""
    is_fused = "_safe_softmax" in probabilities.op
    return probabilities.module, _Op(probabilities.call, is_fused, probabilities.nth)


class AttentionWatch:
    """Hooks that measure a model's attentions in the forwards between `open` and `close`.

    Args:
        model: the model.
        anatomy: its reading.
        batch: batch of the forward by which the heads are counted; the model is restored.

    Attributes:
        layout: (quantity, site) of each value.
        notes: sentences on what is not watched.
        unseen: sites of the branches of which the last forward showed no attention.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, batch: Batch) -> None:
        branches = [branch for branch in anatomy.branches if branch.attention]
        self._sites = [branch.site for branch in branches]
        self._places = [[_place(a.probabilities) for a in branch.attention] for branch in branches]
        self._samples: dict[Place, Sample] = {}
        self._size = 0
        self._found: dict[Place, Tensor] = {}
        self._error: Exception | None = None
        self._is_open = False
        self.unseen: list[str] = []
        self.notes: list[str] = []
        self._before: dict[str, str] = {}
        self._heads = self._count_heads(model, batch)
        self._modules = self._watched(model, self._see)
        heads = [
            f"{site}.head{number}"
            for site, count in zip(self._sites, self._heads, strict=True)
            for number in range(count)
        ]
        self.layout: Layout = tuple(
            (quantity, site)
            for quantities, sites in (((LOGIT, ENTROPY), self._sites), ((HEAD_LOGIT, HEAD_ENTROPY), heads))
            for quantity in quantities
            for site in sites
        )

    def open(self) -> None:
        """Begin a forward whose attentions are measured."""
        self._is_open, self._samples, self._size, self._found = True, {}, 0, {}
        for each in self._modules:
            each.open()

    def close(self) -> None:
        """End it, if one is open.

        Raises:
            Exception: what a measurement raised; the forward itself went on.
        """
        if not self._is_open:
            return
        self._is_open = False
        for each in self._modules:
            each.close()
        if self._error is not None:
            raise self._error
        self._reduce()
        pairs = zip(self._sites, self._places, strict=True)
        self.unseen = [site for site, places in pairs if not all(place in self._found for place in places)]

    def remove(self) -> None:
        """Remove the hooks."""
        for each in self._modules:
            each.remove()

    def move_to(self, model: nn.Module) -> None:
        """Watch another model of the same structure from now on."""
        self.remove()
        self._modules = self._watched(model, self._see)

    def values(self) -> Floats:
        """Values of `layout` in the last forward that was measured; `NOT_MEASURED` where none was seen."""
        found = self._tallies()
        columns, heads = [], []
        for places, count in zip(self._places, self._heads, strict=True):
            known = [found[place] for place in places if place in found]
            each = np.concatenate(known, axis=1) if len(known) == len(places) else np.zeros((4, 1))
            columns.append([each[0].max(), *each[1:].sum(1)])
            heads.append(each if each.shape[1] == count else np.zeros((4, count)))
        parts = [
            _figures(np.array(columns).T.reshape(4, -1)),
            _figures(np.hstack([np.zeros((4, 0)), *heads])),
        ]
        return np.concatenate([part.ravel() for part in parts])

    def _watched(self, model: nn.Module, see: Callable[..., None]) -> "list[_Watched]":
        modules = dict(named_modules(model))
        paths = dict.fromkeys(path for places in self._places for path, _ in places)
        return [_Watched(path, modules[path], see, self._before.get(path)) for path in paths]

    def _tallies(self) -> dict[Place, Floats]:
        """The tallies of the last forward, in one transfer."""
        found, self._found = self._found, {}
        if not found:
            return {}
        ends = np.cumsum([each.shape[1] for each in found.values()])[:-1]
        device = next(iter(found.values())).device
        joined = torch.cat([each.to(device) for each in found.values()], dim=1).cpu().double().numpy()
        return dict(zip(found, np.split(joined, ends, axis=1), strict=True))

    def _see(self, path: str, op: _Op, func: Any, args: Any, kwargs: Any, heads: int) -> None:
        """Sample one op before it runs; errors wait for `close`."""
        if self._error is not None:
            return
        try:
            with _apart():
                taken = sample(func, args, kwargs, heads)
            if taken is not None:
                self._samples[path, op] = taken
                self._size += taken.size
                if self._size > MOST_LOGITS:
                    self._reduce()
        except Exception as error:
            self._error = error

    def _reduce(self) -> None:
        """Replace the samples by their figures."""
        samples, self._samples, self._size = self._samples, {}, 0
        if samples:
            device = next(iter(samples.values())).query.device.type
            with _apart(), torch.autocast(device, enabled=False):
                self._found |= zip(samples, tallies(list(samples.values())), strict=True)

    def _count_heads(self, model: nn.Module, batch: Batch) -> list[int]:
        """Heads of each branch in a forward; 0 where there is one, or where its attention is not seen."""
        if not self._places:
            return []
        counts: dict[Place, int] = {}
        counting = self._watched(model, lambda path, op, *call: counts.update({(path, op): num_heads(*call)}))
        for each in counting:
            each.open()
        try:
            with untouched(model), measuring(model), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # checkpointed blocks say that they need gradients
                call_model(model, batch)
        except Exception as error:
            self.notes.append(f"the heads of attentions are not watched ({describe(error)})")
        for each in counting:
            each.remove()
            if each.before is not None:
                self._before[each.path] = each.before
        sums = [sum(counts.get(place, 0) for place in places) for places in self._places]
        return [count if count > 1 else 0 for count in sums]


@dataclass(eq=False)
class _Running:
    """A call of a module that has not ended.

    Attributes:
        depth: dispatch modes that are on where the script has entered none since the call's begin.
        mode: ours, once it is on.
    """

    depth: int
    mode: "_Mode | None" = None


class _Watched:
    """One module that runs an attention: a mode is on in it, in a forward that is measured.

    Hooks that did not run stay: they lie in compiled code, which would be compiled again without them.

    Args:
        before: child whose end the mode waits for, since each operation under a mode costs time; None is the
            module's begin.

    Attributes:
        before: child that ended last before the first softmax of each call, in no mode that the call entered;
            None if none or several did.
    """

    def __init__(self, path: str, module: nn.Module, see: Callable[..., None], before: str | None) -> None:
        self.path, self._module, self._see = path, module, see
        self._waits_for = before
        sizes = (getattr(module, name, None) for name in _NUM_HEADS)
        self._heads = next((size for size in sizes if isinstance(size, int) and size > 0), 1)
        self._num_calls = 0
        self._is_open = False
        self._running: list[_Running] = []
        self._ended: str | None = None
        self._befores: set[str | None] = set()
        self._handles: list[RemovableHandle] = []

    @property
    def before(self) -> str | None:
        return next(iter(self._befores)) if len(self._befores) == 1 else None

    def open(self) -> None:
        """A forward begins."""
        self._is_open, self._num_calls = True, 0
        if not self._handles:
            # Set anew in each forward, so that modes that hooks of others enter lie outside of this one.
            # Registered through the base class: a traced module refuses its own method, but runs hooks.
            self._handles = [
                nn.Module.register_forward_pre_hook(self._module, Hook(self._begin)),
                nn.Module.register_forward_hook(
                    self._module, Hook(self._leave), prepend=True, always_call=True
                ),
            ]
            for name, child in self._module.named_children():
                if self._waits_for in (None, name):
                    hook = Hook(functools.partial(self._child_ends, name))
                    self._handles.append(nn.Module.register_forward_hook(child, hook))

    def close(self) -> None:
        """It has ended."""
        self._is_open = False
        if self._num_calls:
            self.remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_open:
            return  # a compiler only traces the call; a checkpointed block runs again in the backward
        self._num_calls += 1
        self._running.append(_Running(torch._C._len_torch_dispatch_stack()))
        self._ended = None
        if self._waits_for is None:
            self._enter()

    def _child_ends(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._running:
            return
        if torch._C._len_torch_dispatch_stack() != self._running[-1].depth:
            return  # a mode of the script is on: as it ends, it would take off ours
        self._ended = name
        if self._running[-1].mode is None:
            self._enter()

    def _enter(self) -> None:
        call = self._num_calls - 1

        def see(is_fused: bool, nth: int, *op: Any) -> None:
            if not nth:
                self._befores.add(self._ended)
            self._see(self.path, _Op(call, is_fused, nth), *op, self._heads)

        running = self._running[-1]
        running.mode = _Mode(see)
        running.mode.__enter__()
        running.depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._running:
            return
        mode = self._running.pop().mode
        if mode is not None:
            mode.__exit__(None, None, None)


class _Mode(modes.TorchDispatchMode):
    """Calls `see` with each softmax and each fused attention before it runs."""

    supports_higher_order_operators = True

    def __init__(self, see: Callable[..., None]) -> None:
        super().__init__()
        self._see = see
        self._count: Counter[bool] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: else a function that is called for the first time under the mode would never be compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_fused.get(func, _UNKNOWN) is not None:
            self._meet(func, args, kwargs)
        return func(*args, **kwargs)

    def _meet(self, func: Any, args: Any, kwargs: Any) -> None:
        """See an op if it is one of those; its kind is found at its first call."""
        if func not in _is_fused:
            name = base_name(func) if isinstance(func, torch._ops.OpOverload) else ""
            is_fused = name in FUSED_ATTENTION or name == "_safe_softmax"
            _is_fused[func] = is_fused if is_fused or name == "_softmax" else None
        if (kind := _is_fused[func]) is not None:
            nth = self._count[kind]
            self._count[kind] += 1
            self._see(kind, nth, func, args, kwargs)


_UNKNOWN = object()
_is_fused: dict[Any, bool | None] = {}
"""True for a fused attention, or its softmax in the math backend; False for other softmaxes; else None."""


def _apart() -> AbstractContextManager[Any]:
    """Context without the modes of the run."""
    return modes._disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _figures(tallies: Floats) -> Floats:
    """Largest logits and mean entropies (2, n) of tallies (4, n)."""
    largest, entropy, num_choosing, num_seeing = tallies
    means = np.where(num_choosing > 0, entropy / np.maximum(num_choosing, 1), NOT_MEASURED)
    return np.stack([np.where(num_seeing > 0, largest, NOT_MEASURED), means])
