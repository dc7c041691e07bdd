"""Find the first wrong value of a step by running the step again.

A wrong value is NaN, infinity or finite garbage (|x| > 1e18). Searched in this order: the batch, the
optimizer's state of wrong parameters, parameters and buffers, all states, the ops of the forward, the loss,
the ops of the backward. The forward runs again from its own random state, so dropout draws the same; the
model is left as it was.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from normscope.anatomy.calls import ModuleCalls
from normscope.anatomy.names import named_modules, named_parameters
from normscope.anatomy.types import at_call
from normscope.monitor.row import GARBAGE
from normscope.monitor.wrong import held as held_by
from normscope.monitor.wrong import words
from normscope.monitor.wrong.causes import Cause, backward_cause, cause_of
from normscope.monitor.wrong.held import Held
from normscope.monitor.wrong.labels import Label, Labels
from normscope.monitor.wrong.source import entry, frames, line_of, source_line, users_frame
from normscope.monitor.wrong.types import Range, Replay, WrongValue, kind_of, range_of
from normscope.probes.births import Act, Birth, Births, Storages
from normscope.recording.calls import bare
from normscope.subjects.feed import tensors_of
from normscope.subjects.untouched import untouched

__all__ = ["Range", "Replay", "WrongValue", "first_wrong_value"]

HOOK = "gradient hook"
UNSEEN = "code that PyTorch does not see"


@entry
def first_wrong_value(replay: Replay) -> WrongValue | None:
    """The first wrong value of a step; None if running it again gives none."""
    model = bare(replay.model)
    found = (
        held_by.wrong_in_data(model, replay.args, replay.kwargs)
        or held_by.wrong_in_optimizers(model, replay.optimizers, of_wrong=True)
        or held_by.wrong_in_model(model)
        or held_by.wrong_in_optimizers(model, replay.optimizers)
    )
    if found:
        return _of_held(found, model, replay.is_updated)
    with untouched(model):
        return _Rerun(model, replay).first()


def _of_held(held: Held, model: nn.Module, is_updated: bool) -> WrongValue:
    cause, evidence = {
        "data": (f"{held.kind} in the batch", ""),
        "parameter": (f"{held.kind} in a parameter or buffer", ""),
        "optimizer state": ("optimizer state gone bad", ""),
    }[held.phase]
    if held.phase == "parameter" and held.kind == "garbage":
        cause = "parameter that exploded"
        if held.name in (sizes := held_by.exploded(model)):
            size, middle = sizes[held.name]
            evidence = f"Its RMS is {size:.3g}, the median of its kind {middle:.3g}."
    sentence = words.of_held(held, evidence, is_updated)
    return WrongValue(
        held.module, 0, "", "", "", held.phase, held.kind, held.name, cause, (held.range,), sentence
    )


class _Rerun:
    """A forward and a backward that run under the eyes of `Births`."""

    def __init__(self, model: nn.Module, replay: Replay) -> None:
        self._model, self._replay = model, replay
        self._calls = ModuleCalls(model)
        self._labels = Labels(self._calls)
        self._births = Births(self._calls, limit=GARBAGE, witness=self._witness)
        self._returned: list[Birth] = []  # behind what modules return, also where it reaches no output
        self._phase = "forward"
        self._node: Node | None = None
        self._modules = dict(named_modules(model))
        self._names: Storages[str] = Storages()
        self._exploded: dict[str, tuple[float, float]] | None = None
        for name, parameter in named_parameters(model):
            self._names.put(parameter, name)
        for name, _, buffer in held_by.named_buffers(model):
            self._names.put(buffer, name)
        for name, argument in held_by.arguments(model, replay.args, replay.kwargs):
            self._names.put(argument, name)

    def first(self) -> WrongValue | None:
        replay = self._replay
        with self._watching():
            result = self._forward()
        outputs = [t for t in tensors_of(result) if t.is_floating_point()]
        pairs = self._pairs(outputs)
        used = [output for output, cotangent in pairs if cotangent is not None] or outputs
        if (found := self._behind(used, masks=_is_wrong(replay.loss))) is not None:
            return found
        return (
            self._in_loss(result, outputs, pairs)
            or self._garbage()
            or self._in_backward(pairs)
            or (_of_birth(min(self._returned, key=lambda b: b.index)) if self._returned else None)
        )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            handles = [nn.Module.register_forward_hook(m, self._leave) for m in self._model.modules()]
            handles += [nn.Module.register_forward_pre_hook(m, self._enter) for m in self._model.modules()]
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(self._calls.watching())
            stack.enter_context(self._births)
            stack.enter_context(self._labels)
            yield

    @entry
    def _forward(self) -> Any:
        replay = self._replay
        if replay.put_random_state is not None:
            replay.put_random_state()
        with torch.autocast(self._device(), replay.autocast, enabled=replay.autocast is not None):
            return self._model(*replay.args, **replay.kwargs)

    def _device(self) -> str:
        return next((p.device.type for p in self._model.parameters()), "cpu")

    def _pairs(self, outputs: list[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Each output with its cotangent; that of a single number is 1 where none is known."""
        given = self._replay.cotangents
        if given is None:
            is_loss = [output.dim() == 0 and output.requires_grad for output in outputs]
            given = [
                torch.ones_like(o) if is_one else None for o, is_one in zip(outputs, is_loss, strict=True)
            ]
        if len(given) != len(outputs):
            raise ValueError(
                f"{len(given)} cotangents were given for an output of {len(outputs)} floating-point tensors; "
                "give one for each, or None"
            )
        inner = _behind_others([output for output, c in zip(outputs, given, strict=True) if c is not None])
        return [(o, None if id(o) in inner else c) for o, c in zip(outputs, given, strict=True)]

    def _behind(self, tensors: Sequence[Tensor], masks: bool) -> WrongValue | None:
        """The first birth behind one of the tensors; a mask's only if `masks`."""
        births = [
            self._births.origin(t) or self._births.first or self._births.given(t)
            for t in tensors
            if kind_of(t)
        ]
        found = [b for b in births if b is not None and (masks or not b.is_mask)]
        return _of_birth(min(found, key=lambda b: (b.is_mask, b.index))) if found else None

    def _in_loss(
        self, result: Any, outputs: list[Tensor], pairs: list[tuple[Tensor, Tensor | None]]
    ) -> WrongValue | None:
        loss = self._replay.loss
        kinds = [("the loss", kind_of(torch.as_tensor(loss)))] if loss is not None else []
        kinds += [("its gradient", kind_of(c)) for _, c in pairs if c is not None]
        wrong = [(what, kind) for what, kind in kinds if kind is not None]
        if not wrong:
            return None
        what, kind = wrong[0]
        if what != "the loss" and (hook := self._hook_at_outputs(pairs)) is not None:
            return hook
        if (traced := self._traced_loss(result, outputs)) is not None:
            return traced
        ranges = tuple(map(range_of, outputs))
        sentence = words.of_loss(kind, what == "its gradient", ranges)
        cause = f"{kind} in the loss" if what == "the loss" else f"{kind} in the loss's gradient"
        return WrongValue("", 0, "", "", "", "loss", kind, "", cause, ranges, sentence)

    def _traced_loss(self, result: Any, outputs: list[Tensor]) -> WrongValue | None:
        """The op of the loss, or of its backward, that made the wrong value."""
        if self._replay.loss_fn is None:
            return None
        self._phase = "loss"
        with self._watching():
            loss = self._loss(result)
            live = [output for output in outputs if output.requires_grad]
            gradients = self._gradients([(loss, torch.ones_like(loss))], live) if loss.requires_grad else ()
        return self._behind([loss], masks=True) or self._behind([g for g in gradients if g is not None], True)

    @entry
    def _loss(self, result: Any) -> Tensor:
        assert self._replay.loss_fn is not None
        dtype = self._replay.autocast
        with torch.autocast(self._device(), dtype, enabled=dtype is not None):
            return self._replay.loss_fn(result)

    def _hook_at_outputs(self, pairs: list[tuple[Tensor, Tensor | None]]) -> WrongValue | None:
        """A gradient hook of the output itself, which made the wrong cotangent out of a good one."""
        hooked = [
            (o, torch.ones_like(o)) for o, c in pairs if c is not None and kind_of(c) and o._backward_hooks
        ]
        found = self._in_backward(hooked)
        return found if found is not None and found.cause == HOOK else None

    def _in_backward(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> WrongValue | None:
        roots = [(output, c) for output, c in pairs if c is not None and output.requires_grad]
        weights: list[Tensor] = [p for p in self._model.parameters() if p.requires_grad]
        weights += [t for t in tensors_of((self._replay.args, dict(self._replay.kwargs))) if t.requires_grad]
        if not roots or not weights:
            return None
        self._phase = "backward"
        handles = []
        for node in self._labels.nodes:
            handles.append(node.register_prehook(partial(self._met, node)))
            handles.append(node.register_hook(partial(self._met, node)))
        try:
            with self._watching():
                gradients = self._gradients(roots, weights)
        finally:
            for handle in handles:
                handle.remove()
        found = [g for g in gradients if g is not None]
        return self._behind(found, masks=False) or self._garbage() or self._behind(found, masks=True)

    @entry
    def _gradients(
        self, roots: Sequence[tuple[Tensor, Tensor]], weights: list[Tensor]
    ) -> Sequence[Tensor | None]:
        outputs, cotangents = zip(*roots, strict=True)
        if not any(node.name() == "CheckpointFunctionBackward" for node in self._labels.nodes):
            return torch.autograd.grad(outputs, weights, cotangents, allow_unused=True)
        if not self._is_alone(weights):
            return ()
        torch.autograd.backward(outputs, cotangents)  # all that reentrant checkpoints allow
        return [weight.grad for weight in weights]  # `untouched` restores every .grad

    def _is_alone(self, weights: list[Tensor]) -> bool:
        """True where a whole backward reaches nothing but `.grad` of the model's parameters.

        An argument that requires grad has a graph behind it, of the caller. Hooks of DDP and of optimizers
        wait for gradients to be accumulated.
        """
        if any(t.requires_grad for t in tensors_of((self._replay.args, dict(self._replay.kwargs)))):
            return False
        waiting = any(weight._post_accumulate_grad_hooks for weight in weights)
        return bare(self._replay.model) is self._replay.model and not waiting

    def _garbage(self) -> WrongValue | None:
        """The first finite garbage: a norm may have hidden it from all that follows."""
        wrong = [b for b in self._births.all if b.kind == "garbage" and not b.is_mask and not b.is_memory]
        return _of_birth(wrong[0]) if wrong else None

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Label what a module is given, while the call around it is the running one."""
        self._labels.label(args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Meet what a module returns: code that PyTorch does not see may have made it."""
        self._labels.label(output)
        for tensor in tensors_of(output):
            birth = self._births.given(tensor) or self._births.origin(tensor)
            if birth is not None and not birth.is_mask:
                self._returned.append(birth)

    def _met(self, node: Node, gradients: Any, *_: Any) -> None:
        """Meet the gradients before and after a node, which a hook or code that is not seen may have made."""
        self._node = node
        for tensor in tensors_of(gradients):
            self._births.given(tensor)
        self._node = None

    def _witness(self, act: Act) -> dict[str, Any]:
        """All that `WrongValue` says about an op, besides its name and kind."""
        node = self._node or torch._C._current_autograd_node()
        if self._phase != "forward" and node is not None and self._calls.current.parent is None:
            label, op, cause = self._in_node(act, node)
        else:
            label = self._labels.here()
            op = label.function or act.name or UNSEEN
            cause = self._cause(act, label)
        inputs = tuple(range_of(t, self._name(t, label)) for t in act.tensors if t.is_floating_point())
        cause = self._by_explosion(inputs, act, cause)
        return {"label": label, "op": op, "phase": self._phase, "cause": cause, "inputs": inputs}

    def _name(self, tensor: Tensor, label: Label) -> str:
        """Name of a parameter, buffer or argument, also where autocast has cast it."""
        if (name := self._names.get(tensor)) is not None:
            return name
        module = self._modules.get(label.module)
        own = module.named_parameters(recurse=False) if module is not None else ()
        for key, value in own:
            for cast in (value.detach(), value.detach().mT if value.dim() == 2 else None):
                if (
                    cast is not None
                    and cast.shape == tensor.shape
                    and torch.equal(cast.to(tensor.dtype), tensor)
                ):
                    return f"{label.module}.{key}".lstrip(".")
        return ""

    def _cause(self, act: Act, label: Label) -> Cause | None:
        if not act.func:
            return UNSEEN, "a hook, or a function outside of PyTorch, made it"
        owner = type(self._modules.get(label.module)).__name__
        return cause_of(act, f"{owner} {label.function}")

    def _in_node(self, act: Act, node: Node) -> tuple[Label, str, Cause | None]:
        known = self._labels.of(node)
        made = known or Label("", 0, "", "")
        function = made.function or node.name().removesuffix("Backward0").lower()
        own = getattr(node, "_forward_cls", None)
        if own is not None and (not act.func or _is_running(own.backward)):
            source = source_line() if act.func else made.source
            label = Label(made.module, made.call, own.__name__, source)
            evidence = f"the backward of {own.__name__} gets good gradients"
            return label, f"{own.__name__}.backward", (f"wrong backward of {own.__name__}", evidence)
        frame = users_frame()
        if frame is not None or not act.func:
            source = line_of(frame) if frame is not None else made.source
            label = Label(made.module, made.call, function, source)
            evidence = f"it changes the gradient of the result of {_short(function)}"
            return label, "a gradient hook", (HOOK, evidence)
        return made, f"backward of {_short(function)}", backward_cause(act, function)

    def _by_explosion(self, inputs: Sequence[Range], act: Act, cause: Cause | None) -> Cause | None:
        """The cause, or a parameter among the op's inputs that is far larger than those of its kind."""
        if act.kind == "NaN" or self._phase == "backward":
            return cause
        if self._exploded is None:
            with torch.utils._python_dispatch._disable_current_modes():
                self._exploded = held_by.exploded(self._model)
        for each in inputs:
            if each.name in self._exploded:
                size, middle = self._exploded[each.name]
                return (
                    "parameter that exploded",
                    f"the RMS of {each.name} is {size:.3g}, the median of its kind {middle:.3g}",
                )
        return cause


def _behind_others(outputs: Sequence[Tensor]) -> set[int]:
    """Outputs that others are computed from, such as the logits beside a loss: their gradient flows there."""
    nodes = {id(o): o.grad_fn for o in outputs if o.grad_fn is not None}
    left = [each for node in nodes.values() for each, _ in node.next_functions]
    seen: set[Node] = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [each for each, _ in node.next_functions]
    return {own for own, node in nodes.items() if node in seen}


def _of_birth(birth: Birth) -> WrongValue:
    detail = birth.detail
    label, cause = detail["label"], detail["cause"] or ("", "")
    sentence = words.of_op(
        kind=birth.kind,
        phase=detail["phase"],
        op=_short(detail["op"]),
        site=at_call(label.module, label.call),
        source=label.source,
        cause=cause[0],
        evidence=cause[1],
        inputs=detail["inputs"],
    )
    return WrongValue(
        label.module,
        label.call,
        detail["op"],
        birth.op,
        label.source,
        detail["phase"],
        birth.kind,
        "",
        cause[0],
        detail["inputs"],
        sentence,
    )


def _is_running(function: Callable[..., Any]) -> bool:
    code = inspect.unwrap(function).__code__
    return any(frame.f_code is code for frame in frames())


def _short(function: str) -> str:
    """Name of a function without its modules."""
    return function if " " in function else function.removeprefix("torch.").removeprefix("nn.functional.")


def _is_wrong(loss: Tensor | float | None) -> bool:
    return loss is not None and kind_of(torch.as_tensor(loss)) is not None
