"""Call a user's function so that its Jacobian can be measured, and restore all state.

- Random generators start from the same state each time, so dropout has one mask. The caller's state is
  restored.
- Parameters do not require grad while the graph is made: nothing is saved for a weight's gradient.
- Attention runs under the math backend: the fused kernels have no double backward.
- Buffers of a module, and of modules that a function calls, are copied for each call: batch statistics and
  spectral norms' vectors do not change.
- A module in half precision is measured in a float32 copy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook

from normscope.linalg.graph import leaves

HALF = (torch.bfloat16, torch.float16)


class MeasuredFunction:
    """The function f in the state in which it is measured.

    Args:
        f: a module, or any function of one tensor.
        x: the point; where it is in half precision, f must be a module.

    Attributes:
        x: the point, detached, in the precision of the measurement.
        note: changes that were made, or "".

    Raises:
        TypeError: x is not a tensor.
        ValueError: x is not floating-point, has no elements, or is in half precision while f is no module.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor) -> None:
        require_point("x", x)
        self._f, self.x, self.note = f, x.detach(), ""
        held = {t.dtype for t in f.parameters()} | {x.dtype} if isinstance(f, nn.Module) else set()
        if isinstance(f, nn.Module) and held & set(HALF):
            self._f, self.x = deepcopy(f).float(), self.x.float()
            self.note = f"measured in a float32 copy of the {_names(held & set(HALF))} module"
        elif x.dtype in HALF:
            raise ValueError(
                f"x of dtype {x.dtype} for a function that is not a module and cannot be copied to float32: "
                "expected float32 or float64, and f in the same precision"
            )
        self._devices = [x.device] if x.is_cuda else []
        self._states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self._devices]

    def __call__(self, x: Tensor) -> Tensor:
        """f(x) with the generators' state at construction; their state before the call is restored."""
        with copied_buffers(self._f), torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            y: Any = self._f(x)
        if not isinstance(y, Tensor) or not y.is_floating_point():
            kind = f"a tensor of dtype {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"f returned {kind}: expected a floating-point tensor")
        if not y.numel():
            raise ValueError(f"f returned a tensor of shape {tuple(y.shape)}: expected at least one element")
        return y

    def with_graph(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(f(x), x) with the graph between them, and nothing saved for other gradients.

        Where f closes over parameters, a second forward runs: only the graph of the first shows them.
        """
        known: list[Tensor] = list(self._f.parameters()) if isinstance(self._f, nn.Module) else []
        y, inputs = self._graph(x, known)
        others = [leaf for leaf in leaves(y) if leaf is not inputs]
        return self._graph(x, known + others) if others else (y, inputs)

    def _graph(self, x: Tensor, off: list[Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), held_off(off), math_attention():
            inputs = x.detach().clone().requires_grad_()
            try:
                return self(inputs), inputs
            except RuntimeError as error:
                if "a leaf Variable that requires grad" not in str(error):
                    raise
                raise ValueError(
                    "f writes into x: expected a function that leaves it as it is (lambda x: f(x.clone()))"
                ) from error


def require_point(name: str, x: Any) -> None:
    """Check that a point is a floating-point tensor with elements.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not floating, or empty.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} of type {type(x).__name__}: expected a floating-point tensor")
    if not x.is_floating_point():
        raise ValueError(f"{name} of dtype {x.dtype}: expected a floating-point tensor")
    if not x.numel():
        raise ValueError(f"{name} of shape {tuple(x.shape)}: expected at least one element")


@contextmanager
def copied_buffers(f: Callable[..., Any]) -> Iterator[None]:
    """Let modules work on copies of their buffers inside; afterwards they have their own again, unchanged.

    The modules are f's where f is a module, else every module called inside. Their own buffers are never
    written, because a graph may hold them.
    """
    own: dict[nn.Module, dict[str, Tensor | None]] = {}
    copies: dict[int, Tensor] = {}  # a buffer that two modules share stays shared

    def enter(module: nn.Module, _: Any = None) -> None:
        if torch.compiler.is_compiling():  # the module around the compiled region was entered before
            return
        for part in module.modules():
            if part not in own:
                own[part] = dict(part._buffers)
                for name, buffer in own[part].items():
                    if buffer is not None:
                        part._buffers[name] = copies.setdefault(id(buffer), buffer.clone())

    hook = nullcontext() if isinstance(f, nn.Module) else register_module_forward_pre_hook(enter)
    try:
        if isinstance(f, nn.Module):
            enter(f)
        with hook:
            yield
    finally:
        for part, buffers in own.items():
            part._buffers.clear()
            part._buffers.update(buffers)


@contextmanager
def held_off(tensors: list[Tensor]) -> Iterator[None]:
    """Turn `requires_grad` of the tensors off inside, and restore it afterwards."""
    on = [tensor for tensor in tensors if tensor.requires_grad]
    try:
        for tensor in on:
            tensor.requires_grad_(False)
        yield
    finally:
        for tensor in on:
            tensor.requires_grad_()


def math_attention() -> Any:
    """Select attention with double backward and forward mode; no effect inside a compiled region."""
    return nullcontext() if torch.compiler.is_compiling() else sdpa_kernel(SDPBackend.MATH)


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
