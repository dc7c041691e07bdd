"""Pooling: the hidden state of a sequence that a head reads, before the final norm or after it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from normscope.compare.keys import OUTPUT
from normscope.compare.reasons.scene import FITS, Half, Reason, Scene, residual, tell
from normscope.compare.types import Patch

_TAKEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the first token's": lambda x: x[:, 0],
    "the last token's": lambda x: x[:, -1],
}
"""Poolings that take one token, so that a norm of each token may come before or after."""
_MIXED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the mean of all tokens": lambda x: x.mean(1),
    "the mean of all tokens but the first": lambda x: x[:, 1:].mean(1),
    "the maximum over all tokens": lambda x: x.amax(1),
}


def is_pooled_once(scene: Scene) -> bool:
    """Whether one side alone has a single hidden state for a sequence before its head reads it."""
    both = scene.both("hidden")
    if both is None or any(hidden.dim() != 3 for (hidden,) in both):
        return False
    return sum(hidden.shape[1] == 1 for (hidden,) in both) == 1


def reads_same(scene: Scene) -> bool:
    """Whether both heads, with their poolings, read the same stream."""
    return scene.is_same("exit" if is_pooled_once(scene) else "hidden")


def reason(scene: Scene) -> Reason | None:
    """The reason that the heads read other hidden states, where both are known."""
    pools = [_pool(half) for half in (scene.a, scene.b)]
    if None in pools or pools[0] == pools[1]:
        return None
    message = tell("The hidden state that the head reads", *pools)
    patches = (Patch("output", "", ("set", {"value": scene.a.steps[OUTPUT]})),)
    return Reason("pooling", OUTPUT, pools[0], pools[1], message, patches)


def _pool(half: Half) -> str | None:
    """The hidden state that a linear head reads, for one output a sequence; None where none fits."""
    hidden, output = half.steps["hidden"], half.steps[OUTPUT]
    if hidden.dim() != 3 or output.dim() != 2:
        return None
    stream, read = half.steps.get("exit"), half.steps.get("final norm in")
    if hidden.shape[1] == 1 and stream is not None and read is not None and stream.shape[1] > 1:
        for words, pool in {**_TAKEN, **_MIXED}.items():
            if residual(pool(stream), read[:, 0]) < FITS:
                return words if words in _TAKEN else f"{words}, before the final norm"
    for name, value in half.parameters.items():
        if tuple(value.shape) == (output.shape[-1], hidden.shape[-1]):
            bias = half.parameters.get(f"{name.rpartition('.')[0]}.bias", torch.zeros(()))
            for words, pool in {**_TAKEN, **_MIXED}.items():
                if residual(pool(hidden) @ value.mT + bias, output) < FITS:
                    return words
    return None
