"""Record one forward: a `TorchDispatchMode` under module hooks writes every ATen op into a `Graph`.

A tensor is identified by its storage and its geometry there, not by the Python object: that survives
autograd's view wrapping, checkpointing and `.data`. Storages are held weakly, which frees their memory but
not their identity, so addresses are never confused. An in-place op rebinds its tensor to a new value. Other
views of the storage become stale and get a virtual `alias` op from the writes when they are read next.

Custom ops are opaque. On real tensors their output is compared with the norms of their first input, so a
fused norm kernel is recognised by its result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normscope.anatomy.arguments import map_arguments
from normscope.anatomy.calls import ModuleCalls
from normscope.anatomy.graph import Graph, Op, Origin, Value
from normscope.anatomy.names import named_parameters
from normscope.anatomy.opaque import which_norm
from normscope.anatomy.ops import base_name
from normscope.anatomy.softmax import logits_in
from normscope.anatomy.views import Geometry, geometry, relative, span

_SMALL = 4096
_LARGEST_WRITTEN = 2**20
_PRODUCTS = {"addcmul": "mul", "addcdiv": "div", "addmm": "mm", "baddbmm": "bmm"}


_Write = tuple[Value, range, Geometry]
"""A value that was written into a storage, the bytes that it spans, and its place."""


@dataclass
class _Storage:
    """One storage: its weak handle, its views, and the writes into it since they were bound."""

    keep: Any
    views: dict[Geometry, tuple[Value, int]] = field(default_factory=dict)
    writes: list[_Write] = field(default_factory=list)

    def written(self, since: int, tensor: Tensor) -> list[_Write]:
        """The writes from number `since` on that may have changed `tensor`."""
        own = span(tensor)
        return [write for write in self.writes[since:] if _overlap(write[1], own)]


class Recorder(TorchDispatchMode):
    """Writes the ops that run inside it into `graph`."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.graph = Graph()
        self.calls = ModuleCalls(model)
        self._storages: dict[int, _Storage] = {}
        for name, parameter in named_parameters(model):
            self._leaf(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self._leaf(buffer, "buffer", name)
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                self._leaf(tensor, "input", None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and record it."""
        kwargs = kwargs or {}
        read_args = map_arguments(Tensor, self._read, args)
        read_kwargs = map_arguments(Tensor, self._read, kwargs)
        result = func(*args, **kwargs)
        self._write(func, read_args, read_kwargs, args, kwargs, result)
        return result

    def note_outputs(self, result: Any) -> None:
        """Keep the values of the tensors that the model returned."""
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        self.graph.outputs = [self._read(t) for t in tensors]

    def note_dropout(self, tensor: Tensor, rate: float) -> None:
        """Keep the input, the rate and the module of a dropout."""
        self.graph.dropouts.append((self._read(tensor), float(rate), self.calls.current.path))

    def _write(
        self, func: Any, args: Any, kwargs: Any, real_args: Any, real_kwargs: dict[str, Any], result: Any
    ) -> None:
        inputs = tuple(v for v in tree_leaves((args, kwargs)) if isinstance(v, Value))
        name, base, mutable = op_identity(func)
        call = self.calls.current
        changed = changed_by(func, real_args, real_kwargs) if mutable else []
        op = Op(name, base, args, kwargs, inputs, call, call.count(name))
        op = self._unfuse(_simplified(op))
        self._append(op)
        outputs = outputs_of(result, changed)
        written = set(map(id, changed))
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, Tensor):
                self._bind(op, index, tensor, id(tensor) in written)
        if "." in base and op.outputs:
            op.outputs[0].looks_normed = which_norm(real_args, outputs[0])
            if op.outputs[0].looks_normed is None:
                self.graph.opaque.append(op)

    def _append(self, op: Op) -> None:
        self.graph.ops.append(op)
        for value in dict.fromkeys(op.inputs):
            value.users.append(op)

    def _unfuse(self, op: Op) -> Op:
        """Write addcmul(a, b, c), addcdiv and a residual addmm(a, b, c) as a product and an add."""
        is_residual = len(op.inputs) > 2 and (op.inputs[0].live or op.base in {"addcmul", "addcdiv"})
        if op.base not in _PRODUCTS or not is_residual:
            return op
        inner = Op(
            op.name, _PRODUCTS[op.base], op.args[1:3], {}, op.inputs[1:3], op.call, op.nth, virtual=True
        )
        self._append(inner)
        shape = op.inputs[0].shape
        if inner.base in {"mul", "div"}:
            shape = tuple(torch.broadcast_shapes(*(v.shape for v in inner.inputs)))
        term = self._value(inner, 0, shape, op.inputs[0].floating)
        factor = op.kwargs.get("value", op.kwargs.get("alpha", 1))
        op.base, op.args, op.inputs = "add", (op.inputs[0], term), (op.inputs[0], term)
        op.kwargs = {"alpha": factor, "beta": op.kwargs.get("beta", 1)}
        return op

    def _bind(self, op: Op, index: int, tensor: Tensor, written: bool) -> None:
        storage, fresh = self._storage(tensor)
        bound = storage.views.get(geometry(tensor))
        if not written and bound is not None and bound[1] == len(storage.writes):
            return  # detach, or a view that changes nothing: the same tensor
        value = self._value(op, index, tuple(tensor.shape), tensor.is_floating_point())
        if written:
            storage.writes.append((value, span(tensor), geometry(tensor)))
        if fresh or written:
            self.graph.written_bytes += tensor.numel() * tensor.element_size()
        storage.views[geometry(tensor)] = (value, len(storage.writes))
        if not value.live and not value.learnt:
            value.number = _number(tensor)
        if logits_in(op) is not None:
            value.causal, value.reach = _is_causal(tensor), _reach(tensor)

    def _value(self, op: Op, index: int, shape: tuple[int, ...], floating: bool) -> Value:
        value = Value(len(self.graph.values), op, index, shape, floating)
        value.live = any(v.live for v in op.inputs)
        value.learnt = any(v.learnt for v in op.inputs)
        self.graph.values.append(value)
        op.outputs.append(value)
        return value

    def _read(self, tensor: Tensor) -> Value:
        """The value a tensor holds now."""
        storage, _ = self._storage(tensor)
        place = geometry(tensor)
        bound = storage.views.get(place)
        if bound is None and not storage.views:
            return self._leaf(tensor, "constant", None)
        held, (old, since) = (place, bound) if bound is not None else next(iter(storage.views.items()))
        since = since if bound is not None else 0
        writes = storage.written(since, tensor)
        if bound is not None and not writes:
            return old
        op = self._alias(old, held, writes, tensor)
        value = self._value(op, 0, tuple(tensor.shape), tensor.is_floating_point())
        if not value.learnt and tensor.numel() <= _LARGEST_WRITTEN and _is_real(tensor):
            value.data = tensor.detach().clone()  # a mask that is written part by part
        storage.views[place] = (value, len(storage.writes))
        return value

    def _alias(self, old: Value, held: Geometry, writes: list[_Write], tensor: Tensor) -> Op:
        """A virtual op from the old value, whose place is `held`, and the writes over it.

        A full write hides the old value.
        """
        written = [(value, place) for value, _, place in writes]
        is_full = bool(writes) and writes[-1][1] == span(tensor) and written[-1][0].numel == tensor.numel()
        read = written[-1:] if is_full else [(old, held), *written]
        inputs = tuple(value for value, _ in read)
        places = relative([geometry(tensor), *(place for _, place in read)])
        base = "alias" if len(inputs) == 1 else "overwrite"
        kwargs = {"places": places}
        op = Op(f"virtual.{base}", base, inputs, kwargs, inputs, self.calls.current, 0, virtual=True)
        self._append(op)
        return op

    def _leaf(self, tensor: Tensor, origin: Origin, name: str | None) -> Value:
        shape, floating = tuple(tensor.shape), tensor.is_floating_point()
        value = Value(len(self.graph.values), None, 0, shape, floating, origin, name)
        value.live, value.learnt = origin == "input", origin == "parameter"
        value.data = tensor if _is_real(tensor) else None
        if origin in {"buffer", "constant"}:
            value.number = _number(tensor)
        self.graph.values.append(value)
        storage, _ = self._storage(tensor)
        storage.views.setdefault(geometry(tensor), (value, 0))
        return value

    def _storage(self, tensor: Tensor) -> tuple[_Storage, bool]:
        keep: Any
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and others without a storage
            key, keep = -id(tensor), tensor
        else:
            key, keep = storage._cdata, None
            if key not in self._storages:
                keep = StorageWeakRef(storage)
        if fresh := key not in self._storages:
            self._storages[key] = _Storage(keep)
        return self._storages[key], fresh


def _simplified(op: Op) -> Op:
    """The op with fewer inputs: x + 0 is x (Python's `sum` begins with 0), a copy hides the old value, and a
    tensor made like another does not depend on it.
    """
    if op.base in {"add", "sub"} and len(op.inputs) == 1 and op.args[1:2] in [(0,), (0.0,)]:
        op.base = "clone"
    elif op.base == "copy" and len(op.inputs) == 2:
        op.base = "clone" if op.inputs[0].shape == op.inputs[1].shape else "expand"
        op.inputs = op.inputs[1:]
    elif op.base.endswith("_like") or op.base.startswith("new_"):
        op.inputs = ()
    return op


_identities: dict[Any, tuple[str, str, bool]] = {}


def op_identity(func: Any) -> tuple[str, str, bool]:
    """Full name, base name, and whether the op writes into an argument."""
    if func not in _identities:
        if isinstance(func, torch._ops.OpOverload):
            mutable = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
            _identities[func] = (str(func), base_name(func), mutable)
        else:
            _identities[func] = (str(func), f"higher_order.{func}", False)
    return _identities[func]


def changed_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors among the arguments that an op writes into, by its schema."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    wrote = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves([given.get(name) for name in wrote]) if isinstance(t, Tensor)]


def outputs_of(result: Any, changed: list[Tensor]) -> list[Any]:
    """Leaves of an op's result; for one without a result (`_foreach_add_`), the arguments it changed."""
    return list(changed) if result is None else tree_leaves(result)


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _is_real(tensor: Tensor) -> bool:
    """True where its elements can be read: forward-mode AD has zero tensors without data."""
    return not (isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor._is_zerotensor())


def _number(tensor: Tensor) -> float | None:
    """The one value that all elements of a small real float tensor have."""
    if not 0 < tensor.numel() <= _SMALL or not _is_real(tensor) or not tensor.is_floating_point():
        return None
    low, high = tensor.detach().aminmax()
    return float(low) if bool(low == high) else None


def _is_causal(tensor: Tensor) -> bool | None:
    """True where a square attention gives later tokens no weight; None where that is unknown."""
    is_square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] > 1
    if not is_square or not _is_real(tensor):
        return None
    later = tensor.detach().triu(1)
    return None if bool(later.isnan().any()) else not bool(later.any())


def _reach(tensor: Tensor) -> tuple[int, int] | None:
    """Reach back and ahead of the diagonal of a square attention; None where that is unknown.

    Ahead is negative where no query but the first, which must see something, sees its own key.
    """
    if _is_causal(tensor) is None:
        return None
    weights = (tensor.detach() != 0).flatten(end_dim=-2).unflatten(0, (-1, tensor.shape[-2])).any(0)
    rows = weights.any(1).nonzero()[:, 0]
    if not len(rows):
        return None
    seen = weights[rows].to(torch.uint8)
    first, last = seen.argmax(1), tensor.shape[-1] - 1 - seen.flip(1).argmax(1)
    ahead = (last - rows)[rows > 0]
    is_strict = ahead.numel() and int(ahead.max()) < 0
    return max(int((rows - first).max()), 0), int(ahead.max() if is_strict else (last - rows).max())


@contextmanager
def _dropouts_noted(recorder: Recorder) -> Iterator[None]:
    """Note the input and the rate of every call of `torch.nn.functional.dropout`."""
    plain = nn.functional.dropout

    def noted(input: Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Tensor:
        recorder.note_dropout(input, p)
        return plain(input, p, *args, **kwargs)

    nn.functional.dropout = noted
    try:
        yield
    finally:
        nn.functional.dropout = plain


def record(model: nn.Module, run: Callable[[], Any], inputs: Any, with_dropouts: bool = False) -> Graph:
    """The graph of one `run()`, a forward of `model` on the tensors in `inputs`.

    Args:
        with_dropouts: note the calls of dropout too, for which PyTorch's function is replaced during the run.
    """
    recorder = Recorder(model, inputs)
    noting = _dropouts_noted(recorder) if with_dropouts else nullcontext()
    with recorder.calls.watching(), torch.enable_grad(), noting, recorder:
        result = run()
    recorder.note_outputs(result)
    return recorder.graph
