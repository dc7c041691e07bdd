"""Births of wrong values: which op made a NaN, an infinity or an enormous number out of good inputs."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.anatomy.calls import ModuleCalls
from normscope.anatomy.types import at_call
from normscope.probes.sums import extremes, stored

FILLS = {
    "full",
    "full_like",
    "fill",
    "masked_fill",
    "where",
    "scalar_tensor",
    "lift_fresh",
    "lift_fresh_copy",
}
"""Ops that write the -inf of an attention mask on purpose."""

ROUNDINGS = {"add", "_to_copy", "copy"}
"""Ops that turn a mask's lowest number into -inf by rounding; this is not a fault either."""

EMPTIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Ops whose output holds whatever the memory held."""

OVERWRITERS = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "set_"}
"""Ops that do not read the tensor that they write."""

Value = TypeVar("Value")


class Storages(Generic[Value]):
    """Mapping from a tensor's memory to a value: views and detached tensors share it."""

    def __init__(self) -> None:
        # The weak reference keeps the address of a freed storage from being given to another one.
        self._values: dict[StorageWeakRef, Value] = {}

    def get(self, tensor: Tensor) -> Value | None:
        """The value of the tensor's memory; None without one, and where a tensor has no memory of its own."""
        key = self._key(tensor)
        return None if key is None else self._values.get(key)

    def put(self, tensor: Tensor, value: Value) -> None:
        """Set the value of the tensor's memory."""
        key = self._key(tensor)
        if key is not None:
            self._values[key] = value

    def drop(self, tensor: Tensor) -> None:
        """Forget the tensor's memory if the tensor covers all of it."""
        key = self._key(tensor)
        if (
            key in self._values
            and tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
        ):
            del self._values[key]

    @staticmethod
    def _key(tensor: Tensor) -> StorageWeakRef | None:
        try:
            return StorageWeakRef(stored(tensor).untyped_storage())
        except (NotImplementedError, RuntimeError):  # functional or wrapper tensors
            return None


@dataclass(frozen=True, eq=False)
class Birth:
    """An op that made a wrong value out of good ones.

    Attributes:
        index: number of births before it.
        module: path of the innermost running module, with its call; "" outside of any.
        op: the ATen overload.
        kind: "NaN", "infinity" or "garbage" (finite, above the limit).
        is_mask: whether it is the -inf of a mask, which is not a fault.
        is_given: whether no op made it: the op reads a tensor that holds it.
        detail: result of the witness.
    """

    index: int
    module: str
    op: str
    kind: str
    is_mask: bool
    is_given: bool = False
    detail: Any = None

    @property
    def is_memory(self) -> bool:
        """True where it is uninitialised memory, which may be overwritten before it matters."""
        return self.is_given and "empty" in self.op


@dataclass(frozen=True)
class Act:
    """One run of an op, with its inputs as they were before it.

    Attributes:
        func: the ATen overload.
        args, kwargs: the arguments; tensors that the op writes are copies from before it.
        output: the tensor with the wrong value.
        kind: the kind of wrong value.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    kind: str

    @property
    def name(self) -> str:
        """The op's name without its namespace and overload, such as "softmax"."""
        return _name(self.func)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return list(_tensors((self.args, self.kwargs)))


class Births(TorchDispatchMode):
    """Examines the output of every op, and traces wrong values to the op that made them first.

    Args:
        calls: the running module calls, see `ModuleCalls.watching`.
        limit: finite values above it count as wrong ("garbage").
        witness: called at a birth; its result is `Birth.detail`.

    Attributes:
        all: births in order, with those of masks.
        first: the first birth that is not a mask's.
    """

    supports_higher_order_operators = True

    def __init__(
        self, calls: ModuleCalls, *, limit: float = math.inf, witness: Callable[[Act], Any] | None = None
    ) -> None:
        super().__init__()
        self.calls = calls
        self.all: list[Birth] = []
        self.first: Birth | None = None
        self._limit, self._witness = limit, witness
        self._origins: Storages[Birth] = Storages()
        self._empty: Storages[Birth] = Storages()

    def origin(self, tensor: Tensor) -> Birth | None:
        """The birth behind a tensor with a wrong value; None without one, and if its origin is unknown."""
        with _disable_current_modes():
            return self._origins.get(tensor) if self.kind(tensor) is not None else None

    def kind(self, tensor: Tensor) -> str | None:
        """The kind of wrong value that the tensor holds, if any."""
        return wrong_kind(tensor, self._limit)

    def given(self, tensor: Tensor, act: Act | None = None) -> Birth | None:
        """Note the birth of a wrong value that no op made, where it is met first; None for other tensors."""
        with _disable_current_modes():
            kind = self.kind(tensor)
            if kind is None or self._origins.get(tensor) is not None:
                return None
            is_mask = kind != "NaN" and is_negative(tensor, self._limit)
            birth = self._birth(act or Act("", (), {}, tensor, kind), is_mask, is_given=True)
            self._origins.put(tensor, birth)
            return birth

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = _before(func, args, kwargs := kwargs or {})
        origins = [origin for t, old in before if (origin := self._origin_of(t, old)) is not None]
        copies = {id(t): old for t, old in before}
        result = func(*args, **kwargs)
        for output in tree_leaves(result):
            if not isinstance(output, Tensor) or not output.numel():
                continue
            if _name(func) in EMPTIES:
                self._empty.put(output, self._unlisted(Act(func, args, kwargs, output, "garbage")))
            elif (kind := self.kind(output)) is None:
                self._origins.drop(output)
            else:
                old_args, old_kwargs = tree_map_only(Tensor, lambda t: copies.get(id(t), t), (args, kwargs))
                self._found(
                    Act(func, old_args, old_kwargs, output, kind), origins, [old for _, old in before]
                )
        return result

    def _origin_of(self, tensor: Tensor, old: Tensor) -> Birth | None:
        origin = self._origins.get(tensor)
        return origin if origin is not None and self.kind(old) is not None else None

    def _found(self, act: Act, origins: list[Birth], inputs: list[Tensor]) -> None:
        faults = [birth for birth in origins if not birth.is_mask]
        if not faults:
            given = [birth for t in inputs if (birth := self._given_to(t, act)) is not None]
            faults, origins = [b for b in given if not b.is_mask], [*origins, *given]
        if faults:
            origin = min(faults, key=lambda birth: birth.index)
        elif origins and act.kind != "NaN":
            origin = origins[0]
        else:  # out of good inputs, or NaN out of a mask's -inf
            origin = self._birth(act, act.kind != "NaN" and self._is_mask(act))
        self._origins.put(act.output, origin)

    def _given_to(self, tensor: Tensor, act: Act) -> Birth | None:
        if self.kind(tensor) is None or self._origins.get(tensor) is not None:
            return None
        empty = self._empty.get(tensor)
        if empty is None:
            return self.given(tensor, Act(act.func, act.args, act.kwargs, tensor, self.kind(tensor) or ""))
        if empty not in self.all:
            self._list(empty)
        return empty

    def _is_mask(self, act: Act) -> bool:
        return is_negative(act.output, self._limit) and _is_written(act, self._limit)

    def _birth(self, act: Act, is_mask: bool, is_given: bool = False) -> Birth:
        detail = self._witness(act) if self._witness is not None else None
        birth = Birth(
            len(self.all), self._module(), str(act.func), act.kind, is_mask, is_given=is_given, detail=detail
        )
        self._list(birth)
        return birth

    def _unlisted(self, act: Act) -> Birth:
        """The birth of uninitialised memory, which is a fault only if it is read."""
        detail = self._witness(act) if self._witness is not None else None
        return Birth(len(self.all), self._module(), str(act.func), act.kind, False, True, detail)

    def _list(self, birth: Birth) -> None:
        self.all.append(birth)
        if not birth.is_mask and self.first is None:
            self.first = birth

    def _module(self) -> str:
        call = self.calls.current
        return at_call(call.path, max(call.nth, 0))


def wrong_kind(tensor: Tensor, limit: float = math.inf) -> str | None:
    """ "NaN", "infinity", or "garbage" where a finite |x| exceeds `limit`; None if all values are good."""
    tensor = tensor.detach()
    tensor = stored(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel() or tensor.layout != torch.strided:
        return None
    low, high = (float(edge) for edge in extremes(tensor))
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    largest = max(-low, high)
    if math.isinf(largest):
        return "infinity"
    return "garbage" if largest > limit else None


def is_negative(tensor: Tensor, limit: float = math.inf) -> bool:
    """True where all wrong values of a tensor without NaN are negative, as those of an attention mask are."""
    high = float(extremes(tensor)[1])
    return high <= limit and high != math.inf


def _is_written(act: Act, limit: float) -> bool:
    """True where the op writes a mask's wrong values on purpose, or rounds a mask's lowest number to -inf."""
    name = act.name.rstrip("_")
    floats = [t for t in act.tensors if t.is_floating_point() and t.numel()]
    lowest = any(float(extremes(t)[0]) <= 0.99 * torch.finfo(t.dtype).min for t in floats)
    scalars = [x for x in tree_leaves((act.args, act.kwargs)) if isinstance(x, float)]
    by_constant = act.kind == "garbage" and any(abs(x) > limit for x in scalars)
    return name in FILLS or (name in ROUNDINGS and lowest) or by_constant


def _name(func: Any) -> str:
    return func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _before(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Tensors that the op reads, each with itself, or with a copy if the op will write it."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return [(t, t) for t in _tensors((args, kwargs))]
    read = []
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and (argument.is_out or _name(func) in OVERWRITERS):
            continue
        read += [(t, t.detach().clone() if is_written else t) for t in _tensors(value)]
    return read
