"""Formulas by which a tensor of a model is computed anew: what a reason undoes, and how it is tested.

Each takes the tensor y itself first, then its sources x, then its options. Features are last.
Shapes: B batch, T queries, S keys, H heads, K features of a head, D features.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MASKED = -1e4  # largest logit of a masked key


def put(y: Tensor, *, value: Tensor) -> Tensor:
    """The given tensor."""
    return value.to(y)


def scale(y: Tensor, *, by: float | Tensor) -> Tensor:
    """Product by·y."""
    return y * _like(by, y)


def add(y: Tensor, *, what: float | Tensor) -> Tensor:
    """y + what."""
    return y + _like(what, y)


def combine(y: Tensor, *sources: Tensor, factors: tuple[float | Tensor, ...], own: float = 0.0) -> Tensor:
    """own·y + Σ factor·source."""
    total = own * y if own else torch.zeros_like(y)
    for factor, source in zip(factors, sources, strict=True):
        total = total + factor * source.reshape(y.shape)
    return total


def affine(y: Tensor, x: Tensor, *, by: float = 1.0, what: float | Tensor = 0.0) -> Tensor:
    """Sum by·x + what."""
    return by * x.reshape(y.shape) + _like(what, y)


def norm_of_itself(y: Tensor, **options: Any) -> Tensor:
    """The norm of y."""
    return norm(y, y, **options)


def take(y: Tensor, *, index: Tensor, axis: int = -1) -> Tensor:
    """y with its entries along an axis in another order."""
    return y.index_select(axis, index.to(y.device))


def norm(
    y: Tensor,
    x: Tensor,
    *,
    kind: str,
    eps: float | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    offset: float = 0.0,
    per: int | None = None,
) -> Tensor:
    """The norm of x: (offset + weight)·(x − μ)/√(var + ε) + bias, over groups of `per` features each."""
    split = x.unflatten(-1, (-1, per)) if per is not None and per != x.shape[-1] else x
    normed = normalised(split, kind, eps).reshape(x.shape).reshape(y.shape)
    if weight is not None:
        gain = weight if not offset else weight + offset
        if gain.numel() not in (1, y.shape[-1]):
            gain = gain.repeat(y.shape[-1] // gain.numel())
        normed = normed * gain
    return normed if bias is None else normed + bias


def linear(
    y: Tensor,
    read: Tensor,
    *sources: Tensor,
    matrix: Tensor,
    feature_axis: int = 0,
    kind: str = "none",
    eps: float | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    offset: float = 0.0,
) -> Tensor:
    """The map y of `read`, with a bias or without, as a map of the norm of the sources' sum x instead.

    For kind "none" it maps x itself.
    """
    x = sum(sources[1:], start=sources[0])
    normed = norm(x, x, kind=kind, eps=eps, weight=weight, bias=bias, offset=offset)
    moved = normed - read.reshape(normed.shape)
    return y + (moved @ (matrix.mT if feature_axis == 0 else matrix)).reshape(y.shape)


def normalised(x: Tensor, kind: str, eps: float | None) -> Tensor:
    """x divided by its statistic over the last axis, without gain and bias."""
    eps = 0.0 if eps is None else eps
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    if kind in ("layernorm", "rmsnorm"):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if kind == "l2norm":
        return x / x.norm(dim=-1, keepdim=True).clamp_min(eps or 1e-300)
    if kind == "none":
        return x
    raise ValueError(f'no formula for a norm of kind "{kind}"')


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu-sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu²": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "leaky-relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softsign": F.softsign,
    "identity": lambda x: x,
    "square": torch.square,
    "sin": torch.sin,
    "exp": torch.exp,
}
"""Name → function of a pre-activation."""


def activation(y: Tensor, x: Tensor, other: Tensor | None = None, *, name: str) -> Tensor:
    """σ(x), times `other` where the feed-forward is gated."""
    value = ACTIVATIONS[name](x)
    return (value if other is None else value * other).reshape(y.shape)


def cap(y: Tensor, *, to: float | None = None, was: float | None = None) -> Tensor:
    """to·tanh(y/to), after undoing the cap `was`; masked logits stay."""
    seen = y > MASKED
    free = torch.where(seen, y, 0.0)
    if was is not None:
        free = was * torch.atanh((free / was).clamp(-1 + 1e-15, 1 - 1e-15))
    if to is not None:
        free = to * torch.tanh(free / to)
    return torch.where(seen, free, y)


def rescale_logits(y: Tensor, *, by: float | Tensor) -> Tensor:
    """Product by·y at visible keys; masked logits stay."""
    return torch.where(y > MASKED, y * _like(by, y), y)


def hide(y: Tensor, *, visible: Tensor) -> Tensor:
    """Logits with −∞ at the keys that are not visible, and equal ones for a query that sees none."""
    visible = visible.to(y.device).reshape(_broadcast(visible, y))
    sees_some = visible.any(-1, keepdim=True)
    return y.masked_fill(~visible, float("-inf")).masked_fill(~sees_some, torch.finfo(y.dtype).min)


def attend(
    y: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    by: float,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Logits by·q·kᵀ (+ bias), capped, with −∞ at the keys that are not visible."""
    logits = by * (query @ spread(key, query.shape[1]).mT)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if bias is not None:
        logits = logits + bias.to(logits)
    return logits if visible is None else hide(logits, visible=visible)


def spread(x_BGSK: Tensor, heads: int) -> Tensor:
    """Keys or values for each of the heads, (B, H, S, K), where groups of neighbouring heads share one."""
    copies, rest = divmod(heads, x_BGSK.shape[1])
    return x_BGSK if copies < 2 or rest else x_BGSK.repeat_interleave(copies, 1)


def softmax(y: Tensor, logits: Tensor, *, extra: float | Tensor | None = None) -> Tensor:
    """softmax over the keys; with `extra` as the logit of one more key without a value."""
    if extra is None:
        return logits.softmax(-1)
    last = torch.zeros_like(logits[..., :1]) + (extra.to(logits) if isinstance(extra, Tensor) else extra)
    more = torch.cat([logits, last], -1)
    return more.softmax(-1)[..., :-1]


def rotated(x: Tensor, *, angles: Tensor, layout: str) -> Tensor:
    """x (…, T, K) rotated by angles (T, pairs) (RoPE, arXiv:2104.09864).

    "halves" rotates feature i with i + width/2, "interleaved" 2i with 2i + 1, where the width is twice the
    number of pairs; the other features stay.
    """
    width, angle = 2 * angles.shape[-1], angles.to(x)
    cos, sin = angle.cos(), angle.sin()
    turned, rest = x[..., :width], x[..., width:]
    if layout == "halves":
        one, two = turned.chunk(2, -1)
        result = torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
    else:
        one, two = turned[..., 0::2], turned[..., 1::2]
        result = torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)
    return torch.cat([result, rest], -1)


BEHIND = "head, behind the rotation"
"""Place of a norm on queries and keys that are rotated before it."""


def operand(
    y: Tensor,
    x: Tensor,
    *,
    heads: int,
    split: str = "heads",
    times: float = 1.0,
    norm_over: str = "none",
    rotation: Mapping[str, Any] | None = None,
    groups: Tensor | None = None,
    clip: float | None = None,
    **norming: Any,
) -> Tensor:
    """Queries or keys from the projection's output x (B, T, H·K)."""
    if clip is not None:
        x = x.clamp(-clip, clip)
    if norm_over == "full":
        x = norm(x, x, **norming)
    z = split_heads(x, heads, split)
    if norm_over == "head":
        z = norm(z, z, **norming)
    if rotation is not None:
        z = rotated(z, **rotation)
    if norm_over == BEHIND:
        z = norm(z, z, **norming)
    if groups is not None:
        z = z.index_select(1, groups.to(z.device))
    return times * z


def attention(
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query: Mapping[str, Any],
    key: Mapping[str, Any],
    value: Mapping[str, Any],
    logits: Mapping[str, Any],
    merge: str,
) -> Tensor:
    """The mixed values from the projections' outputs; `query` and others are options of `operand`."""
    parts = ((q, query), (k, key), (v, value))
    query_BHTK, key_BHTK, value_BHTK = (operand(x, x, **options) for x, options in parts)
    weights = attend(y, query_BHTK, key_BHTK, **logits).softmax(-1).nan_to_num(0.0)
    return merge_heads(weights @ spread(value_BHTK, weights.shape[1]), merge).reshape(y.shape)


def split_heads(x: Tensor, heads: int, split: str = "heads") -> Tensor:
    """(B, T, H·K) → (B, H, T, K).

    "heads" takes the features of a head together, "interleaved" every H-th one; "unmoved" splits the memory
    without moving the tokens' axis, which mixes tokens.
    """
    batch, tokens, width = x.shape
    if split == "unmoved":
        return x.reshape(batch, heads, tokens, width // heads)
    if split == "interleaved":
        return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(heads_BHTK: Tensor, merge: str = "heads") -> Tensor:
    """(B, H, T, K) → (B, T, H·K), the inverse of `split_heads`."""
    batch, heads, tokens, features = heads_BHTK.shape
    if merge == "unmoved":
        return heads_BHTK.reshape(batch, tokens, heads * features)
    if merge == "interleaved":
        return heads_BHTK.permute(0, 2, 3, 1).flatten(2)
    return heads_BHTK.transpose(1, 2).flatten(2)


def remerge(
    y: Tensor,
    *,
    shape: tuple[int, int, int],
    was: tuple[str, Tensor | None],
    now: tuple[str, Tensor | None],
) -> Tensor:
    """Merged heads, merged in another way: `was` and `now` are the merge and the order of the heads.

    `shape` is (B, T, H).
    """
    batch, tokens, heads = shape
    found = split_heads(y.reshape(batch, tokens, -1), heads, was[0])
    if was[1] is not None:
        found = found.index_select(1, was[1].argsort().to(y.device))
    if now[1] is not None:
        found = found.index_select(1, now[1].to(y.device))
    return merge_heads(found, now[0]).reshape(y.shape)


def _like(value: float | Tensor, y: Tensor) -> float | Tensor:
    if not isinstance(value, Tensor):
        return value
    value = value.to(y)
    # (B, T, 1) for a (B·T, D) tensor
    if value.dim() > 1 and value.dim() != y.dim() and value.numel() * y.shape[-1] == y.numel():
        value = value.reshape(*y.shape[:-1], 1)
    return value if value.dim() <= 1 or value.numel() != y.numel() else value.reshape(y.shape)


def _broadcast(visible: Tensor, y: Tensor) -> tuple[int, ...]:
    """Shape in which `visible` (T, S), (B, 1, T, S) or (B, H, T, S) broadcasts to y."""
    if visible.numel() == y.numel():
        return tuple(y.shape)
    if visible.dim() == 2:
        return (1,) * (y.dim() - 2) + tuple(visible.shape)
    return tuple(visible.shape)


FORMULAS: Mapping[str, Callable[..., Tensor]] = {
    "set": put,
    "scale": scale,
    "add": add,
    "combine": combine,
    "take": take,
    "affine": affine,
    "norm": norm,
    "norm_of_itself": norm_of_itself,
    "linear": linear,
    "activation": activation,
    "cap": cap,
    "rescale_logits": rescale_logits,
    "hide": hide,
    "attend": attend,
    "attention": attention,
    "softmax": softmax,
    "operand": operand,
    "remerge": remerge,
}
"""Name → formula (y, *sources, **options)."""
