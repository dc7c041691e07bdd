"""Differences of gradients where the forwards agree: a cut, a factor, a norm with constant statistics."""

from collections.abc import Sequence

import torch
from torch import Tensor

from normscope.compare.reasons.norms import parameters_of
from normscope.compare.reasons.scene import (
    FITS,
    Half,
    Reason,
    Reasons,
    Scene,
    clean,
    distance,
    factor,
    figure,
)

_WORDS = {
    "entry": "the stream at the entry of the branch",
    "query": "the queries",
    "key": "the keys",
    "value": "the values",
    "q": "the query projection's output",
    "k": "the key projection's output",
    "v": "the value projection's output",
    "logits": "the attention's logits",
    "probabilities": "the attention weights",
    "mixed": "the input of the output projection",
    "o": "the output projection's output",
    "up": "the up projection's output",
    "gate": "the gate projection's output",
    "act": "the activation's output",
    "down": "the down projection's output",
    "output": "the branch's output",
    "sum": "the stream after the branch",
    "embedding": "the token embeddings",
    "hidden": "the final hidden state",
}


def reasons(scene: Scene, order: Sequence[str], cuts_only: bool = False) -> Reasons:
    """The last step of the forward at which the gradients part: a backward pass reaches it first.

    Args:
        order: names of the steps in the order of the forward.
        cuts_only: whether to find only gradients that are zero on one side.
    """
    for step in reversed(order):
        if not _is_known(scene.a, step) or not _is_known(scene.b, step):
            continue
        a, b = _gradient(scene.a, step), _gradient(scene.b, step)
        is_cut = bool(a.any()) != bool(b.any())
        # A step that holds other values, as queries before and after their scale, has other gradients.
        if distance(a, b) <= scene.tolerance or not (is_cut or (scene.is_same(step) and not cuts_only)):
            continue
        yield _reason(scene, step, a, b)
        return


def _is_known(half: Half, step: str) -> bool:
    return step in half.steps


def _gradient(half: Half, step: str) -> Tensor:
    """The gradient, 0 where the loss does not depend on the step."""
    found = half.gradients.get(step)
    return torch.zeros_like(half.steps[step]) if found is None else found


def _reason(scene: Scene, step: str, a: Tensor, b: Tensor) -> Reason:
    word = _word(step)
    for zero, other, side in ((b, a, "B"), (a, b, "A")):
        if not bool(zero.any()) and bool(other.any()):
            message = f"The gradient of {word} is cut in {side} alone, as by detach(): it is zero there."
            values = ("flows", "cut") if side == "B" else ("cut", "flows")
            return Reason("gradient-cut", step, values[0], values[1], message)
    if step == "entry" and (found := _paths(scene, a, b)) is not None:
        return found
    if (
        step.endswith(" in")
        and step.removesuffix(" in") in scene.a.norms
        and (found := _statistics(scene, step, a, b)) is not None
    ):
        return found
    c, gap = factor(b, a)
    if gap < FITS:
        message = f"The gradient of {word} in B is {figure(clean(c))} times that in A."
        return Reason("gradient-scale", step, 1.0, clean(c), message)
    return Reason("gradient", step, None, None, f"The gradients of {word} part although the values agree.")


def _word(step: str) -> str:
    """A step in a sentence."""
    if step in _WORDS:
        return _WORDS[step]
    if "norm" in step:
        norm = "the final norm" if step.startswith("final") else "the norm"
        return f"{norm}'s input" if step.endswith(" in") else f"{norm}'s output"
    return f'"{step}"'


def _paths(scene: Scene, a: Tensor, b: Tensor) -> Reason | None:
    """A detached skip or a detached branch, by what is missing in the gradient of the entry."""
    skip = scene.a.gradients.get("sum")
    if skip is None or skip.shape != a.shape:
        return None
    for one, other, side in ((a, b, "B"), (b, a, "A")):
        values = ("flows", "cut") if side == "B" else ("cut", "flows")
        c, gap = factor(one - other, skip)
        if gap < FITS and abs(c) > FITS:
            message = f"The gradient of the skip connection is cut in {side} alone, as by detach()."
            return Reason("gradient-cut", "entry", values[0], values[1], message)
        c, gap = factor(other, skip)
        if gap < FITS:
            message = f"The gradient through the branch is cut in {side} alone, as by detach() of its input."
            return Reason("gradient-cut", "entry", values[0], values[1], message)
    return None


def _statistics(scene: Scene, step: str, a: Tensor, b: Tensor) -> Reason | None:
    """A norm whose statistics are constants of the backward pass on one side."""
    name = step.removesuffix(" in")
    for half, gradient, side in ((scene.a, a, "A"), (scene.b, b, "B")):
        found, known = half.norms.get(name), half.all_of(step, name)
        if (
            found is None
            or known is None
            or name not in half.gradients
            or found.kind not in ("layernorm", "rmsnorm")
        ):
            continue
        x, y = known
        weight, bias = parameters_of(found, half.parameters)
        upstream = half.gradients[name]
        for constant in ("scale", "both"):
            leaf = x.clone().requires_grad_()
            value = _constant(leaf, found.kind, found.eps or 0.0, constant)
            if weight is not None:
                value = value * (weight + found.weight_offset)
            value = value if bias is None else value + bias
            if distance(value.detach(), y) > FITS:
                continue
            (back,) = torch.autograd.grad(value, leaf, upstream)
            if distance(back, gradient) < FITS:
                message = f"The backward pass of the norm treats its statistics as constants in {side} alone."
                values = ("constant", "differentiated") if side == "A" else ("differentiated", "constant")
                return Reason("norm-gradient", step, values[0], values[1], message)
    return None


def _constant(x: Tensor, kind: str, eps: float, what: str) -> Tensor:
    centre = x.mean(-1, keepdim=True) if kind == "layernorm" else torch.zeros_like(x[..., :1])
    size = torch.sqrt((x - centre).square().mean(-1, keepdim=True) + eps).detach()
    return (x - (centre.detach() if what == "both" else centre)) / size
