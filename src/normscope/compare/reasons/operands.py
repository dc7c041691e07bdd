"""Queries and keys between their projection and the product: split into heads, QK-norm, rotation, groups."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from normscope.compare.facts import in_words
from normscope.compare.formulas import BEHIND, norm, split_heads
from normscope.compare.reasons.scene import (
    FITS,
    Half,
    Reason,
    Reasons,
    Scene,
    also,
    clean,
    distance,
    factor,
    figure,
    residual,
    tell,
)

OPERANDS = {"q": "query", "k": "key", "v": "value"}
"""Output of a projection → operand that is made of it."""
_UNTURNED = 1e-11
_EPS = (
    1e-6,
    1e-5,
    0.0,
    1e-8,
    1e-12,
    1e-7,
    1e-4,
    1e-3,
    torch.finfo(torch.float32).eps,
    torch.finfo(torch.float64).eps,
)


@dataclass(frozen=True)
class Rotation:
    """Rotary positions, read from a tensor before and after them.

    Attributes:
        layout: "halves" or "interleaved".
        angles: of each token and pair, (T, pairs).
        frequencies: radians per token, of each pair.
        first: number of the first token.
        base, scale: frequency i is scale·base^(−i/pairs); None where the frequencies follow no such law.
    """

    layout: str
    angles: Tensor
    frequencies: Tensor
    first: float
    base: float | None
    scale: float | None

    @property
    def width(self) -> int:
        return 2 * len(self.frequencies)

    def options(self) -> dict[str, Any]:
        """The arguments of the formula `rotated`."""
        return {"angles": self.angles, "layout": self.layout}


@dataclass(frozen=True)
class Operand:
    """Way from a projection's output to an attention's operand.

    Attributes:
        split: how it is split into heads, see `split_heads`.
        groups: for each head, the head of the projection's output that it reads.
        norming: arguments of the formula of a QK-norm, with "norm_over"; None without one.
        rotation: None without one.
        times: factor on it.
        clip: largest entry of the projection's output that is kept; None where all are.
    """

    split: str
    groups: tuple[int, ...]
    norming: Mapping[str, Any] | None
    rotation: Rotation | None
    times: float
    clip: float | None = None


def read_operand(half: Half, before: str, after: str) -> Operand | None:
    """Way to make `after` ("query") from `before` ("q"); None where no description fits."""
    found = half.all_of(before, after)
    if found is None or found[1].dim() != 4 or found[0].dim() != 3:
        return None
    x, y = found
    features = y.shape[-1]
    if x.shape[-1] % features or x.shape[1] != y.shape[2]:
        return None
    heads = x.shape[-1] // features
    if y.shape[1] % heads:
        return None
    found_whole = _way(half, x, y, heads, after)
    if found_whole is None and (clip := _clip(half)) is not None:
        clipped = _way(half, x.clamp(-clip, clip), y, heads, after)
        return None if clipped is None else replace(clipped, clip=clip)
    return found_whole


def _clip(half: Half) -> float | None:
    """The largest value, where several are that large."""
    values = half.steps.get("value")
    if values is None:
        return None
    largest = float(values.abs().max())
    return largest if int((values.abs() == largest).sum()) > values.shape[1] else None


def _way(half: Half, x: Tensor, y: Tensor, heads: int, after: str) -> Operand | None:
    """Way from the projection's output x, which may be clipped, to the operand y."""
    for norming, normed in _normed(half, x, heads, after):
        for split in ("heads", "interleaved", "unmoved"):
            z = (
                split_heads(normed, heads, split)
                if norming is None or norming["norm_over"] == "full"
                else None
            )
            if z is None:
                z = split_heads(x, heads, split)
                z = norm(z, z, **{key: value for key, value in norming.items() if key != "norm_over"})  # type: ignore[union-attr]
            if (fitted := _turned(z, y)) is not None:
                groups, rotation, times = fitted
                return Operand(split, groups, norming, rotation, times)
    return _normed_behind(half, x, y, heads, after)


def _normed_behind(half: Half, x: Tensor, y: Tensor, heads: int, after: str) -> Operand | None:
    """Way whose norm over a head comes after the rotation: that keeps the size, so only the gain shows it."""
    for norming, _ in _normed(half, x, heads, after):
        if norming is None or norming["norm_over"] != "head" or norming["kind"] != "rmsnorm":
            continue
        gain = None if norming["weight"] is None else norming["weight"] + norming["offset"]
        if gain is None or bool((gain == 0).any()):
            continue
        for split in ("heads", "interleaved", "unmoved"):
            z = split_heads(x, heads, split)
            fitted = None if z is None else _turned(norm(z, z, kind="rmsnorm", eps=norming["eps"]), y / gain)
            if fitted is not None and fitted[1] is not None:
                return Operand(split, fitted[0], {**norming, "norm_over": BEHIND}, fitted[1], fitted[2])
    return None


def _normed(half: Half, x: Tensor, heads: int, after: str) -> Iterator[tuple[dict[str, Any] | None, Tensor]]:
    """Candidates of a QK-norm: its arguments, and x after it (before the split where it is over a head)."""
    yield None, x
    if after == "value":
        return
    features = x.shape[-1] // heads
    options: dict[str, Any]
    letter = after[0]
    for over, size in (("head", features), ("full", x.shape[-1])):
        gains: list[tuple[Tensor | None, float]] = [(None, 0.0)]
        for name, value in _inside(half).items():
            words = name.lower().split(".")
            if value.numel() != size or "bias" in words[-1]:
                continue
            if any(letter in word or "norm" in word for word in words[-2:]):
                gains += [(value.flatten(), 0.0), (value.flatten(), 1.0)]
        kinds = ("rmsnorm", "layernorm") if over == "full" else ("rmsnorm", "layernorm", "l2norm")
        for kind, (gain, offset), eps in product(kinds, gains, _EPS):
            if kind == "l2norm" and (gain is not None or eps != _EPS[0]):
                continue
            bias = None
            options = {"kind": kind, "eps": eps, "weight": gain, "bias": bias, "offset": offset}
            yield {"norm_over": over, **options}, norm(x, x, **options) if over == "full" else x


def _inside(half: Half) -> dict[str, Tensor]:
    """The parameters of the attention's module that are vectors."""
    path = half.branch.path if half.branch is not None else ""
    parent = path.rpartition(".")[0] if path else ""
    return {
        name: value
        for name, value in half.parameters.items()
        if name.startswith((f"{path}.", f"{parent}." if parent else "")) and value.dim() == 1
    }


def _turned(z: Tensor, y: Tensor) -> tuple[tuple[int, ...], Rotation | None, float] | None:
    """Groups, rotation and factor that make y (B, H, T, K) from z (B, G, T, K)."""
    num_heads, num_groups = y.shape[1], z.shape[1]
    # A rotation keeps the norm of a head's features: it shows which head was read.
    sizes_y, sizes_z = y.norm(dim=-1), z.norm(dim=-1)
    ratio = float(sizes_y.norm() / sizes_z.norm()) * math.sqrt(num_groups / num_heads)
    if not math.isfinite(ratio) or ratio == 0:
        return None
    for scale in dict.fromkeys((_common_ratio(sizes_y, sizes_z), ratio)):
        if scale is None:
            continue
        gaps = torch.cdist(sizes_y.transpose(0, 1).flatten(1), scale * sizes_z.transpose(0, 1).flatten(1))
        groups = gaps.argmin(1)
        if float(gaps.min(1).values.norm() / sizes_y.norm()) > FITS:
            continue
        read = z.index_select(1, groups)
        c, gap = factor(y, read)
        if gap < _UNTURNED * 100:
            return tuple(groups.tolist()), None, clean(c)
        rotation = _rotation(read, y / scale)
        if rotation is not None:
            return tuple(groups.tolist()), rotation, clean(scale)
    return None


def _common_ratio(sizes_y: Tensor, sizes_z: Tensor) -> float | None:
    """The ratio of sizes at the first token, from its largest head."""
    y, z = sizes_y[0, :, 0].sort().values, sizes_z[0, :, 0].sort().values
    return float(y[-1] / z[-1]) if float(z[-1]) > 0 else None


def _rotation(z: Tensor, y: Tensor) -> Rotation | None:
    """The rotation from z to y (B, H, T, K), by its angles at every token; None where it is none."""
    features = z.shape[-1]
    moved = ((y - z).square().sum((0, 1, 2)) > (_UNTURNED**2) * z.square().sum((0, 1, 2))).nonzero()
    if not len(moved):
        return None
    least = int(moved[-1]) + 1
    # Interleaved pairs end at an even feature; the slowest pair of a half may not move visibly.
    for width in range(least + least % 2, features + 1, 2):
        for layout in ("halves", "interleaved"):
            angles = _angles(z[..., :width], y[..., :width], layout)
            if angles is not None and (found := _law(angles, layout)) is not None:
                return found
    return None


def _angles(z: Tensor, y: Tensor, layout: str) -> Tensor | None:
    """Angle (T, pairs) by which each pair is rotated; None where a token's pairs are not rotated alike."""
    one, two = _complex(z, layout), _complex(y, layout)
    size = one.abs().square().sum((0, 1))
    if bool((size == 0).any()):
        return None
    turn = (two * one.conj()).sum((0, 1)) / size
    if residual(torch.view_as_real(two), torch.view_as_real(turn * one)) > 10 * FITS:
        return None
    return turn.angle()


def _complex(x: Tensor, layout: str) -> Tensor:
    one, two = x.chunk(2, -1) if layout == "halves" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(one.contiguous(), two.contiguous())


def _law(angles: Tensor, layout: str) -> Rotation | None:
    """Frequencies, first token and base from angles (T, pairs), which are known up to 2π."""
    if len(angles) < 2:
        return None
    steps = torch.polar(torch.ones_like(angles), angles)
    frequency = (steps[1:] * steps[:-1].conj()).mean(0).angle()
    # From near tokens to far ones, each estimate is refined by one over a longer way.
    way = 2
    while way < len(angles):
        whole = (steps[way:] * steps[:-way].conj()).mean(0).angle()
        turns = ((frequency * way - whole) / (2 * math.pi)).round()
        frequency = (whole + 2 * math.pi * turns) / way
        way *= 2
    first = _first(steps[0], frequency)
    place = torch.arange(len(angles), dtype=angles.dtype) + first
    expected = torch.outer(place, frequency)
    if float((torch.polar(torch.ones_like(expected), expected) - steps).abs().max()) > 1e-4:
        return None
    base, scale = _base(frequency)
    return Rotation(layout, angles, frequency, first, base, scale)


def _first(step: Tensor, frequency: Tensor) -> float:
    """Number of the first token: a whole number where one fits."""
    angle = step.angle()
    if float(angle.abs().max()) < 1e-6:
        return 0.0
    places = torch.arange(-64, 4097, dtype=frequency.dtype)
    expected = torch.outer(places, frequency)
    gaps = (torch.polar(torch.ones_like(expected), expected) - step).abs().amax(1)
    return float(places[gaps.argmin()])


def _base(frequency: Tensor) -> tuple[float | None, float | None]:
    """base and scale of scale·base^(−i/pairs)."""
    pairs = len(frequency)
    if bool((frequency <= 0).any()):
        if bool((frequency >= 0).any()):
            return None, None
        base, scale = _base(-frequency)
        return base, None if scale is None else -scale
    if pairs == 1:
        return None, float(frequency[0])
    place = torch.arange(pairs, dtype=frequency.dtype) / pairs
    logs = frequency.log()
    slope = float(
        ((place - place.mean()) * (logs - logs.mean())).sum() / (place - place.mean()).square().sum()
    )
    level = float(logs.mean() - slope * place.mean())
    if float((level + slope * place - logs).abs().max()) > 1e-3:
        return None, None
    return _rounded(math.exp(-slope)), _rounded(math.exp(level))


def _rounded(value: float) -> float:
    """A fitted number to the precision of tables in float32."""
    rounded = float(f"{value:.3g}")
    return rounded if abs(rounded - value) < 1e-4 * abs(value) else float(f"{value:.5g}")


def reasons(scene: Scene) -> Reasons:
    """Differences between the projections' outputs and the operands of the product."""
    if scene.is_same("logits") or not scene.is_alike:
        return
    found: list[Reason] = []
    for before, after in (("q", "query"), ("k", "key")):
        a, b = read_operand(scene.a, before, after), read_operand(scene.b, before, after)
        if a is None or b is None:
            continue
        for each in _compared(scene, before, after, a, b):
            twin = next((r for r in found if (r.name, r.a, r.b) == (each.name, each.a, each.b)), None)
            if twin is None:
                found.append(each)
            else:  # queries and keys differ alike: one reason
                message = twin.message.replace("queries", "queries and keys")
                found[found.index(twin)] = replace(
                    twin, message=message, patches=(*twin.patches, *each.patches)
                )
    yield from found


def _compared(scene: Scene, before: str, after: str, a: Operand, b: Operand) -> Reasons:
    word = {"query": "queries", "key": "keys"}[after]

    def reason(name: str, left: Any, right: Any, message: str) -> Reason:
        return Reason(name, after, left, right, message, _patch(scene, before, after, a, b))

    if a.clip != b.clip:
        left, right = clips(a, b)
        yield reason("qkv-clip", left, right, tell(f"The clip of the {word}", left, right))
    if a.split != b.split:
        yield reason("head-split", a.split, b.split, _split_sentence(f"The {word}", a.split, b.split))
    if after == "query" and (read := keys_read(scene)) is not None:
        left, right = map(_order, read)
        message = f"The heads read the keys as {left} in A and as {right} in B."
        yield reason("kv-groups", list(read[0]), list(read[1]), message)
    elif a.groups != b.groups and len(a.groups) == len(b.groups):
        message = f"The heads read the {word} as {_order(a.groups)} in A and as {_order(b.groups)} in B."
        yield reason("kv-groups" if after == "key" else "head-order", list(a.groups), list(b.groups), message)
    yield from _norms(a, b, word, reason)
    yield from _rotations(a.rotation, b.rotation, word, reason)


def keys_read(scene: Scene) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The head of the keys that each head of A's and of B's queries reads, where they differ by the order of
    queries whose groups share keys without a copy; else None.
    """
    read, is_shared = [], False
    for half in (scene.a, scene.b):
        query, key = read_operand(half, "q", "query"), read_operand(half, "k", "key")
        if query is None or key is None or len(query.groups) % len(key.groups):
            return None
        copies = len(query.groups) // len(key.groups)
        is_shared |= copies > 1
        keys = [group for group in key.groups for _ in range(copies)]
        read.append(tuple(of for _, of in sorted(zip(query.groups, keys, strict=True))))
    return (read[0], read[1]) if is_shared and read[0] != read[1] and len(read[0]) == len(read[1]) else None


def _norms(a: Operand, b: Operand, word: str, reason: Any) -> Reasons:
    left, right = a.norming, b.norming
    if left is None and right is None:
        return
    if left is None or right is None:
        words = ["none" if n is None else f"{n['kind']} over each {n['norm_over']}" for n in (left, right)]
        words = [each.replace("each full", "the full width") for each in words]
        yield reason("qk-norm", *words, tell(f"The norm on the {word}", *words))
        return
    for key, name in (("norm_over", "qk-norm"), ("kind", "qk-norm-kind"), ("eps", "qk-norm-eps")):
        if left[key] != right[key]:
            what = {"eps": f"The ε of the norm on the {word}"}.get(key, f"The norm on the {word}")
            shown = [in_words("qk_norm", each[key]) for each in (left, right)]
            yield reason(name, left[key], right[key], tell(what, *shown))
            return


def _rotations(a: Rotation | None, b: Rotation | None, word: str, reason: Any) -> Reasons:
    if a is None and b is None:
        return
    if a is None or b is None:
        words = ["none" if r is None else "rotary" for r in (a, b)]
        yield reason("attention-positions", *words, tell(f"The position of the {word}", *words))
        return
    if a.width != b.width:
        yield reason("rotary-width", a.width, b.width, tell("The rotated width of a head", a.width, b.width))
    if a.layout != b.layout:
        pairs = {"halves": "feature i with i + width/2", "interleaved": "feature 2i with 2i + 1"}
        message = f"The rotary positions turn {pairs[a.layout]} in A and {pairs[b.layout]} in B."
        yield reason("rotary-layout", a.layout, b.layout, message)
    if a.base is not None and b.base is not None and abs(a.base - b.base) > 1e-3 * a.base:
        found = reason(
            "rotary-base", a.base, b.base, tell("The base of the rotary positions", a.base, b.base)
        )
        is_tied = a.width == b.width == 4  # through two frequencies goes the law of some base
        words = ["a factor on the slower of its two frequencies"]
        yield replace(found, others=also("the base", [("B", words)])) if is_tied else found
    elif (a.base is None) != (b.base is None) and min(a.width, b.width) > 2:
        words = [
            "its frequencies follow no base" if r.base is None else f"base {figure(r.base)}" for r in (a, b)
        ]
        message = f"The frequencies of the rotary positions differ: {words[0]} in A and {words[1]} in B."
        yield reason("rotary-scaling", *words, message)
    elif a.width == b.width and not _is_near(a.scale, b.scale):
        if a.scale is not None and b.scale is not None and _is_near(a.scale, -b.scale):
            message = "The rotary positions turn in opposite directions."
            yield reason("rotary-direction", a.scale, b.scale, message)
        else:
            message = tell("The factor on the rotary positions", a.scale, b.scale)
            yield reason("rotary-scaling", a.scale, b.scale, message)
    elif a.base is None and a.width == b.width and distance(a.frequencies, b.frequencies) > 1e-4:
        message = "The frequencies of the rotary positions differ."
        yield reason("rotary-scaling", a.frequencies.tolist(), b.frequencies.tolist(), message)
    if a.first != b.first:
        message = f"The {word}' first position is number {figure(a.first)} in A and {figure(b.first)} in B."
        yield reason("rotary-offset", a.first, b.first, message)


def _is_near(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) < 1e-3 * abs(a))


def clips(a: Operand, b: Operand) -> list[str]:
    """The largest kept values of both sides, in words."""
    return ["none" if each.clip is None else figure(each.clip) for each in (a, b)]


def _patch(scene: Scene, before: str, after: str, a: Operand, b: Operand) -> tuple[Any, ...]:
    options = operand_options(a, scene.b.steps[before].shape[-1] // scene.b.steps[after].shape[-1], b)
    if options.get("weight") is not None and b.norming is not None and b.norming["weight"] is not None:
        options |= {"weight": b.norming["weight"]}
    return scene.b.patch(after, "operand", (before,), **{**options, "times": b.times})


def operand_options(found: Operand, heads: int, of_b: Operand | None = None) -> dict[str, Any]:
    """Arguments of the formula `operand`; B's groups stay where only one side copies keys for their heads."""
    is_other = of_b is not None and len(of_b.groups) != len(found.groups)
    groups = of_b.groups if of_b is not None and is_other else found.groups
    return {
        "heads": heads,
        "split": found.split,
        "times": found.times,
        "clip": found.clip,
        "rotation": None if found.rotation is None else found.rotation.options(),
        "groups": torch.tensor(groups),
        **(found.norming or {}),
    }


def _split_sentence(subject: str, a: str, b: str) -> str:
    words = {
        "heads": "with the features of a head together",
        "interleaved": "with the heads' features interleaved",
        "unmoved": "without moving the axis of the tokens",
    }
    return f"{subject} are split into heads {words[a]} in A and {words[b]} in B."


def _order(groups: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, groups[:8]))
    return f"({shown}{', …' if len(groups) > 8 else ''})"
