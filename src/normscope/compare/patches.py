"""Changes of a model for one forward, by which a reason is tried, undone exactly afterwards.

A `Patch` is plain data, so it also works on a model in another process. Its kinds:

    kind        path                    value
    attribute   module.name             the attribute's new value
    parameter   name of the parameter   a tensor of its shape
    number      module                  (old, new): its attributes that equal `old`, or else the numbers that
                                        its forward passes to functions of PyTorch
    output      module                  a factor of its output, or (name of a formula, options)
    function    module                  (function's name, {keyword: value}): changed arguments of the calls
                                        inside this module and its children
    tensor      ""                      (site, tensor): the tensor there is replaced
    site        ""                      `Formula`: the tensor there is computed from it and from other sites

The values of a tensor at a site are overwritten. Hooks give it the derivative of the formula, so gradients
are right as well, where the tensor was made of the formula's other tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from normscope.anatomy import Site, named_modules, named_parameters
from normscope.compare.formulas import FORMULAS
from normscope.compare.layout import Layout
from normscope.compare.patched_ops import (
    INSIDE,
    Applied,
    Functions,
    Inside,
    Ops,
    equals,
    exchanged,
    tensors_in,
)
from normscope.compare.types import Patch


@contextmanager
def patched(model: nn.Module, patches: Sequence[Patch]) -> Iterator[Applied]:
    """Apply `patches` to the one forward that runs inside; the model is restored exactly.

    Enter it before `capture`, whose sites then stay the same.

    Raises:
        ValueError: a path or a kind that does not exist.
    """
    applied = Applied()
    with ExitStack() as stack:
        inside = Inside(model, applied)
        for index, patch in enumerate(patches):
            if patch.kind in INSIDE:
                INSIDE[patch.kind](inside, index, patch)
            elif patch.kind in _OUTSIDE:
                stack.enter_context(_OUTSIDE[patch.kind](model, patch))
                applied.done.add(index)
            elif patch.kind == "number":
                if (change := _numbers(model, patch)) is not None:
                    stack.enter_context(change)
                    applied.done.add(index)
                else:
                    inside.numbers.append((index, patch.path, *patch.value))
            else:
                raise ValueError(f'no kind of Patch is called "{patch.kind}"')
        if inside.is_needed:
            handle = model.register_forward_pre_hook(inside.keep, with_kwargs=True)
            stack.callback(handle.remove)
            stack.callback(model.register_forward_hook(inside.settle).remove)
            stack.callback(inside.hooks.remove)
            stack.enter_context(inside.calls.watching())
            stack.enter_context(Functions(inside))
            stack.enter_context(Ops(inside))
        yield applied


def _module(model: nn.Module, path: str) -> nn.Module:
    for plain, module in named_modules(model):
        if plain == path:
            return module
    raise ValueError(f'the model has no module "{path}"')


@contextmanager
def _attribute(model: nn.Module, patch: Patch) -> Iterator[None]:
    path, _, name = patch.path.rpartition(".")
    with _set(_module(model, path), {name: patch.value}):
        yield


@contextmanager
def _set(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module; those of its class only become visible again."""
    own = {name: vars(module)[name] for name in values if name in vars(module)}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(module, name, own[name])
            elif name in vars(module):
                delattr(module, name)


def _numbers(model: nn.Module, patch: Patch) -> Any:
    """Context in which the attributes that equal the old number have the new one; None without such."""
    old, new = patch.value
    module = _module(model, patch.path)
    names = [name for name, value in vars(module).items() if not name.startswith("_") and equals(value, old)]
    return _set(module, dict.fromkeys(names, new)) if names else None


@contextmanager
def _parameter(model: nn.Module, patch: Patch) -> Iterator[None]:
    found = dict(named_parameters(model, remove_duplicate=False))
    if patch.path not in found:
        raise ValueError(f'the model has no parameter "{patch.path}"')
    parameter = found[patch.path]
    before = parameter.data
    try:
        parameter.data = patch.value.to(before).reshape(before.shape).contiguous()
        yield
    finally:
        parameter.data = before


@contextmanager
def _output(model: nn.Module, patch: Patch) -> Iterator[None]:
    name, options = ("scale", {"by": patch.value}) if not isinstance(patch.value, tuple) else patch.value

    def changed(module: nn.Module, args: Any, output: Any) -> Any:
        tensors = [t for t in tensors_in(output) if t.is_floating_point()]
        first = next((t for t in tensors if t.dim() > 1), next(iter(tensors), None))
        return output if first is None else exchanged(output, first, FORMULAS[name](first, **options))

    handle = _module(model, patch.path).register_forward_hook(changed)
    try:
        yield
    finally:
        handle.remove()


_OUTSIDE: Mapping[str, Callable[[nn.Module, Patch], Any]] = {
    "attribute": _attribute,
    "parameter": _parameter,
    "output": _output,
}


def tensors_at(values: Mapping[Site, Tensor], layout: Layout | None = None) -> tuple[Patch, ...]:
    """Patches that put each tensor, which has the common form of `layout`, at its site."""
    return tuple(
        Patch("tensor", "", (site, value if layout is None else layout.undo(value)))
        for site, value in values.items()
    )
