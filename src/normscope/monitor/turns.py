"""Turns: weights and optimizer states, of which a part is looked at after each step.

What a step itself does wrong is seen in its loss, its streams and its gradients. A weight or a state that is
changed from outside is not always: a NaN in a row of the embedding that no batch uses, a mean square of 1e30.
They are as many as everything else together, so that a part is looked at after each step.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from normscope.monitor.reductions import local, norms

TURNS = 16
"""Steps in which all of them are looked at once."""


class Turns:
    """Norms of a part of the weights and states; the parts follow one another.

    The parts are made anew once all of them have been looked at: an optimizer may replace its states.
    """

    def __init__(
        self, parameters: Sequence[Tensor], names: Sequence[str], optimizers: Sequence[Optimizer]
    ) -> None:
        self._weights = list(zip(names, parameters, strict=True))
        self._named = dict(zip(map(id, parameters), names, strict=True))
        self._optimizers = optimizers
        self._parts: list[Part] = []

    def look(self, step: int) -> tuple[list[str], Tensor]:
        """Names and norms (n,) of the tensors whose turn it is at `step`."""
        if step % TURNS == 0 or not self._parts:
            self._parts = _parts([*self._weights, *self._states()], TURNS)
        names, tensors = self._parts[step % TURNS]
        return names, norms([local(tensor) for tensor in tensors])

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name = self._named.get(id(parameter))
                for key, value in state.items() if name is not None else ():
                    if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
                        yield f"{name} [{key}]", value


Part = tuple[list[str], list[Tensor]]


def _parts(named: list[tuple[str, Tensor]], count: int) -> list[Part]:
    """Parts of about the same number of entries."""
    parts: list[Part] = [([], []) for _ in range(count)]
    sizes = [0] * count
    for name, tensor in sorted(named, key=lambda each: -each[1].numel()):
        least = sizes.index(min(sizes))
        sizes[least] += tensor.numel()
        parts[least][0].append(name)
        parts[least][1].append(tensor)
    return parts
