"""Turns: weights and optimizer states, of which a part is looked at after each step.

What a step itself does wrong is seen in its loss, its streams and its gradients. A weight or a state that is
changed from outside is not always: a NaN in a row of the embedding that no batch uses, a mean square of 1e30.
They are more than everything else together, so that a part is looked at after each step. The norms of all
weights are figures of the steps where all figures are due, so that weights have a turn only where those steps
are rare.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from normscope.monitor.reductions import local, squares

TURNS = 32
"""Steps in which all of them are looked at once."""


@dataclass(frozen=True)
class Place:
    """Place that holds a tensor: an optimizer may replace its states."""

    name: str
    held: Mapping[Any, Tensor]
    key: Any


class Turns:
    """Sizes of a part of the weights and states; the parts follow one another.

    Args:
        parameters, names: the weights.
        optimizers: the optimizers that hold the states.
        every: steps between two measurements of all weights.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        optimizers: Sequence[Optimizer],
        every: int,
    ) -> None:
        self._weights = dict(zip(names, parameters, strict=True)) if every > TURNS else {}
        self._named = dict(zip(map(id, parameters), names, strict=True))
        self._optimizers = optimizers
        self._parts: list[list[Place]] = []
        self._known: list[tuple[int, int]] = []  # of each optimizer: its states, and their number

    def look(self, step: int) -> tuple[list[str], Tensor]:
        """Names and ‖x‖² (n,) of the tensors whose turn it is at `step`."""
        if step % TURNS == 0 or not self._parts:
            self._renew()
        places = [each for each in self._parts[step % TURNS] if each.key in each.held]
        return [each.name for each in places], squares([local(each.held[each.key]) for each in places])

    def _renew(self) -> None:
        """Make new parts of about the same number of entries if there are other states than before."""
        known = [(id(each.state), sum(map(len, each.state.values()))) for each in self._optimizers]
        if self._parts and known == self._known:
            return
        self._known, self._parts = known, [[] for _ in range(TURNS)]
        sizes = [0] * TURNS
        places = [*(Place(name, self._weights, name) for name in self._weights), *self._states()]
        for place in sorted(places, key=lambda each: -each.held[each.key].numel()):
            least = sizes.index(min(sizes))
            sizes[least] += place.held[place.key].numel()
            self._parts[least].append(place)

    def _states(self) -> Iterator[Place]:
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name = self._named.get(id(parameter))
                for key, value in state.items() if name is not None else ():
                    if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
                        yield Place(f"{name} [{key}]", state, key)
