"""Turns: weights and optimizer states, of which a part is looked at after each step.

What a step itself does wrong is seen in its loss, its streams and its gradients. A weight or a state that is
changed from outside is not always: a NaN in a row of the embedding that no batch uses, a mean square of 1e30.
They are as many as everything else together, so that a part is looked at after each step.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from normscope.monitor.reductions import local, norms

WEIGHT_TURNS, STATE_TURNS = 2, 8
"""Steps in which all weights, and all states, are looked at once."""


class Turns:
    """Norms of a part of the weights and states; the parts follow one another.

    The list of the states is made anew once all of them have been looked at: an optimizer may replace them.
    """

    def __init__(
        self, parameters: Sequence[Tensor], names: Sequence[str], optimizers: Sequence[Optimizer]
    ) -> None:
        self._named = dict(zip(map(id, parameters), names, strict=True))
        self._weights = _parts(list(zip(names, parameters, strict=True)), WEIGHT_TURNS)
        self._states: list[Part] = []
        self._optimizers = optimizers

    def look(self, step: int) -> tuple[list[str], Tensor]:
        """Names and norms (n,) of the tensors whose turn it is at `step`."""
        if step % STATE_TURNS == 0 or not self._states:
            self._states = _parts(list(self._all_states()), STATE_TURNS)
        names, tensors = self._weights[step % WEIGHT_TURNS]
        more, states = self._states[step % STATE_TURNS]
        return [*names, *more], norms([local(tensor) for tensor in (*tensors, *states)])

    def _all_states(self) -> Iterator[tuple[str, Tensor]]:
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name = self._named.get(id(parameter))
                for key, value in state.items() if name is not None else ():
                    if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
                        yield f"{name} [{key}]", value


Part = tuple[list[str], list[Tensor]]


def _parts(named: list[tuple[str, Tensor]], count: int) -> list[Part]:
    return [([name for name, _ in named[i::count]], [t for _, t in named[i::count]]) for i in range(count)]
