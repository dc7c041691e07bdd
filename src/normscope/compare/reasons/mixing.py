"""Probabilities and values: the softmax, dropout, the groups of values, and the merge of the heads."""

import torch
from torch import Tensor

from normscope.compare.formulas import merge_heads, softmax, spread
from normscope.compare.reasons.operands import (
    _order,
    _split_sentence,
    clips,
    keys_read,
    operand_options,
    read_operand,
)
from normscope.compare.reasons.scene import (
    FITS,
    Half,
    Reason,
    Reasons,
    Scene,
    distance,
    figure,
    residual,
    tell,
)


def reasons(scene: Scene) -> Reasons:
    """Differences from the logits to the input of the output projection."""
    if not scene.is_alike:
        return
    if not scene.is_same("probabilities"):
        yield from _softmax(scene)
    if scene.is_same("mixed"):
        return
    yield from _values(scene)
    yield from _merge(scene)


def _softmax(scene: Scene) -> Reasons:
    a, b = _described(scene.a), _described(scene.b)
    if a is None or b is None or _is_alike(a, b):
        return
    if "dropout" in (a[0], b[0]):
        rates = [f"dropout at rate {figure(each[1])}" if each[0] == "dropout" else "none" for each in (a, b)]
        message = (
            f"Dropout of the attention weights is left on in eval mode: {rates[0]} in A and {rates[1]} in B."
        )
        patches = scene.b.patch("probabilities", "softmax", ("logits",)) if a[0] == "softmax" else ()
        yield Reason("dropout-left-on", "probabilities", rates[0], rates[1], message, patches)
        return
    words = [_words(each) for each in (a, b)]
    num_keys = scene.b.steps["logits"].shape[-1]
    if b[0] == "extra" and isinstance(b[1], Tensor):  # the key is in B's logits
        if isinstance(a[1], Tensor):
            put = torch.cat([torch.zeros(num_keys - 1).to(a[1]), torch.ones(1).to(a[1])])
            patches = scene.b.patch("logits", "add", what=put * (a[1] - b[1]))
        else:
            patches = scene.b.patch("logits", "hide", visible=(torch.arange(num_keys) < num_keys - 1)[None])
    else:
        extra = a[1] if a[0] == "extra" else None
        patches = scene.b.patch("probabilities", "softmax", ("logits",), extra=extra)
    message = tell("The function of the attention's logits", *words)
    yield Reason("softmax", "probabilities", words[0], words[1], message, patches)


_Softmax = tuple[str, float | Tensor]


def _is_alike(a: _Softmax, b: _Softmax) -> bool:
    if a[0] != b[0]:
        return False
    return distance(*(torch.as_tensor(each[1], dtype=torch.float64).flatten() for each in (a, b))) < FITS


def _words(found: _Softmax) -> str:
    if (
        isinstance(found[1], Tensor)
        and found[1].numel() > 1
        and bool((found[1] != found[1].flatten()[0]).any())
    ):
        return "a softmax with one more key for each head"
    if found[0] == "extra":
        level = float(torch.as_tensor(found[1]).flatten()[0])
        return f"a softmax with one more key of logit {figure(level)}"
    return "a softmax"


def _described(half: Half) -> _Softmax | None:
    found = half.all_of("logits", "probabilities")
    if found is None or found[0].shape != found[1].shape:
        return None
    logits, p = found
    value = half.steps.get("value")
    if value is not None and value.dim() == p.dim() == 4 and p.shape[-1] == value.shape[-2] + 1:
        sink = logits[..., -1:]
        level = sink[:1, :, :1]
        if residual(level.expand_as(sink), sink) < FITS:
            return "extra", level
    plain = softmax(p, logits).nan_to_num(0.0)
    if distance(plain, p) < FITS:
        return "softmax", 0.0
    shares = p.sum(-1)
    if bool(((shares > 0) & (shares < 1)).all()):
        extra = torch.logsumexp(logits, -1) + torch.log((1 - shares) / shares)
        mean = float(extra.mean())
        if distance(softmax(p, logits, extra=mean), p) < FITS:
            return "extra", 0.0 if abs(mean) < FITS else mean
    if (rate := dropped(plain, p)) is not None:
        return "dropout", rate
    return None


def dropped(before: Tensor, after: Tensor) -> float | None:
    """Rate of a dropout between two tensors; None where it is none."""
    some = before.abs() > 1e-12 * before.abs().max()
    ratio = after[some] / before[some]
    kept = ratio[ratio != 0]
    if not len(kept) or len(kept) == len(ratio):
        return None
    level = float(kept.median())
    if level <= 1 or float((kept - level).abs().max()) > FITS * level:
        return None
    return round(1 - 1 / level, 6)


def _values(scene: Scene) -> Reasons:
    a, b = read_operand(scene.a, "v", "value"), read_operand(scene.b, "v", "value")
    if a is None or b is None or scene.is_same("value"):
        return
    x, y = scene.b.steps["v"], scene.b.steps["value"]
    patches = scene.b.patch("value", "operand", ("v",), **operand_options(a, x.shape[-1] // y.shape[-1], b))
    if a.clip != b.clip:
        left, right = clips(a, b)
        message = tell("The clip of the values", left, right)
        yield Reason("qkv-clip", "value", left, right, message, patches)
    if a.split != b.split:
        message = _split_sentence("The values", a.split, b.split)
        yield Reason("head-split", "value", a.split, b.split, message, patches)
    if a.groups != b.groups and len(a.groups) == len(b.groups):
        message = f"The heads read the values as {_order(a.groups)} in A and as {_order(b.groups)} in B."
        yield Reason("kv-groups", "value", list(a.groups), list(b.groups), message, patches)
    if abs(a.times - b.times) > FITS * abs(a.times):
        message = tell("The factor on the values", a.times, b.times)
        yield Reason("value-scale", "value", a.times, b.times, message, patches)


def _merge(scene: Scene) -> Reasons:
    a, b = merged(scene.a), merged(scene.b)
    if a is None or b is None or a == b:
        return
    batch, heads, tokens, _ = scene.b.steps["probabilities"].shape
    now, was = ((merge, None if order is None else torch.tensor(order)) for merge, order in (a, b))
    is_whole = b[1] is None or len(set(b[1])) == heads
    patches = (
        scene.b.patch("mixed", "remerge", shape=(batch, tokens, heads), was=was, now=now) if is_whole else ()
    )
    if a[0] != b[0]:
        words = {
            "heads": "with the features of a head together",
            "interleaved": "with the heads' features interleaved",
            "unmoved": "without moving the axis of the tokens",
        }
        message = f"The heads are merged {words[a[0]]} in A and {words[b[0]]} in B."
        yield Reason("head-merge", "mixed", a[0], b[0], message, patches)
    else:
        count = scene.b.steps["probabilities"].shape[1]
        orders = [tuple(range(count)) if each is None else each for each in (a[1], b[1])]
        shown = [_order(order) for order in orders]
        message = tell("The order of the heads before the output projection", *shown)
        name = "head-order" if keys_read(scene) is None else "kv-groups"
        yield Reason(name, "mixed", list(orders[0]), list(orders[1]), message, patches)


def merged(half: Half) -> tuple[str, tuple[int, ...] | None] | None:
    """Merging of the heads, and their order (None: their own)."""
    found = half.all_of("probabilities", "value", "mixed")
    if found is None or found[0].dim() != 4 or found[1].dim() != 4:
        return None
    p, value, mixed = found
    value = spread(value, p.shape[1])
    if p.shape[1] != value.shape[1] or p.shape[-1] != value.shape[-2]:
        return None
    heads = p @ value
    if heads.numel() != mixed.numel():
        return None
    for merge in ("heads", "unmoved", "interleaved"):
        if distance(merge_heads(heads, merge).reshape(mixed.shape), mixed) < FITS:
            return merge, None
    parts = mixed.reshape(heads.shape[0], heads.shape[2], heads.shape[1], -1).transpose(1, 2)
    gaps = torch.stack([(parts[:, h, None] - heads).square().sum((0, 2, 3)) for h in range(heads.shape[1])])
    order = gaps.argmin(1)
    if float(gaps.min(1).values.sum().sqrt() / parts.norm()) < FITS:
        return "heads", tuple(order.tolist())
    return None
