"""Mixtures of experts: the weights with which the outputs of a token's experts are summed."""

import torch

from normscope.compare.reasons.scene import FITS, Reason, Reasons, Scene, figure, residual


def reasons(scene: Scene) -> Reasons:
    """Outputs of the same experts that differ by a factor for each token."""
    both = scene.both("output")
    if both is None or not _is_mixture(scene) or scene.is_same("output"):
        return
    (a,), (b,) = both
    if a.shape != b.shape:
        return
    factors = (a * b).sum(-1, keepdim=True) / b.square().sum(-1, keepdim=True).clamp_min(1e-300)
    if residual(a, factors * b) > FITS:
        return
    spread = float((factors - factors.mean()).abs().max())
    words = f"{figure(float(factors.mean()))} times" if spread < FITS else "a multiple, for each token,"
    message = (
        f"The sum of the experts' outputs in A is {words} that in B, as where the weights of a token's "
        "experts are normalised or scaled on one side alone."
    )
    patches = scene.b.patch("output", "scale", by=factors)
    yield Reason("expert-weights", "output", None, None, message, patches)


def _is_mixture(scene: Scene) -> bool:
    """Whether the branch has no last projection that every token passes once."""
    down, output = (scene.b.steps.get(name, torch.empty(0)) for name in ("down", "output"))
    return down.numel() != output.numel()
