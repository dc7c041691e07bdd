"""Activation of a feed-forward, and the roles of gate and up."""

from torch import Tensor

from normscope.compare.formulas import ACTIVATIONS, activation
from normscope.compare.reasons.scene import (
    FITS,
    Half,
    Reason,
    Reasons,
    Scene,
    also,
    distance,
    factor,
    figure,
    tell,
)

_ROUNDING = 1e-12


def reasons(scene: Scene) -> Reasons:
    """Another activation, gate and up swapped, or a factor after the activation."""
    a, b = _described(scene.a), _described(scene.b)
    if a is None or b is None:
        return
    gated = "gate" in scene.b.steps
    before = ("gate", "up") if gated else ("up",)
    if gated and "gate" in scene.a.steps and _is_swapped(scene):
        message = "Gate and up are swapped: the matrix whose output passes the activation in A does not in B."
        patches = scene.b.patch("act", "activation", ("up", "gate"), name=a[0])
        yield Reason("gate-up", "act", "gate", "up", message, patches)
        return
    if a[0] != b[0]:
        patches = scene.b.patch("act", "activation", before, name=a[0])
        others = also("the activation", (("A", a[2]), ("B", b[2])))
        yield Reason("activation", "act", a[0], b[0], tell("The activation", a[0], b[0]), patches, others)
    elif abs(a[1] - b[1]) > FITS * abs(a[1]):
        patches = scene.b.patch("act", "scale", by=a[1] / b[1])
        message = f"The factor after the activation is {figure(a[1])} in A and {figure(b[1])} in B."
        yield Reason("hidden-scale", "act", a[1], b[1], message, patches)


def _described(half: Half) -> tuple[str, float, list[str]] | None:
    """Name of the activation, a factor after it, and other names that fit as well; None where none fits.

    Of several that fit to rounding, one without a factor comes first, and then the order of `ACTIVATIONS`.
    """
    gated = "gate" in half.steps
    found = half.all_of("gate", "up", "act") if gated else half.all_of("up", "act")
    if found is None or len({t.numel() for t in found}) != 1:
        return None
    *before, after = found
    sources = [t.reshape(after.shape) for t in before]
    fits: list[tuple[bool, float, str, float]] = []
    for name in ACTIVATIONS:
        value = activation(after, *sources, name=name)
        gap, c = distance(value, after), 1.0
        if gap > FITS:
            c, gap = factor(after, value)
        fits.append((c != 1.0, gap, name, c))
    least = min(gap for _, gap, _, _ in fits)
    if least > FITS:
        return None
    near = sorted((fit for fit in fits if fit[1] < max(10 * least, _ROUNDING)), key=lambda fit: fit[0])
    _, _, name, c = near[0]
    return name, c, [other for _, _, other, factor_ in near[1:] if factor_ == c]


def _is_swapped(scene: Scene) -> bool:
    """Whether B's gate has the values of A's up, and the other way round, from the same input."""
    steps: list[Tensor] = [half.steps[name] for half in (scene.a, scene.b) for name in ("gate", "up")]
    gate_a, up_a, gate_b, up_b = steps
    return distance(gate_a, up_b) < FITS and distance(up_a, gate_b) < FITS
