"""Patches inside of a forward: tensors at sites, and numbers and arguments of PyTorch's functions."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from normscope.anatomy import Site, named_parameters
from normscope.anatomy.calls import ModuleCalls
from normscope.anatomy.record import changed_by, op_identity, outputs_of
from normscope.compare.formulas import FORMULAS
from normscope.compare.layout import Layout
from normscope.compare.types import Patch


@dataclass(frozen=True)
class Formula:
    """A tensor at a site, computed anew: the value of a Patch of kind "site".

    Attributes:
        site: the tensor that is replaced.
        name: a name of `FORMULAS`.
        sources: other tensors that it needs; they are computed before it.
        options: its further arguments, by name.
        parameters: its arguments that are parameters of the model: argument → parameter.
        layouts: ways from the tensors, the replaced one first, to the form that the formula knows; None where
            they have it.
        rows: features of the same tensors that are meant, where they are a part (fused projections).
    """

    site: Site
    name: str
    sources: tuple[Site, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[Layout | None, ...] = ()
    rows: tuple[Tensor | None, ...] = ()

    def value(self, y: Tensor, sources: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
        """The tensor that replaces y, in y's own shape."""
        layouts = (*self.layouts, *[None] * (1 + len(sources) - len(self.layouts)))
        rows = (*self.rows, *[None] * (1 + len(sources) - len(self.rows)))
        given = [
            tensor if layout is None else layout.apply(tensor)
            for tensor, layout in zip((y, *sources), layouts, strict=True)
        ]
        parts = [t if r is None else t.index_select(-1, r) for t, r in zip(given, rows, strict=True)]
        value = FORMULAS[self.name](*parts, **arguments).to(y.dtype)
        if rows[0] is not None:
            value = given[0].index_copy(-1, rows[0], value.reshape(parts[0].shape))
        if layouts[0] is not None and tuple(y.shape) == layouts[0].shape:
            value = layouts[0].undo(value)
        return value.reshape(y.shape)


@dataclass
class Applied:
    """Effects of the patches on the forwards inside the context.

    Attributes:
        replaced: site → the tensor there, with the values of the patch.
        before: site → the tensor there before a patch of kind "tensor" replaced it; its maker's own value.
        gradients: id of a tensor that a formula makes or reads → its gradient, once a backward has run.
            `torch.autograd.grad` with this tensor as input gives it without what the formula adds.
        done: indices of the patches that had an effect.
    """

    replaced: dict[Site, Tensor] = field(default_factory=dict)
    before: dict[Site, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def made(self, site: Site, tensor: Tensor) -> Tensor:
        """The value that the maker of the tensor at a site gave it, also where a view of it was replaced."""
        for other, before in self.before.items():
            replaced = self.replaced[other]
            if other == site and before.numel() == tensor.numel():
                return before.reshape(tensor.shape)
            if _is_view_of_all(tensor, replaced) and before.stride() == replaced.stride():
                return before.as_strided(tensor.shape, tensor.stride(), before.storage_offset())
        return tensor


@dataclass(eq=False)
class _Hit:
    """An op's output that a formula has overwritten.

    Attributes:
        formula: the formula.
        output: the tensor.
        before: a copy of what it was.
        sources: the formula's other tensors, and copies of them.
        arguments: the formula's options and parameters.
    """

    formula: Formula
    output: Tensor
    before: Tensor
    sources: list[tuple[Tensor, Tensor]]
    arguments: Mapping[str, Any]

    def hook(self, hooks: "_Hooks") -> None:
        """Give the output the formula's derivative.

        The gradient of the output goes to the sources, which autograd reaches later, since the output was
        made of them.
        """
        waiting: dict[int, Tensor] = {}
        learnt = {name: v for name, v in self.arguments.items() if isinstance(v, nn.Parameter)}
        reached = [live for live, _ in self.sources if live.requires_grad and live is not self.output]

        def pulled(gradient: Tensor) -> Tensor:
            with _disable_current_modes(), torch.enable_grad():
                own = self.before.clone().requires_grad_()
                leaves = {id(live): copy.clone().requires_grad_() for live, copy in self.sources}
                leaves |= {id(v): v.detach().clone().requires_grad_() for v in learnt.values()}
                leaves[id(self.output)] = own
                given = [leaves[id(live)] for live, _ in self.sources]
                arguments = {**self.arguments, **{name: leaves[id(v)] for name, v in learnt.items()}}
                value = self.formula.value(own, given, arguments)
                if not value.requires_grad:
                    return torch.zeros_like(gradient)
                found = torch.autograd.grad(value, list(leaves.values()), gradient, allow_unused=True)
            parts = dict(zip(leaves, found, strict=True))
            waiting.update({key: part for key, part in parts.items() if part is not None})
            return waiting.pop(id(self.output), torch.zeros_like(gradient))

        def added(key: int) -> Callable[[Tensor], Tensor]:
            def hook(gradient: Tensor) -> Tensor:
                part = waiting.pop(key, None)
                return gradient if part is None else gradient + part

            return hook

        hooks.add(self.output, pulled)
        for tensor in (*reached, *learnt.values()):
            hooks.add(tensor, added(id(tensor)), first=True)


_Hook = Callable[[Tensor], Tensor]


class _Hooks:
    """Hooks of tensors, in an order of their own: what is added to a gradient comes before a derivative."""

    def __init__(self, gradients: dict[int, Tensor]) -> None:
        self._hooks: dict[int, tuple[list[_Hook], list[_Hook]]] = {}
        self._kept: list[Tensor] = []  # so that no id is used twice
        self._handles: list[Any] = []
        self._gradients = gradients

    def add(self, tensor: Tensor, hook: _Hook, first: bool = False) -> None:
        """Add a hook on the gradient of a tensor, before or after those that it has."""
        if id(tensor) not in self._hooks:
            self._hooks[id(tensor)] = ([], [])
            self._kept.append(tensor)
            handle = tensor.register_hook(lambda gradient: self._run(id(tensor), gradient))
            if isinstance(tensor, nn.Parameter):
                self._handles.append(handle)
        self._hooks[id(tensor)][0 if first else 1].append(hook)

    def _run(self, key: int, gradient: Tensor) -> Tensor:
        added, derivatives = self._hooks[key]
        for hook in added:
            gradient = hook(gradient)
        self._gradients[key] = gradient
        for hook in derivatives:
            gradient = hook(gradient)
        return gradient

    def remove(self) -> None:
        """Remove the hooks of parameters, which live longer than the forward."""
        for handle in self._handles:
            handle.remove()


class Inside:
    """Patches that need to see every op: what they want, and what was seen."""

    def __init__(self, model: nn.Module, applied: Applied) -> None:
        self.calls = ModuleCalls(model)
        self.applied = applied
        self.parameters = dict(named_parameters(model, remove_duplicate=False))
        self.jobs: dict[Site, list[tuple[int, Formula]]] = defaultdict(list)
        self.numbers: list[tuple[int, str, float, float]] = []
        self.functions: list[tuple[int, str, str, Mapping[str, Any]]] = []
        self.sources: dict[Site, Tensor] = {}
        self.hits: list[_Hit] = []
        self.hooks = _Hooks(applied.gradients)
        self.kept = {_storage(t) for t in (*model.parameters(), *model.buffers())}  # never overwritten

    @property
    def is_needed(self) -> bool:
        return bool(self.jobs or self.numbers or self.functions)

    def at_site(self, index: int, patch: Patch) -> None:
        self.jobs[patch.value.site].append((index, patch.value))

    def put(self, index: int, patch: Patch) -> None:
        site, value = patch.value
        self.jobs[site].append((index, Formula(site, "set", options={"value": value})))

    def function(self, index: int, patch: Patch) -> None:
        self.functions.append((index, patch.path, *patch.value))

    def keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the model's inputs, which are not overwritten."""
        self.kept |= {_storage(t) for t in tensors_in((args, kwargs))}

    def overwrite(self, job: tuple[int, Formula], tensor: Tensor) -> None:
        """Write the formula's values into the tensor, unless it is a parameter, an input or expanded."""
        index, formula = job
        if _storage(tensor) in self.kept or 0 in tensor.stride():
            return
        live = [tensor if site == formula.site else self.sources.get(site) for site in formula.sources]
        found = [source for source in live if source is not None]
        if len(found) < len(live):
            return
        arguments = {**formula.options}
        arguments |= {name: self.parameters[path] for name, path in formula.parameters.items()}
        with _disable_current_modes(), torch.no_grad():
            before = tensor.detach().clone()
            if formula.name == "set":
                self.applied.before.setdefault(formula.site, before)
            copies = [source.detach().clone() for source in found]
            tensor.detach().copy_(formula.value(before, copies, arguments))
        self.hits.append(_Hit(formula, tensor, before, list(zip(found, copies, strict=True)), arguments))
        self.applied.replaced[formula.site] = tensor
        self.applied.done.add(index)

    def settle(self, *_: Any) -> None:
        """Hook the overwritten tensors, which autograd knows by now."""
        hits, self.hits = self.hits, []
        for hit in reversed(hits):  # of several at one tensor, the last formula's derivative comes first
            if hit.output.requires_grad and torch.is_grad_enabled():
                hit.hook(self.hooks)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view_of_all(view: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors have the same numbers in memory, in any order of their axes, without gaps."""
    if view.data_ptr() != tensor.data_ptr() or view.data_ptr() == 0 or view.numel() != tensor.numel():
        return False
    ends = [sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) for t in (view, tensor)]
    return ends == [view.numel() - 1] * 2


class Ops(TorchDispatchMode):
    """Counts ops as `capture` does, and reports the tensors at patched sites."""

    supports_higher_order_operators = True

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.inside = inside
        targets = inside.jobs
        sources = {site for jobs in targets.values() for _, formula in jobs for site in formula.sources}
        self.wanted: dict[tuple[str, int, str, int], set[Site]] = defaultdict(set)
        for site in {*targets, *sources}:
            self.wanted[site.module, site.call, site.op, site.nth].add(site)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op; keep its tensors where a patch needs them."""
        self.inside.settle()
        kwargs = kwargs or {}
        name, _, mutable = op_identity(func)
        call = self.inside.calls.current
        sites = self.wanted.get((call.path, call.nth, name, call.count(name)), ())
        tensors = tensors_in((args, kwargs)) if sites else []
        for site in sites:
            if site.output < 0:
                self._met(site, tensors[-1 - site.output])
        changed = changed_by(func, args, kwargs) if mutable else []
        result = func(*args, **kwargs)
        for site in sites:
            if site.output >= 0:
                self._met(site, outputs_of(result, changed)[site.output])
        return result

    def _met(self, site: Site, tensor: Tensor) -> None:
        self.inside.sources.setdefault(site, tensor)
        for job in self.inside.jobs.get(site, ()):
            self.inside.overwrite(job, tensor)


class Functions(TorchFunctionMode):
    """Changes arguments of PyTorch's functions."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.inside = inside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function with changed arguments."""
        args, kwargs = self._arguments(func, args, kwargs or {})
        return func(*args, **kwargs)

    def _arguments(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        inside = self.inside
        if not (inside.numbers or inside.functions):
            return args, kwargs
        name = getattr(func, "__name__", "")
        call = inside.calls.current
        for index, path, old, new in inside.numbers:
            if call.path == path:
                leaves, form = tree_flatten((args, kwargs))
                if any(equals(leaf, old) for leaf in leaves):
                    inside.applied.done.add(index)
                    args, kwargs = tree_unflatten(
                        [new if equals(leaf, old) else leaf for leaf in leaves], form
                    )
        for index, path, wanted, changes in inside.functions:
            if name == wanted and any(each.path == path for each in call.around()):
                keywords = dict(zip(_SIGNATURES.get(name, ()), args, strict=False))
                args = args[len(keywords) :]
                kwargs = {**keywords, **kwargs, **changes}
                inside.applied.done.add(index)
        return args, kwargs


_SIGNATURES = {
    "dropout": ("input", "p", "training", "inplace"),
    "gelu": (),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
"""Function → names of its positional arguments."""

INSIDE: Mapping[str, Callable[[Inside, int, Patch], None]] = {
    "site": Inside.at_site,
    "tensor": Inside.put,
    "function": Inside.function,
}


def exchanged(result: Any, old: Tensor, new: Tensor) -> Any:
    """A function's result with `new` in the place of `old`."""
    return tree_map(lambda each: new if each is old else each, result)


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a function's result or arguments."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def equals(value: Any, number: float) -> bool:
    """Whether a value is this number, but for rounding; a bool is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isclose(value, number, rel_tol=1e-9)
