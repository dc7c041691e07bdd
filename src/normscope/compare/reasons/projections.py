"""Projections: a bias, a factor, an order of features, or other weights, where both sides read the same."""

import torch
from torch import Tensor

from normscope.compare.reasons.scene import (
    FITS,
    Reason,
    Reasons,
    Scene,
    clean,
    distance,
    factor,
    figure,
    residual,
)

_READ = {"o": "mixed", "down": "act"}
_WORDS = {
    "q": "query projection",
    "k": "key projection",
    "v": "value projection",
    "o": "output projection",
    "up": "up projection",
    "gate": "gate projection",
    "down": "down projection",
}


def reasons(scene: Scene) -> Reasons:
    """Differences of the projections whose inputs agree."""
    for role, word in _WORDS.items():
        read = _READ.get(role) or entry_step(scene)
        both = scene.both(role)
        if both is None or read is None or not scene.is_same(read) or scene.is_same(role):
            continue
        (a,), (b,) = both
        if role in ("gate", "up") and _is_exchanged(scene):
            continue  # the activation's file says so
        if a.shape == b.shape:
            yield _related(scene, role, word, a, b)


def entry_step(scene: Scene) -> str | None:
    """Name of the step that a branch's first projections read; None where the sides read different ones."""
    names = {half.slots.get("in", "entry") for half in (scene.a, scene.b)}
    return names.pop() if len(names) == 1 else None


def _is_exchanged(scene: Scene) -> bool:
    found = scene.both("gate", "up")
    return found is not None and distance(found[0][0], found[1][1]) < FITS


def _related(scene: Scene, role: str, word: str, a: Tensor, b: Tensor) -> Reason:
    flat_a, flat_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    gap = flat_a - flat_b
    shift = gap.mean(0)
    if len(gap) > 2 and residual(shift.expand_as(gap), gap) < FITS:
        words = _biases(scene, role)
        message = f"The {word} {words[0]} in A and {words[1]} in B."
        return Reason("bias", role, words[0], words[1], message, scene.b.patch(role, "add", what=shift))
    c, left = factor(flat_a, flat_b)
    if left < FITS:
        message = f"The output of the {word} in A is {figure(clean(c))} times that in B."
        return Reason("weight-scale", role, clean(c), 1.0, message, scene.b.patch(role, "scale", by=c))
    if (order := permutation(flat_a, flat_b)) is not None:
        kind = order_words(order, _heads(scene, role))
        message = f"The features of the {word} stand in another order in B than in A: {kind}."
        return Reason(
            "head-order" if "heads" in kind else "feature-order",
            role,
            None,
            None,
            message,
            scene.b.patch(role, "take", index=order),
        )
    rows = (flat_a - flat_b).norm(dim=0) > FITS * flat_a.norm(dim=0)
    part = "" if bool(rows.all()) else f" ({int(rows.sum())} of {len(rows)} features)"
    message = (
        f"The {word} gives other values from the same input{part}: its weights or its computation differ."
    )
    return Reason("weights", role, None, None, message, scene.b.patch(role, "set", value=a))


def _heads(scene: Scene, role: str) -> int:
    step = {"q": "query", "k": "key", "v": "value"}.get(role)
    if step is None or step not in scene.b.steps:
        return 1
    return scene.b.steps[role].shape[-1] // scene.b.steps[step].shape[-1]


def _biases(scene: Scene, role: str) -> tuple[str, str]:
    """Whether each side's projection has a bias, in words."""
    words = []
    for half in (scene.a, scene.b):
        names = (
            [] if half.branch is None else [p.parameter for p in half.branch.projections if role in p.roles]
        )
        path = names[0].rpartition(".")[0] if names else ""
        bias = half.parameters.get(f"{path}.bias")
        if bias is None:
            bias = half.parameters.get(f"{path}.in_proj_bias")
        words.append("has a bias" if bias is not None and bool(bias.any()) else "has no bias")
    if words[0] == words[1]:
        words = ["has one bias", "has another"]
    return words[0], words[1]


def permutation(a: Tensor, b: Tensor) -> Tensor | None:
    """index with a = b[..., index], for (N, features); None where there is none."""
    sums_a, sums_b = _marks(a), _marks(b)
    order_a, order_b = sums_a.argsort(), sums_b.argsort()
    index = torch.empty_like(order_a)
    index[order_a] = order_b
    return index if residual(a, b.index_select(-1, index)) < FITS else None


def _marks(x: Tensor) -> Tensor:
    """A number for each feature, which a permutation moves along."""
    weights = torch.randn(len(x), generator=torch.Generator().manual_seed(0)).to(x)
    return weights @ x


def order_words(order: Tensor, heads: int) -> str:
    """A permutation of features, in words."""
    size = len(order)
    features = size // max(heads, 1)
    places = torch.arange(size)
    if size % 2 == 0:
        for width, where in ((features, " of each head"), (size, "")):
            if width % 2:
                continue
            split = places.reshape(-1, 2, width // 2).transpose(1, 2).reshape(-1)
            join = places.reshape(-1, width // 2, 2).transpose(1, 2).reshape(-1)
            if torch.equal(order, split) or torch.equal(order, join):
                return f"the rotary pairs{where} are interleaved on one side and halves on the other"
    if heads > 1 and torch.equal(
        order.reshape(heads, features) % features, torch.arange(features).expand(heads, -1)
    ):
        first = (order.reshape(heads, features)[:, 0] // features).tolist()
        return f"the heads are permuted ({', '.join(map(str, first[:8]))})"
    if heads > 1 and torch.equal(order, places.reshape(features, heads).T.reshape(-1)):
        return "the heads' features are interleaved"
    if heads > 1 and torch.equal(order, places.reshape(heads, features).T.reshape(-1)):
        return "the heads' features are interleaved"
    return "a permutation"
