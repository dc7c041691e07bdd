"""Replica: a copy of a sharded model's modules without FSDP, which one process can run alone.

Its weights have the shapes of the whole ones. They are random, or where they would be large, fake tensors
without memory. The classes of FSDP are known by their names, because their import takes time.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook

from normscope.capture.alone import CommunicationError

FSDP1, FSDP2 = "FullyShardedDataParallel", "FSDPModule"
MOST_BYTES = 256 * 2**20
"""Size of the whole weights up to which a replica has some."""
_LEFT_OUT = ("torch.distributed", "normscope.")
"""Modules whose hooks a replica lacks."""


@dataclass(frozen=True)
class _Whole:
    """A parameter before it was sharded; `key` is that of each tied name."""

    key: object
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


Wholes = dict[tuple[int, str], _Whole]
"""Parameters by the module that owns them and their name there."""


def replica_of(model: nn.Module, parameters: Wholes) -> tuple[nn.Module, FakeTensorMode | None]:
    """The replica, and the mode of its weights if they are fake.

    Plain attributes are shared with the model, but modules in them are copies too.

    Args:
        parameters: `wholes` of the model, taken outside of a forward, in which FSDP2 casts them.
    """
    sizes = {each.key: math.prod(each.shape) * each.dtype.itemsize for each in parameters.values()}
    mode = FakeTensorMode(allow_non_fake_inputs=True) if sum(sizes.values()) > MOST_BYTES else None
    return _Copies(parameters, mode).of(model), mode


def handles(model: nn.Module) -> list[Any]:
    """Handles of the flat parameters of FSDP1."""
    wrappers: list[Any] = [each for each in model.modules() if is_a(each, FSDP1)]
    return [each._handle for each in wrappers if each._handle is not None]


def own_class(module: nn.Module) -> type:
    """The class of a module as it was before FSDP."""
    if is_a(module, FSDP1):
        return own_class(module.get_submodule("_fsdp_wrapped_module"))
    return type(module).__mro__[2] if is_a(module, FSDP2) else type(module)


def is_a(module: nn.Module, name: str) -> bool:
    """Whether a class of this name is among those of the module."""
    return any(each.__name__ == name for each in type(module).__mro__)


def cast_of(model: nn.Module) -> torch.dtype | None:
    """The dtype to which FSDP casts the weights, and the arguments of the forward; None if it casts none."""
    for module in model.modules():
        if is_a(module, FSDP1):
            policy: Any = getattr(module, "mixed_precision", None)
        else:
            policy = module._get_fsdp_state()._mp_policy if is_a(module, FSDP2) else None  # type: ignore[operator]
        dtype: torch.dtype | None = getattr(policy, "param_dtype", None)
        if dtype is not None:
            return dtype
    return None


def wholes(model: nn.Module) -> Wholes:
    """The whole parameters of a model."""
    found: Wholes = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                found[id(module), name] = _Whole(id(p), p.shape, p.dtype, p.device, p.requires_grad)
    for handle in handles(model):
        flat = handle.flat_param
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
            key = id(info.module), info.param_name
            found[key] = _Whole(key, shape, flat.dtype, flat.device, flat.requires_grad)
        for info in flat._shared_param_infos:
            first = found[id(info.prim_module), info.prim_param_name]
            found[id(info.module), info.param_name] = first
    return found


class _Copies:
    """Copies of modules, each made once.

    Args:
        parameters: see `wholes`.
        mode: the mode in which parameters and buffers are made; None makes real ones.
    """

    def __init__(self, parameters: Wholes, mode: FakeTensorMode | None) -> None:
        self._parameters, self._mode = parameters, mode
        self._modules: dict[int, nn.Module] = {}
        self._made: dict[object, nn.Parameter] = {}
        self._seed = 0

    def of(self, module: nn.Module) -> nn.Module:
        """The copy of a module, of a wrapper of FSDP1 that of what it wraps."""
        if is_a(module, FSDP1):
            return self.of(module.get_submodule("_fsdp_wrapped_module"))
        if id(module) not in self._modules:
            self._modules[id(module)] = object.__new__(own_class(module))
            self._fill(module)
        return self._modules[id(module)]

    def _fill(self, module: nn.Module) -> None:
        copy = self._modules[id(module)]
        owned = {name: whole for (owner, name), whole in self._parameters.items() if owner == id(module)}
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                kept = [(key, hook) for key, hook in value.items() if not _is_left_out(hook)]
                vars(copy)[name] = type(value)(kept)
            elif name not in owned:  # FSDP1 keeps views of its flat parameter there
                vars(copy)[name] = self._copied(value)
        copy._parameters = {
            name: self._parameter(owned[name]) if name in owned else None
            for name in dict.fromkeys(
                [*(name for name in module._parameters if name != "_flat_param"), *owned]
            )
        }
        copy._buffers = {name: self._buffer(value) for name, value in module._buffers.items()}
        copy._modules = {
            name: None if child is None else self.of(child) for name, child in module._modules.items()
        }

    def _copied(self, value: Any) -> Any:
        """A plain attribute: a copy where it holds modules, a shallow one of a container."""
        if isinstance(value, nn.Module):
            return self.of(value)
        if type(value) in (list, tuple, set):
            return type(value)(map(self._copied, value))
        if type(value) is dict:
            return {key: self._copied(each) for key, each in value.items()}
        return value

    def _parameter(self, whole: _Whole) -> nn.Parameter:
        if whole.key not in self._made:
            if self._mode is not None:
                with self._mode:
                    tensor = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
            else:
                generator = torch.Generator(whole.device).manual_seed(len(self._made))
                tensor = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
                tensor.normal_(std=0.02, generator=generator)
            self._made[whole.key] = nn.Parameter(tensor, requires_grad=whole.requires_grad)
        return self._made[whole.key]

    def _buffer(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        return buffer.detach().clone() if self._mode is None else self._mode.from_tensor(buffer)


def _is_left_out(hook: Callable[..., Any]) -> bool:
    function = getattr(hook, "__wrapped__", hook)
    names = (
        getattr(each, "__module__", None) or "" for each in (hook, function, getattr(hook, "__self__", hook))
    )
    return any(name.startswith(_LEFT_OUT) for name in names)


@contextmanager
def never_called(model: nn.Module) -> Iterator[None]:
    """Context in which a call of a module of `model` raises CommunicationError before FSDP's hooks run."""
    own = frozenset(map(id, model.modules()))

    def refuse(module: nn.Module, args: Any) -> None:
        if id(module) in own:
            raise CommunicationError(f"a part of it is reached from outside, {type(module).__name__}")

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
