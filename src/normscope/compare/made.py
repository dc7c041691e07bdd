"""Weights that a model computes from its parameters at each forward.

`weight_norm` and its kind, LoRA's w + b·a, standardised weights: what a matmul reads is no parameter, or not
one alone. Such a weight is held like a parameter, under a name of its own: the value that the model makes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from normscope.anatomy import named_modules
from normscope.anatomy.graph import Graph, Op, Value, search
from normscope.anatomy.ops import CASTS, PARTS, VIEWS, matmul_operands, weight_of
from normscope.anatomy.replay import CannotReplay, Replay, leaves_of

_MOVES = CASTS | VIEWS | PARTS | {"embedding"}
_LOOKUPS = ("embedding", "index", "index_select", "gather")
_PARAMETRISED = ".parametrizations."

Part = tuple[str, tuple[int, ...]]
"""The parametrisation that a parameter or buffer belongs to, "" for none, and its shape."""


@dataclass(frozen=True, eq=False)
class Made:
    """A weight that is computed.

    Attributes:
        name: its name.
        values: its values in the graph: one for each call of a shared module.
        parts: parameter, or buffer of a parametrisation → what it is.
        raw: the parameter that it is computed from, where that is one alone, of the same shape.
    """

    name: str
    values: tuple[Value, ...]
    parts: Mapping[str, Part]
    raw: str | None


def read_by(op: Op) -> Value | None:
    """The weight that a matmul multiplies with, or a lookup by the model's input reads."""
    if not op.outputs or not op.outputs[0].live:
        return None
    if op.base in _LOOKUPS and op.inputs[0].is_weight:
        return op.inputs[0]
    return weight_of(op)


def sources(weight: Value) -> list[Value]:
    """Parameters and computed values whose elements a weight consists of, as they are."""
    met = search([weight], lambda value: _moved(value) if value.base in _MOVES else ())
    return [value for value in met if value.base not in _MOVES]


def _moved(value: Value) -> Iterator[Value]:
    return (each for each in value.inputs if each.floating)


def made_in(graph: Graph, model: nn.Module) -> list[Made]:
    """The computed weights of a model, in the order of the forward."""
    kinds = dict(_parametrised(model))
    weights = dict.fromkeys(w for op in graph.ops if (w := read_by(op)) is not None)
    computed = dict.fromkeys(s for w in weights for s in sources(w) if s.op is not None and s.learnt)
    found: dict[str, Made] = {}
    for value in computed:
        leaves = sorted(leaves_of([value]), key=lambda each: each.index)
        parts = {
            leaf.name: (kind, leaf.shape)
            for leaf in leaves
            if leaf.name is not None
            and ((kind := _kind(leaf.name, kinds)) or leaf.origin == "parameter")
            and leaf.floating
        }
        name = _name([leaf for leaf in leaves if leaf.name in parts], kinds)
        alone = next(iter(parts)) if list(parts.values()) == [("", value.shape)] else None
        before = found[name].values if name in found else ()
        if all(each.shape == value.shape and each.base == value.base for each in before):
            found[name] = Made(name, (*before, value), parts, alone)
    return list(found.values())


def _parametrised(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name of each parametrised tensor → classes of its parametrisations."""
    for path, module in named_modules(model):
        lists = getattr(module, "parametrizations", None)
        for name, each in lists.items() if isinstance(lists, nn.ModuleDict) else ():
            yield f"{path}.{name}", " ".join(type(one).__name__ for one in each.children())
        for hook in module._forward_pre_hooks.values():
            if hasattr(hook, "compute_weight") and hasattr(hook, "name"):
                yield f"{path}.{hook.name}", type(hook).__name__


def _tensor(name: str, kinds: Mapping[str, str]) -> str | None:
    """The parametrised tensor that a parameter or buffer belongs to."""
    path, is_parametrised, rest = name.partition(_PARAMETRISED)
    if is_parametrised:
        return f"{path}.{rest.partition('.')[0]}"
    return next((each for each in kinds if name.startswith(f"{each}_")), None)


def _kind(name: str, kinds: Mapping[str, str]) -> str:
    return kinds.get(_tensor(name, kinds) or "", "")


def _name(leaves: Iterable[Value], kinds: Mapping[str, str]) -> str:
    names = [leaf.name for leaf in sorted(leaves, key=lambda leaf: -leaf.numel) if leaf.name is not None]
    tensors = {_tensor(name, kinds) for name in names}
    if len(tensors) == 1 and (tensor := tensors.pop()) is not None:
        return tensor
    return f"{names[0]} with {' and '.join(names[1:])}" if names[1:] else f"{names[0]} as computed"


def values_of(made: Iterable[Made], own: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Computed weights by name, for values of parameters and buffers; without those that cannot be told."""
    found: dict[str, Tensor] = {}
    for each in made:
        end = each.values[0]
        given = {leaf: own(leaf.name) for leaf in leaves_of([end]) if leaf.name is not None and leaf.floating}
        try:
            (found[each.name],) = Replay().run(given, [end])
        except CannotReplay:
            continue
    return found


def buffers_read(graph: Graph) -> set[str]:
    """Names of the buffers that the model multiplies with as with weights, and of those beside them."""
    floating = {v.name for v in graph.values if v.origin == "buffer" and v.floating and v.name is not None}
    modules: set[str] = set()
    for op in graph.ops:
        operands = matmul_operands(op)
        if operands is None or not op.outputs or not op.outputs[0].live or weight_of(op) is not None:
            continue
        met = (source for each in operands if not each.live for source in sources(each))
        named = (each.name for each in met if each.name in floating and len(each.shape) > 1)
        modules.update(name.rpartition(".")[0] for name in named if name is not None)
    return {name for name in floating if name.rpartition(".")[0] in modules}
