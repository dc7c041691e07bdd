"""Events of a training script: calls of its outermost modules, its backwards, the steps of its optimizers.

PyTorch's global hooks see every module and optimizer without a change to the script. PyTorch has no hook for
a backward, for clipping and for loss scaling: those functions are wrapped.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_TRANSPARENT = {
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "_FabricModule",
    "DeepSpeedEngine",
}
"""Classes whose call hands on to a module inside; that one counts as the outermost."""


class Listener(Protocol):
    """Receiver of the events."""

    def begins(self, module: nn.Module) -> None:
        """An outermost module is about to run with gradients."""

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An outermost module has run with gradients."""

    def differentiates(self, loss: Tensor) -> None:
        """A backward from `loss` is about to run."""

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; with a closure, after its first call."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def clears(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of `parameters` are about to be set to zero."""

    def skipped(self, optimizer: Optimizer) -> None:
        """A loss scaler has skipped the step of an optimizer, because a gradient is not finite."""

    def scales(self, scaler: GradScaler) -> None:
        """A loss is about to be scaled."""

    def clips(self, norm: float) -> None:
        """Gradients are about to be clipped to `norm`."""


class Silent:
    """Listener that does nothing; a base for those that need few events."""

    def begins(self, module: nn.Module) -> None: ...
    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None: ...
    def differentiates(self, loss: Tensor) -> None: ...
    def steps(self, optimizer: Optimizer) -> None: ...
    def stepped(self, optimizer: Optimizer) -> None: ...
    def clears(self, parameters: Iterable[Tensor]) -> None: ...
    def skipped(self, optimizer: Optimizer) -> None: ...
    def scales(self, scaler: GradScaler) -> None: ...
    def clips(self, norm: float) -> None: ...


class _Running(threading.local):
    """State of one thread.

    Attributes:
        outermost, inside: the outermost module that runs in this thread, and the number of modules that run
            inside it.
        is_muted: whether nothing is sent from this thread.
    """

    outermost: nn.Module | None = None
    inside: int = 0
    is_muted: bool = False


class Events:
    """Sends the events of all threads to a listener, from `attach` on.

    Attributes:
        optimizers, schedulers: the ones that were built since, in order.
        autocast: dtype of autocast in the last call of an outermost module; None without autocast.
    """

    def __init__(self, listener: Listener) -> None:
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self.schedulers: weakref.WeakKeyDictionary[LRScheduler, None] = weakref.WeakKeyDictionary()
        self.autocast: torch.dtype | None = None
        self._listener = listener
        self._running = _Running()
        self._is_paused = False

    def attach(self) -> ExitStack:
        """Begin to send; close the result to end."""
        held = ExitStack()
        for handle in (
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._steps),
            register_optimizer_step_post_hook(self._stepped),
        ):
            held.callback(handle.remove)
            # PyTorch leaves this mark of a removed hook, for which it warns whoever compiles a module.
            held.callback(module_hooks._global_forward_hooks_with_kwargs.pop, handle.id, None)
        clipping = torch.nn.utils.clip_grad
        for owner, name, wrapper in (
            (torch.autograd, "backward", self._backward),
            (Optimizer, "zero_grad", self._clear),
            (nn.Module, "zero_grad", self._clear),
            (Optimizer, "__init__", functools.partial(_built, self.optimizers)),
            (LRScheduler, "__init__", functools.partial(_built, self.schedulers)),
            (GradScaler, "scale", self._scale),
            (GradScaler, "step", self._scaler_step),
            (nn.Module, "compile", self._compile),
            (clipping, "clip_grad_norm_", self._clip),
            (torch.nn.utils, "clip_grad_norm_", self._clip),
            (torch.nn.utils, "clip_grads_with_norm_", self._clip),
        ):
            original = getattr(owner, name)
            setattr(owner, name, _wrapped(original, wrapper))
            held.callback(setattr, owner, name, original)
        return held

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Context in which nothing is sent from this thread."""
        running = self._running
        before, running.is_muted = running.is_muted, True
        try:
            yield
        finally:
            running.is_muted = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which no thread sends what begins in it: the modules that run are normscope's own work.

        Trials of copies run in a thread of their own, and so may parts of a model. One thread at a time may
        be in this context.
        """
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def forked(self) -> None:
        """This process was forked from one that sends events, perhaps while it was muted or paused."""
        self._is_paused = self._running.is_muted = False

    @property
    def _is_silent(self) -> bool:
        return self._is_paused or self._running.is_muted

    def _enters(self, module: nn.Module, args: Any) -> None:
        running = self._running
        if torch.compiler.is_compiling() or running.is_muted:
            return  # a compiler only traces the call
        if running.outermost is not None:
            running.inside += 1
            if running.inside == 1:
                self._note_autocast()
        elif not (self._is_paused or _in_backward() or _is_transparent(module)):
            running.outermost = module
            self.autocast = None
            self._note_autocast()
            if torch.is_grad_enabled():
                self._listener.begins(module)

    def _leaves(self, module: nn.Module, args: Any, *more: Any) -> None:
        """The end of a call; `more` is (kwargs, output), and only (output,) where the forward raised."""
        running = self._running
        if torch.compiler.is_compiling() or running.is_muted or running.outermost is None:
            return
        if running.inside:
            running.inside -= 1
            return
        kwargs, output = more if len(more) == 2 else ({}, None)
        running.outermost = None
        if output is not None and torch.is_grad_enabled():
            self._listener.called(module, args, kwargs, output)

    def _note_autocast(self) -> None:
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                self.autocast = torch.get_autocast_dtype(device)

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._is_silent:
            return None
        given = [*args[1:2], kwargs.get("closure")]
        closure = next((each for each in given if callable(each)), None)
        if closure is None:
            self._listener.steps(optimizer)
            return None
        num_calls = 0

        def called(*inputs: Any, **keywords: Any) -> Any:
            """The closure; only its first call is the step's forward and backward, later ones search."""
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                with self.muted():
                    return closure(*inputs, **keywords)
            loss = closure(*inputs, **keywords)
            self._listener.steps(optimizer)
            return loss

        return tuple(called if each is closure else each for each in args), {
            name: called if each is closure else each for name, each in kwargs.items()
        }

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_silent:
            self._listener.stepped(optimizer)

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if isinstance(loss, Tensor) and not _in_backward() and not self._is_silent:
            self._listener.differentiates(loss)
        return original(tensors, *args, **kwargs)

    def _clear(self, original: Callable[..., Any], holder: Any, *args: Any, **kwargs: Any) -> Any:
        groups = [list(holder.parameters())] if isinstance(holder, nn.Module) else []
        groups += [group["params"] for group in getattr(holder, "param_groups", ())]
        if not self._is_silent:
            self._listener.clears(itertools.chain(*groups))
        # A mode would see the `.grad` of every parameter, which slows the steps of small models.
        is_plain = all(type(parameter) is nn.Parameter for parameter in itertools.chain(*groups))
        with torch._C.DisableTorchFunction() if is_plain else nullcontext():
            return original(holder, *args, **kwargs)

    def _scale(self, original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not self._is_silent and scaler.is_enabled():
            self._listener.scales(scaler)
        return original(scaler, *args, **kwargs)

    def _scaler_step(
        self, original: Callable[..., Any], scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_silent:
            return original(scaler, optimizer, *args, **kwargs)
        if _skips_by_itself(scaler, optimizer):
            with self.muted():
                result = original(scaler, optimizer, *args, **kwargs)
            self._listener.skipped(optimizer)
            return result
        stepped: list[int] = []
        handle = register_optimizer_step_pre_hook(lambda *_: stepped.append(threading.get_ident()))
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            handle.remove()
        if threading.get_ident() not in stepped:
            self._listener.skipped(optimizer)
        return result

    def _compile(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """`module.compile()` replaces the call that runs the hooks; let it run ours outside compiled code."""
        original(module, *args, **kwargs)
        compiled = module._compiled_call_impl
        assert compiled is not None

        def call(*inputs: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*inputs, **keywords)
            self._enters(module, inputs)
            output = None
            try:
                output = compiled(*inputs, **keywords)
            finally:
                self._leaves(module, inputs, keywords, output)
            return output

        module._compiled_call_impl = call

    def _clip(
        self, original: Callable[..., Any], parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_silent:
            self._listener.clips(float(max_norm))
        return original(parameters, max_norm, *args, **kwargs)


def _in_backward() -> bool:
    """Whether autograd runs a backward in this thread.

    On a CPU this is the thread that called it. On a GPU it is a thread of the device, and the blocks of
    activation checkpointing run again there. Other threads may run the script's forwards meanwhile.
    """
    return torch._C._current_graph_task_id() != -1


def _skips_by_itself(scaler: GradScaler, optimizer: Any) -> bool:
    """Whether the next `step` of a fused optimizer changes nothing, as a gradient is not finite.

    A scaler calls `step` of other optimizers only where all gradients are finite.
    """
    if not scaler.is_enabled() or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    state: Any = scaler._per_optimizer_states[id(optimizer)]
    found = state["found_inf_per_device"] or scaler._check_inf_per_device(optimizer)
    return any(bool(each.item()) for each in found.values())


def _is_transparent(module: nn.Module) -> bool:
    names = {each.__name__ for each in type(module).__mro__}
    redirected = "LightningModule" in names and "forward" in vars(module)  # to its training_step
    return redirected or not _TRANSPARENT.isdisjoint(names)


def _built(
    known: "weakref.WeakKeyDictionary[Any, None]",
    original: Callable[..., Any],
    made: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    original(made, *args, **kwargs)
    known[made] = None


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return call
