"""Norms: kind, ε, gain, 1 + gain, bias; a norm that one side lacks."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normscope.anatomy import Norm
from normscope.compare.formulas import norm
from normscope.compare.reasons.scene import FITS, ROUNDING, Half, Reason, Reasons, Scene, distance, tell

_WHERE = {
    "final norm": ("final-norm", "final norm"),
    "embedding norm": ("embedding-norm", "norm after the embeddings"),
}
_KINDS = {"layernorm", "rmsnorm", "l2norm"}


def reasons(scene: Scene) -> Reasons:
    """Differences of the norms that both sides have at a step."""
    if set(scene.a.slots) != set(scene.b.slots):
        return
    for name in scene.a.norms:
        if name not in scene.b.norms or scene.is_same(name):
            continue
        a, b = described(scene.a, name), described(scene.b, name)
        if a is not None and b is not None:
            yield from _compared(scene, name, a, b)


def described(half: Half, name: str) -> dict[str, Any] | None:
    """Arguments of the formula of a norm, checked against its tensors; None where they do not fit."""
    found, known = half.norms[name], half.all_of(f"{name} in", name)
    if known is None or found.kind not in _KINDS:
        return None
    x, y = known
    weight, bias = parameters_of(found, half.parameters)
    best: tuple[float, dict[str, Any]] = (FITS, {})
    for gain in (weight, None):
        for offset in (found.weight_offset, 1.0 - found.weight_offset) if gain is not None else (0.0,):
            for shift in (bias, None):
                options: dict[str, Any] = {
                    "kind": found.kind,
                    "eps": found.eps,
                    "weight": gain,
                    "bias": shift,
                    "offset": offset,
                }
                gap = max(distance(norm(y, x.reshape(y.shape), **options), y), ROUNDING)
                if gap < 0.1 * best[0]:
                    best = gap, options
    return best[1] or fitted_norm(x.reshape(y.shape), y, found.kind, found.eps)


def fitted_norm(x: Tensor, y: Tensor, kind: str, eps: float | None) -> dict[str, Any] | None:
    """Gain and bias read from the tensors, where no parameter fits: y = gain·ẑ + bias."""
    z = norm(x, x, kind=kind, eps=eps).reshape(-1, x.shape[-1])
    flat = y.reshape(z.shape)
    bias: Tensor | None = None
    gain = (z * flat).sum(0) / z.square().sum(0)
    gap = distance(gain * z, flat)
    if gap > FITS and len(z) > 2:
        centred, mean = z - z.mean(0), flat.mean(0)
        gain = (centred * (flat - mean)).sum(0) / centred.square().sum(0)
        bias = mean - gain * z.mean(0)
        gap = distance(gain * z + bias, flat)
    if gap > FITS:
        return None
    return {"kind": kind, "eps": eps, "weight": gain, "bias": bias, "offset": 0.0}


def options_of(half: Half, name: str) -> dict[str, Any]:
    """Arguments of the formula of a norm: those that fit its tensors, else those of its parameters."""
    options = described(half, name)
    if options is not None:
        return options
    found = half.norms[name]
    weight, bias = parameters_of(found, half.parameters)
    return {
        "kind": found.kind,
        "eps": found.eps,
        "weight": weight,
        "bias": bias,
        "offset": found.weight_offset,
    }


def parameters_of(found: Norm, parameters: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """γ and β of a norm."""
    weight = parameters.get(found.weight) if found.weight is not None else None
    path = found.weight.rpartition(".")[0] if found.weight else found.path
    bias = parameters.get(f"{path}.bias" if path else "bias")
    if bias is not None and weight is not None and bias.shape != weight.shape:
        bias = None
    return weight, bias


def _compared(scene: Scene, name: str, a: dict[str, Any], b: dict[str, Any]) -> Reasons:
    where, subject = _WHERE.get(name, ("norm", "norm"))

    def reason(key: str, left: Any, right: Any, message: str, **change: Any) -> Reason:
        patches = scene.b.patch(name, "norm", (f"{name} in",), **{**b, **change})
        return Reason(key, name, left, right, message, patches)

    if a["kind"] != b["kind"]:
        yield reason(where, a["kind"], b["kind"], tell(f"The {subject}", a["kind"], b["kind"]), **a)
        return
    b_now = dict(b)
    if not _is_number(a["eps"], b["eps"]):
        message = tell(f"The ε of the {subject}", a["eps"], b["eps"])
        yield reason(f"{where}-eps", a["eps"], b["eps"], message, eps=a["eps"])
        b_now["eps"] = a["eps"]
    b.update(b_now)
    gain_a, gain_b = _gain(a), _gain(b)
    is_gain_same = gain_a is not None and gain_b is not None and distance(gain_a, gain_b) < FITS
    if a["offset"] != b["offset"] and gain_a is not None and gain_b is not None and not is_gain_same:
        words = {0.0: "w", 1.0: "1 + w"}
        left, right = words[a["offset"]], words[b["offset"]]
        message = f"The {subject} multiplies by {left} in A and by {right} in B, where w is its weight."
        yield reason(f"{where}-offset", left, right, message, offset=a["offset"])
    elif (gain_a is None) != (gain_b is None) or (
        gain_a is not None and gain_b is not None and distance(gain_a, gain_b) > FITS
    ):
        yield _gain_reason(scene, name, where, subject, a, b)
    shift_a, shift_b = a["bias"], b["bias"]
    if (_is_zero(shift_a) != _is_zero(shift_b)) or (
        shift_a is not None and shift_b is not None and distance(shift_a, shift_b) > FITS
    ):
        biased = not _is_zero(shift_a), not _is_zero(shift_b)
        has = {True: "has a bias", False: "has none"}
        message = (
            f"The {subject} {has[biased[0]]} in A and {has[biased[1]]} in B."
            if biased[0] != biased[1]
            else f"The bias of the {subject} has other values in A than in B."
        )
        yield reason(f"{where}-bias", *biased, message, bias=shift_a, weight=gain_a, offset=0.0)


def _gain_reason(
    scene: Scene, name: str, where: str, subject: str, a: dict[str, Any], b: dict[str, Any]
) -> Reason:
    gain_a, gain_b = _gain(a), _gain(b)
    patches = scene.b.patch(name, "norm", (f"{name} in",), **{**b, "weight": gain_a, "offset": 0.0})
    for left, right, one in ((gain_a, gain_b, "A"), (gain_b, gain_a, "B")):
        if left is not None and right is not None and distance(left, right + 1) < FITS:
            words = ("1 + w", "w") if one == "A" else ("w", "1 + w")
            message = (
                f"The gain of the {subject} in {one} is the other model's plus 1: one side multiplies by "
                "1 + w, or its weights were converted as if it did."
            )
            return Reason(f"{where}-offset", name, words[0], words[1], message, patches)
    if gain_a is None or gain_b is None:
        state = {True: "absent", False: "learnt"}
        left_word, right_word = state[gain_a is None], state[gain_b is None]
        message = f"The gain of the {subject} is {left_word} in A and {right_word} in B."
        return Reason(f"{where}-gain", name, left_word, right_word, message, patches)
    message = f"The gain of the {subject} has other values in A than in B."
    return Reason(f"{where}-gain", name, None, None, message, patches)


def _gain(options: dict[str, Any]) -> Tensor | None:
    """The factor itself."""
    weight = options["weight"]
    return None if weight is None else weight + options["offset"]


def _is_zero(bias: Tensor | None) -> bool:
    return bias is None or not bool(bias.any())


def _is_number(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return (a or 0.0) == (b or 0.0)
    return abs(a - b) <= 1e-4 * max(abs(a), abs(b))
