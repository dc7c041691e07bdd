"""Tape: the calls of PyTorch's functions between a model's output and its loss, which can be run again.

A training script computes its loss in its own code. The tape records that code as it runs, so that the loss
of a copy of the model, or of the model at a later step, can be computed without the script.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from normscope.subjects.feed import tensors_of
from normscope.subjects.subject import LOSS_INPUTS, Batch

_PLAIN = {type(None), bool, int, float, str}
"""Types of arguments that hold no tensor."""
_SCALES = {"mul", "multiply", "div", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__"}
_SCALES |= {"mul_", "div_", "__imul__", "__idiv__", "__itruediv__"}
"""Names of functions that only scale a loss, if their other argument is a constant."""
_OPERATORS = "add|and|concat|div|floordiv|lshift|matmul|mod|mul|or|pow|rshift|sub|truediv|xor"
_WRITING = re.compile(rf"__setitem__|__i({_OPERATORS})__|.*[^_]_")
"""Names of functions that write a tensor, as `add_`, `_foreach_add_` and `__iadd__`."""


@dataclass(frozen=True)
class Slot:
    """Place of a tensor that depends on the model's output."""

    index: int


@dataclass(frozen=True)
class Given:
    """Place of a tensor that does not, such as labels."""

    index: int


@dataclass(frozen=True)
class Step:
    """One call; its tensors are replaced by their places."""

    function: Callable[..., Any]
    arguments: Any
    keywords: Any


@dataclass(frozen=True)
class Program:
    """A loss as a function of a model's output and of given tensors.

    Attributes:
        num_outputs: number of tensors in the model's output, which have the first slots.
        steps: the calls in order; the tensors in each result have the next slots.
        result: slot of the loss.
        is_whole: False if a part of the loss depends on weights, but not through the output (a penalty on
            weights): its value is kept, its gradient is lost.
        factor: number that the result is multiplied by.
    """

    num_outputs: int
    steps: tuple[Step, ...]
    result: int
    is_whole: bool = True
    factor: float = 1.0

    def __call__(self, output: Any, given: Sequence[Tensor]) -> Tensor:
        """The loss of `output`, a scalar.

        Raises:
            ValueError: the output has another number of tensors than the recorded one.
        """
        values = list(tensors_of(output))
        if len(values) != self.num_outputs:
            raise ValueError(f"{len(values)} tensors in the output, {self.num_outputs} when it was recorded")

        def value(place: Any) -> Any:
            if isinstance(place, Slot):
                return values[place.index]
            return given[place.index] if isinstance(place, Given) else place

        def own_value(place: Any) -> Any:
            return given[place.index].clone() if isinstance(place, Given) else value(place)

        for step in self.steps:
            read = own_value if _writes(step.function) else value
            result = step.function(*_mapped(read, step.arguments), **_mapped(read, step.keywords))
            values.extend(tensors_of(result))
        loss = values[self.result].reshape(())
        return loss if self.factor == 1 else loss * self.factor


def replayed_loss(output: Any, batch: Batch) -> Tensor:
    """The loss of a recorded batch: its program stands with its tensors under `LOSS_INPUTS`."""
    assert isinstance(batch, Mapping)
    program, *given = batch[LOSS_INPUTS]
    return program(output, given)


class Tape(TorchFunctionMode):
    """Mode that records the calls on tensors that depend on `output`, from `start` to `stop`."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._slots: dict[int, int] = {}
        self._held: list[Tensor] = []  # an id is given to another tensor once its own is gone
        self._given: dict[tuple[int, int], tuple[int, Tensor, Tensor]] = {}
        self._steps: list[Step] = []
        self._makers: dict[int, int] = {}
        self._is_whole, self._is_part = True, False
        self._keep(output)
        self.outputs = tuple(self._held)
        self.is_recording = False

    def start(self) -> None:
        """Begin to record, in this thread."""
        self.__enter__()
        self.is_recording = True

    def stop(self) -> bool:
        """End the recording; False if the mode cannot be left yet, and has to be stopped again later.

        It cannot inside a function that it has intercepted, as `Tensor.backward`, nor while the script is in
        a mode that it entered later.
        """
        self.is_recording = False
        if _get_current_function_mode() is not self:
            return False
        self.__exit__(None, None, None)
        return True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A compiler only traces the call.
        if not self.is_recording or torch.compiler.is_compiling() or not self._depends(args, kwargs):
            return func(*args, **kwargs)
        places = _mapped(self._place, args), _mapped(self._place, kwargs)  # the call may write its arguments
        result = func(*args, **kwargs)
        results = list(tensors_of(result))
        if results or _writes(func):
            made = range(len(self._held), len(self._held) + len(results))
            self._makers |= dict.fromkeys(made, len(self._steps))
            self._steps.append(Step(func, *places))
            self._keep(result)
        return result

    def _depends(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has an argument that depends on the output; most have none, and are not slowed."""
        slots = self._slots
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                if id(value) in slots:
                    return True
            elif type(value) not in _PLAIN and any(id(t) in slots for t in tensors_of(value)):
                return True
        return False

    def _keep(self, result: Any) -> None:
        for tensor in tensors_of(result):
            self._slots[id(tensor)] = len(self._held)
            self._held.append(tensor)

    def _place(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._slots:
            return Slot(self._slots[id(value)])
        if value.requires_grad:
            self._is_whole = False
            self._is_part |= value.numel() > 1
        version = 0 if value.is_inference() else value._version
        key = id(value), version
        if key not in self._given:  # the script may write the tensor before its backward
            self._given[key] = len(self._given), value, value if self._is_part else copied(value)
        return Given(self._given[key][0])

    @property
    def cuts(self) -> bool:
        """Whether a recorded call may have cut its result from the graph, as `detach` and `.data` do."""
        return any(step.function.__name__ in ("detach", "__get__") for step in self._steps)

    def recording(self, loss: Tensor) -> "Recording | None":
        """The recorded loss; None if there is none for later steps and copies.

        `loss` is no scalar, or does not depend on the output, or it depends on tensors that train outside of
        this forward too: a head, a tied weight, another forward.
        """
        slot = self._slots.get(id(loss))
        if slot is None or loss.numel() != 1 or self._is_part:
            return None
        program = Program(len(self.outputs), tuple(self._steps), slot, self._is_whole)
        given = tuple(copy for _, _, copy in self._given.values())
        values = {slot: loss.detach()}
        scales: list[tuple[int, float]] = []
        lengths = {slot: len(self._steps)}
        while (scaled := self._unscaled(slot, given)) is not None:
            before, factor = scaled
            in_place = self._held[before] is self._held[slot]
            values[before] = values[slot] / factor if in_place else self._held[before].detach()
            lengths[before] = self._makers[slot]
            slot = before
            scales.append(scaled)
        return Recording(program, given, values, tuple(scales), lengths)

    def _unscaled(self, slot: int, given: Sequence[Tensor]) -> tuple[int, float] | None:
        """Slot of the scalar that was scaled to the one in `slot`, and the factor; None if none was."""
        maker = self._steps[self._makers[slot]] if slot in self._makers else None
        if maker is None or maker.function.__name__ not in _SCALES or len(maker.arguments) != 2:
            return None
        scaled = [a for a in maker.arguments if isinstance(a, Slot)]
        factors = [given[a.index] if isinstance(a, Given) else a for a in maker.arguments if a not in scaled]
        if len(scaled) != 1 or self._held[scaled[0].index].numel() != 1:
            return None
        factor = factors[0]
        if not isinstance(factor, int | float) and not (isinstance(factor, Tensor) and factor.numel() == 1):
            return None
        divides = "div" in maker.function.__name__
        return scaled[0].index, 1 / float(factor) if divides else float(factor)


@dataclass(frozen=True)
class Recording:
    """A recorded loss with its values.

    Attributes:
        program, given: see `Program`.
        values: value of the loss that was differentiated, and of the scalars that were scaled to it, by slot.
        scales: slot before each scaling at the end of the loss, and its factor; the last scaling comes first.
        lengths: number of the program's steps up to each of these values: a later one may scale it in place.
    """

    program: Program
    given: tuple[Tensor, ...]
    values: Mapping[int, Tensor]
    scales: tuple[tuple[int, float], ...]
    lengths: Mapping[int, int]

    def without(self, factors: Sequence[float]) -> "Recording":
        """The loss before the last scalings, as long as their factors are 1 or among `factors`, each once."""
        count = num_undone([factor for _, factor in self.scales], factors)
        result = self.scales[count - 1][0] if count else self.program.result
        steps = self.program.steps[: self.lengths[result]]
        program = dataclasses.replace(self.program, steps=steps, result=result)
        return dataclasses.replace(self, program=program, scales=self.scales[count:])

    def times(self, factor: float) -> "Recording":
        """The loss multiplied by `factor`."""
        program = dataclasses.replace(self.program, factor=self.program.factor * factor)
        values = {slot: value * factor for slot, value in self.values.items()}
        return dataclasses.replace(self, program=program, values=values)

    @property
    def value(self) -> Tensor:
        """Value of the loss, a scalar."""
        return self.values[self.program.result]


def num_undone(scales: Sequence[float], factors: Sequence[float]) -> int:
    """Number of the first of `scales` that are 1 or among `factors`, each of which counts once."""
    left = [*factors]
    for number, scale in enumerate(scales):
        near = next((f for f in (1.0, *left) if math.isclose(f, scale, rel_tol=1e-6)), None)
        if near is None:
            return number
        if near in left:
            left.remove(near)
    return len(scales)


def scales_in_graph(loss: Tensor) -> tuple[float, ...]:
    """Constants that the last functions of a loss multiplied it by, the last one first."""
    node, found = loss.grad_fn, list[float]()
    while type(node).__name__ in ("MulBackward0", "DivBackward0"):
        assert node is not None
        divides = type(node).__name__ == "DivBackward0"
        (first, _), (second, _) = node.next_functions
        if (first is None) == (second is None) or (divides and first is None):
            break
        saved: Any = node
        constant = saved._saved_self if first is None else saved._saved_other
        if constant is None or constant.numel() != 1:
            break
        found.append(1 / float(constant) if divides else float(constant))
        node = second if first is None else first
    return tuple(found)


def copied(tensor: Tensor) -> Tensor:
    """A copy of `tensor` as it is now, which no mode sees."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().clone()


def _writes(function: Callable[..., Any]) -> bool:
    """Whether a function writes a tensor that it is given."""
    return _WRITING.fullmatch(function.__name__) is not None


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to each leaf of its tuples, lists, dicts and slices."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(function, part) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(function, part) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(function, part) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(function, part) for part in (value.start, value.stop, value.step)))
    return function(value)
