"""Rescue: what a monitor may do to a run that goes wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normscope.errors import UsageError


@dataclass(frozen=True)
class Rescue:
    """Actions that a `Monitor` may take on a run that goes wrong, `Monitor(…, rescue=Rescue())`.

    Figures are read before each update, so that on a GPU each step waits for the device. With several
    processes all of them must be given the same.

    Attributes:
        skip: pass over the update where a gradient or a stream is not finite, or a gradient norm jumps as in
            NS805. Weights and optimizer states stay as they are.
        clip: scale the gradients of a smaller jump down to the limit of its window.
        lower: factor of the learning rate after a jump, in (0, 1); it comes back geometrically within 100
            steps. None leaves it.
        back: steps between two snapshots of the trained weights, buffers and optimizer states. The run goes
            back to one where a weight or a state is not finite, a gradient is not finite in 5 steps in a row,
            or the loss is above its limit (NS804) in 10. The batches in between are passed over. None for
            never.
        memory: most host memory of the two snapshots in each process, in MiB.

    Raises:
        UsageError: an attribute is out of its range, or nothing may be done.
    """

    skip: bool = True
    clip: bool = True
    lower: float | None = None
    back: int | None = None
    memory: float = 4096

    def __post_init__(self) -> None:
        if self.lower is not None and not 0 < self.lower < 1:
            raise UsageError(f"lower={self.lower}", "a factor between 0 and 1", "use 0.5, or None for none")
        if self.back is not None and self.back < 1:
            raise UsageError(f"back={self.back}", "at least 1 step", "use 100, or None for never")
        if not (self.skip or self.clip or self.lower or self.back):
            raise UsageError("a Rescue that may do nothing", "an action", "leave rescue out")

    @staticmethod
    def named(words: str) -> "Rescue":
        """The rescue of an option such as "skip,clip,lower=0.5,back=100"; what is not named is not done."""
        given: dict[str, Any] = {"skip": False, "clip": False}
        for word in words.split(","):
            name, _, value = word.strip().partition("=")
            try:
                given[name] = _READ[name](value)
            except (KeyError, ValueError):
                wanted = "some of skip, clip, lower=0.5, back=100 and memory=4096, with commas"
                raise UsageError(f'rescue "{words}"', wanted, _corrected(word)) from None
        return Rescue(**given)


def _corrected(word: str) -> str:
    """Advice on a word that is no action."""
    name = word.strip().partition("=")[0]
    examples = {
        "lower": "lower=0.5",
        "back": "back=100",
        "memory": "memory=4096",
        "skip": "skip",
        "clip": "clip",
    }
    return f'write {examples[name]} for "{word}"' if name in examples else f'correct "{word}"'


def _flag(value: str) -> bool:
    if value:
        raise ValueError(value)
    return True


_READ: dict[str, Callable[[str], Any]] = {
    "skip": _flag,
    "clip": _flag,
    "lower": float,
    "back": int,
    "memory": float,
}
