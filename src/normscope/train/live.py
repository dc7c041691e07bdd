"""LiveOptimizers: a user's own optimizers and schedulers, copied onto a copy of their model.

A copy is a new object of the same class whose attributes are deep copies, in which every parameter, buffer
and module of the source model is replaced by the one of the same name in the other model. Pickling and
`copy.deepcopy` would drop what a subclass of `torch.optim.Optimizer` keeps beside its state and groups.
"""

import copy
import functools
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from normscope.anatomy import named_modules, named_parameters
from normscope.errors import UsageError, describe

LONGEST_WARMUP = 20_000
"""Steps of a schedule that are read to find its warm-up; about 10 µs each."""
FULL = 0.999
"""Share of its largest learning rate at which a warm-up is over."""

_RATES = ("lr", "initial_lr", "max_lr")  # keys of a group whose largest value is its full learning rate
_OF_PROTOCOL = ("param_groups", "step", "zero_grad")


class CopyError(RuntimeError):
    """An optimizer or a scheduler cannot be copied."""


@dataclass(frozen=True, eq=False)
class LiveOptimizers:
    """Optimizers of `model` and the schedule of their learning rates. Nothing here is changed or stepped.

    Attributes:
        model: the module that the optimizers train.
        optimizers: objects of PyTorch's protocol (`param_groups`, `step()`, `zero_grad()`), in the order in
            which they step.
        schedulers: schedulers of these optimizers, stepped after each step, in this order.
        rates: learning rates by step, of every group of every optimizer in order (steps × groups), for
            schedules without a scheduler; the last row holds for all later steps. Empty: the groups' own.

    Raises:
        UsageError: there is no optimizer, an object does not follow the protocol, a scheduler belongs to
            another optimizer, or a row of `rates` has not one number for each group.
    """

    model: nn.Module
    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...] = ()
    rates: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        do = "give the optimizer, or a list of optimizers"
        if not self.optimizers:
            raise UsageError("no optimizer", "one or more optimizers", do)
        for optimizer in self.optimizers:
            missing = [name for name in _OF_PROTOCOL if not hasattr(optimizer, name)]
            if missing:
                given = f"an optimizer of type {type(optimizer).__name__}, without {missing[0]}"
                raise UsageError(given, "an object with param_groups, step() and zero_grad()", do)
        known = {id(each) for each in _with_inner(self.optimizers)}
        for scheduler in self.schedulers:
            if id(getattr(scheduler, "optimizer", None)) not in known:
                raise UsageError(
                    f"a scheduler ({type(scheduler).__name__}) of another optimizer",
                    "schedulers of the given optimizers",
                    "give its optimizer too, or leave the scheduler out",
                )
        groups = len(self.groups)
        wrong = next((row for row in self.rates if len(row) != groups), None)
        if wrong is not None:
            given = f"a row of {len(wrong)} learning rates for {groups} parameter groups"
            raise UsageError(given, "one learning rate per group in each row", "record every group")

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def name(self) -> str:
        """Class names of the optimizers, such as "Muon + AdamW"."""
        return " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def adam_groups(self) -> list[dict[str, Any]]:
        """The groups with betas and an ε, as Adam and its variants have them."""
        return [group for group in self.groups if "eps" in group and "betas" in group]

    @property
    def adam_eps(self) -> float | None:
        """The smallest ε of `adam_groups`; None without any."""
        return min((float(group["eps"]) for group in self.adam_groups), default=None)

    @functools.cached_property
    def full_rates(self) -> tuple[float, ...]:
        """Learning rate of each group after the warm-up.

        The largest of the group's own, its scheduler's (`initial_lr`, `max_lr`) and those in `rates`. Groups
        that always have the same rate in `rates` also count the rate with which their optimizer was made: a
        record may end before the warm-up does.
        """
        alike = bool(self.rates) and all(len(set(row)) == 1 for row in self.rates)
        made = [_made_with(o) if alike else 0.0 for o in self.optimizers for _ in o.param_groups]
        own = [max((float(g[key]) for key in _RATES if key in g), default=0.0) for g in self.groups]
        rows = (*self.rates, own, made)
        return tuple(max(column) for column in zip(*rows, strict=True))

    @property
    def lr(self) -> float:
        """The largest of `full_rates`; 1 where all are 0, as in optimizers that find their own."""
        return max(self.full_rates, default=0.0) or 1.0

    @functools.cached_property
    def warmup(self) -> int:
        """Number, counted from 1, of the first step with the full rate in some group; 0 if that is step 1.

        So a linear warm-up over 20 steps is 20 where step n has n/20 of the rate, as `rate_factor` gives it,
        and 21 where it has (n - 1)/20, as transformers' schedulers give it: step 1 then has rate 0.
        A warm-up that ends after the last row of `rates` is continued linearly.
        """
        first, peak, last = 0.0, 0.0, 0
        for step, factor in enumerate(self.factors()):
            first = factor if step == 0 else first
            if factor > peak:
                peak, last = factor, step
            if peak >= FULL:
                break
        if last == 0 or first >= FULL * peak:
            return 0
        if self.rates and peak < FULL and last == len(self.rates) - 1:
            return round((last + 1) / peak)
        return last + 1

    def factors(self) -> Iterator[float]:
        """Largest share of its full learning rate that any group has, by step, as far as it is known."""
        full = self.full_rates
        if self.rates:
            yield from (_largest_share(row, full) for row in self.rates)
            return
        if not self.schedulers:
            return
        scratch = self._copied(self.model, with_state=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a scheduler that steps before its optimizer
            for _ in range(LONGEST_WARMUP):
                yield _largest_share([group.get("lr", 0.0) for group in scratch.groups], full)
                try:
                    scratch.step_schedulers(0.0)
                except Exception:  # the schedule has ended: OneCycleLR raises ValueError
                    return

    def why_not_stepped(self) -> str | None:
        """The reason why these optimizers cannot be stepped in a trial; None if they can."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                return "the optimizer LBFGS needs a closure at each step, and trials have none"
        return None

    def step_schedulers(self, loss: float) -> None:
        """Step every scheduler once; one that watches a metric (ReduceLROnPlateau) gets `loss`."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()

    def build(self, model: nn.Module) -> "LiveOptimizers":
        """Copies of the optimizers and schedulers, with their state, that train `model`.

        `model` is the source model, a copy of it, or a copy that was changed. A parameter takes the group and
        the state of the one with the same name; its state starts anew where shape or dtype differ. Trainable
        parameters that the source does not have join the group that holds most parameters of their kind
        (matrices, or fewer dimensions). Parameters outside the source are copied. Hooks, and methods that
        were replaced on an object, are not copied. An optimizer with a method `train` (schedule-free) is set
        to training.

        Raises:
            CopyError: an attribute of an optimizer or a scheduler cannot be copied.
        """
        made = self._copied(model)
        for optimizer in made.optimizers:
            if callable(getattr(optimizer, "train", None)):
                optimizer.train()
        return made

    def _copied(self, model: nn.Module, *, with_state: bool = True) -> "LiveOptimizers":
        memo, gone, anew = _correspondence(self.model, model)
        objects = _with_inner((*self.optimizers, *self.schedulers))
        for each in objects:
            memo[id(each)] = object.__new__(type(each))
        for each in objects:
            _fill(memo[id(each)], each, memo, with_state=with_state)
        optimizers = tuple(memo[id(each)] for each in self.optimizers)
        for each in objects:
            if is_optimizer(each):
                _forget(memo[id(each)], gone, anew)
        made = LiveOptimizers(model, optimizers, tuple(memo[id(s)] for s in self.schedulers), self.rates)
        _adopt(made, self)
        return made


def is_optimizer(value: Any) -> bool:
    """Whether an object follows the protocol of an optimizer."""
    return isinstance(value, Optimizer) or (
        not isinstance(value, type) and all(hasattr(value, name) for name in _OF_PROTOCOL)
    )


def _largest_share(rates: Sequence[Any], full: Sequence[float]) -> float:
    pairs = zip(rates, full, strict=True)
    return max((float(rate) / most for rate, most in pairs if most > 0), default=1.0)


def _made_with(optimizer: Any) -> float:
    """Learning rate with which an optimizer was made, for groups without one; 0 if unknown."""
    rate = getattr(optimizer, "defaults", {}).get("lr", 0.0)
    return float(rate) if isinstance(rate, int | float | Tensor) else 0.0


def _with_inner(objects: Sequence[Any]) -> list[Any]:
    """`objects` and the optimizers and schedulers in their attributes, each once."""
    found: dict[int, Any] = {}
    waiting = list(objects)
    while waiting:
        each = waiting.pop(0)
        if id(each) in found:
            continue
        found[id(each)] = each
        for value in getattr(each, "__dict__", {}).values():
            parts = value if isinstance(value, list | tuple) else [value]
            waiting += [part for part in parts if is_optimizer(part) or isinstance(part, LRScheduler)]
    return list(found.values())


def _correspondence(source: nn.Module, model: nn.Module) -> tuple[dict[int, Any], set[int], set[int]]:
    """Memo of `copy.deepcopy` from the parts of `source` to those of `model` with the same names.

    Also the ids of parameters that stand for those that `model` does not have, and the ids of parameters of
    `model` whose state cannot be that of the source.
    """
    memo: dict[int, Any] = {}
    gone, anew = set(), set()
    modules, buffers = dict(named_modules(model)), dict(model.named_buffers(remove_duplicate=False))
    parameters = dict(named_parameters(model, remove_duplicate=False))
    for name, module in named_modules(source):
        memo.setdefault(id(module), modules.get(name, module))
    for name, buffer in source.named_buffers(remove_duplicate=False):
        if name in buffers:
            memo.setdefault(id(buffer), buffers[name])
    for name, parameter in named_parameters(source, remove_duplicate=False):
        other = parameters.get(name)
        if id(parameter) in memo:
            continue
        if other is None:
            other = nn.Parameter(torch.empty(0), requires_grad=False)
            memo[id(other)] = other  # keeps it alive: its id is remembered
            gone.add(id(other))
        elif other.shape != parameter.shape or other.dtype != parameter.dtype:
            anew.add(id(other))
        memo[id(parameter)] = other
    return memo, gone, anew


def _fill(made: Any, source: Any, memo: dict[int, Any], *, with_state: bool) -> None:
    """Set the attributes of `made` to deep copies of those of `source`."""
    for name, value in list(vars(source).items()):
        of_class = getattr(type(source), name, None)
        if callable(value) and callable(of_class):
            continue  # a method that was replaced on this object
        if name.endswith("_hooks") and isinstance(value, dict):
            vars(made)[name] = type(value)()
        elif name == "state" and not with_state and is_optimizer(source):
            vars(made)[name] = copy.copy(value)
            vars(made)[name].clear()
        else:
            copied = _deep(value, memo, f"{type(source).__name__}.{name}")
            vars(made)[name] = _by_id(copied, memo)
    if getattr(vars(source).get("step"), "_wrapped_by_lr_sched", False):
        _track(made)


def _deep(value: Any, memo: dict[int, Any], where: str) -> Any:
    for part in value if isinstance(value, list | tuple) else [value]:
        if _is_shared(part, memo):
            memo[id(part)] = part
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # the user's objects may raise anything
        raise CopyError(f"{where} cannot be copied ({describe(error)})") from error


def _by_id(value: Any, memo: dict[int, Any]) -> Any:
    """`value` with ids of parameters, as keys of dictionaries and in sets, replaced by the other model's."""

    def other(key: Any) -> Any:
        part = memo.get(key) if type(key) is int else None
        return id(part) if isinstance(part, nn.Parameter) else key

    if isinstance(value, dict):
        items = [(other(key), _by_id(part, memo)) for key, part in value.items()]
        value.clear()
        value.update(items)
    elif isinstance(value, set):
        members = {other(member) for member in value}
        value.clear()
        value.update(members)
    elif isinstance(value, list):
        value[:] = [_by_id(part, memo) for part in value]
    return value


def _is_shared(value: Any, memo: dict[int, Any]) -> bool:
    """Whether a copy refers to the same object.

    This holds for a method of an object outside, such as the user's trainer, and for handles of processes.
    """
    function = value.func if isinstance(value, functools.partial) else value
    if isinstance(function, types.MethodType):
        return id(function.__self__) not in memo
    return type(value).__module__.startswith(("torch.distributed", "torch._C._distributed"))


def _track(optimizer: Any) -> None:
    """Mark `step` as PyTorch's schedulers do, which warn about an optimizer without the mark."""
    function, stepped = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(function)
    def step(*args: Any, **keywords: Any) -> Any:
        return function(stepped(), *args, **keywords)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step, optimizer._opt_called = step, True


def _forget(optimizer: Any, gone: set[int], anew: set[int]) -> None:
    """Remove parameters that the model does not have, and states that do not fit."""
    for group in optimizer.param_groups:
        if any(id(p) in gone for p in group["params"]):
            group["params"][:] = [p for p in group["params"] if id(p) not in gone]
    state = getattr(optimizer, "state", {})
    for parameter in [p for p in state if id(p) in gone | anew]:
        del state[parameter]


def _adopt(made: LiveOptimizers, source: LiveOptimizers) -> None:
    """Add the trainable parameters that only the changed model has to the groups of their kind.

    A parameter that the source model has and no optimizer of it holds stays out.
    """
    taken = {id(p) for group in source.groups for p in group["params"]}
    known = dict(named_parameters(source.model, remove_duplicate=False))
    left_out = {name for name, parameter in known.items() if id(parameter) not in taken}
    held = {id(p) for group in made.groups for p in group["params"]}
    sizes = [Counter(p.ndim >= 2 for p in group["params"]) for group in made.groups]
    for name, parameter in named_parameters(made.model):
        if parameter.requires_grad and id(parameter) not in held and name not in left_out:
            kind = parameter.ndim >= 2
            best = max(range(len(sizes)), key=lambda i: (sizes[i][kind], sizes[i].total()))
            made.groups[best]["params"].append(parameter)
