"""LayerNorm's gradient by the scale of its input, and how curved the loss is with norms and without.

Shapes: T tokens, V vocabulary, P parameters.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.claims.at_start import blocks_of
from normscope.claims.form import Case, Evidence, Figure, Line, Plot, Setup, Source, claim
from normscope.claims.norm_jacobian import by_autograd
from normscope.claims.sensitivity import BARE, NORMED
from normscope.linalg import layer_norm_jacobian
from normscope.nn import NORMS, build, swap
from normscope.nn.models import Model

WIDTHS = (4, 64, 256)
FACTORS = (1e-3, 0.1, 10.0, 1e3)
EXACT = 1e-10
"""Relative error that float64 explains."""
SCALES = (0.3, 1.0, 3.0)
TOKENS, VOCAB = 8, 16


@claim(
    "C9",
    Source("004", "§6.3", "LayerNorm 实际上对梯度施加了一个自适应的缩放因子"),
    Source("004", "§6.3", "本质上是对损失函数曲率的一种**平滑**"),
    Source("004", "§6.4", "使得优化器面对的损失曲面更加平滑且各向同性"),
    says="LayerNorm scales the gradient by 1/√(Var(x) + ε).",
    asks="the largest singular value of our norm's Jacobian, and of autograd's of torch's norm, is 1/√(var + "
    "ε) within 1e-10: deviations of 1e-3 to 1000, d = 4 … 256, ε = 0, 1e-5 and 1e-2; with norms the largest "
    "eigenvalue of the loss's Hessian and the condition number of its Gauss-Newton matrix (largest over "
    "median of those that can be nonzero) are below those of the same weights without norms: 4 blocks, "
    "Xavier weights × 0.3, 1, 3",
    parts={
        "flat": "With norms the loss is less curved at the start.",
        "even": "With norms the curvature is more alike in all directions.",
    },
)
def gradient_by_scale(setup: Setup) -> Evidence:
    """The scale law against autograd; curvature of one set of weights with and without norms."""
    cases = setup.cases(_scale_cases)
    bowls = {seed: {scale: _bowls(scale, seed) for scale in SCALES} for seed in setup.seeds}
    cases += [case for seed, found in bowls.items() for case in _bowl_cases(seed, found)]
    return Evidence(
        cases,
        Figure.largest("largest relative error", cases),
        plots=[_bowl_plot(bowls)],
        notes=[
            f"Xavier weights × {scale:g}, without norms, Pre-LN, Post-LN: {what} "
            + ", ".join(f"{_mean(bowls, scale, name, k):.3g}" for name in ("none", *NORMED))
            + "."
            for scale in SCALES
            for k, what in enumerate(("λ_max of the Hessian", "condition number"))
        ],
    )


def _scale_cases(seed: int) -> Iterator[Case]:
    for width in WIDTHS:
        z = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for eps in (0.0, 1e-5, 1e-2):
            for c in FACTORS:
                expected = 1 / math.sqrt(c * c * float(z.var(correction=0)) + eps)
                ours = torch.autograd.functional.jacobian(NORMS["layernorm"](width, eps).double(), c * z)
                assert isinstance(ours, Tensor)
                error = max(
                    abs(float(torch.linalg.matrix_norm(jacobian, 2)) / expected - 1)
                    for jacobian in (ours, by_autograd(c * z, eps), layer_norm_jacobian(c * z, None, eps))
                )
                where = f"d = {width}, ε = {eps:g}, input × {c:g}"
                yield Case(seed, where, error, error <= EXACT)


Bowl = tuple[float, float]
"""λ_max of the Hessian, and the condition number of the Gauss-Newton matrix."""


def _bowls(scale: float, seed: int) -> dict[str, Bowl]:
    """Of one set of weights without norms, in Pre-LN and in Post-LN."""
    torch.manual_seed(seed)
    bare = build("decoder", scheme=BARE, depth=4, width=16, heads=2, vocab=VOCAB, context=TOKENS)
    with torch.no_grad():
        for block in blocks_of(bare):
            for parameter in block.parameters():
                parameter.mul_(scale)
    ids, labels = torch.randint(VOCAB, (2, 1, TOKENS))
    found = {}
    for name in ("none", *NORMED):
        model = bare if name == "none" else swap(bare, name)
        found[name] = _bowl(model.double(), ids, labels)
    return found


def _bowl(model: Model, ids: Tensor, labels: Tensor) -> Bowl:
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(ids, labels).loss
        return sharpness(loss, list(weights.values())), condition(model, weights, ids)


def sharpness(loss: Tensor, weights: list[Tensor], steps: int = 20) -> float:
    """|λ_max| of the Hessian of `loss`, by power iteration."""
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    v = [torch.randn_like(w) for w in weights]
    size = 0.0
    for _ in range(steps):
        length = torch.sqrt(torch.stack([x.square().sum() for x in v]).sum())
        v = [x / length for x in v]
        dot = torch.stack([(g * x).sum() for g, x in zip(gradients, v, strict=True)]).sum()
        v = list(torch.autograd.grad(dot, weights, retain_graph=True))
        size = float(torch.sqrt(torch.stack([x.square().sum() for x in v]).sum()))
    return size


def condition(model: Model, weights: Mapping[str, Tensor], ids: Tensor) -> float:
    """Largest over median eigenvalue of the Gauss-Newton matrix, of the T(V−1) that can be nonzero.

    They are those of HᵗJJᵀHᵗ, (TV, TV), with Hᵗ the root of the loss's Hessian by logits.
    """

    def logits(values: dict[str, Tensor]) -> Tensor:
        called: Tensor = torch.func.functional_call(model, values, (ids,)).logits[0]
        return called

    held = {name: value.detach() for name, value in weights.items()}
    jacobians = torch.func.jacrev(logits)(held)
    j_TVP = torch.cat([j.flatten(2) for j in jacobians.values()], -1)
    p_TV = logits(held).softmax(-1)
    h_TVV = torch.diag_embed(p_TV) - p_TV[:, :, None] * p_TV[:, None]
    values, vectors = torch.linalg.eigh(h_TVV)
    root_TVV = vectors @ torch.diag_embed(values.clamp(min=0).sqrt()) @ vectors.mT
    rows = (root_TVV @ j_TVP).flatten(0, 1)
    spectrum = torch.linalg.eigvalsh(rows @ rows.T)[-TOKENS * (VOCAB - 1) :]
    middle = float(spectrum.median())
    return float(spectrum[-1]) / middle if middle > 1e-14 * float(spectrum[-1]) else math.inf


def _bowl_cases(seed: int, found: Mapping[float, Mapping[str, Bowl]]) -> Iterator[Case]:
    for scale, bowls in found.items():
        for name in NORMED:
            with_norm, without = bowls[name], bowls["none"]
            for k, part in enumerate(("flat", "even")):
                ratio = with_norm[k] / without[k]
                where = f"{name} over no norms, weights × {scale:g}"
                yield Case(seed, where, ratio, ratio < 1, part)


def _mean(bowls: Mapping[int, Mapping[float, Mapping[str, Bowl]]], scale: float, name: str, k: int) -> float:
    return sum(by_scale[scale][name][k] for by_scale in bowls.values()) / len(bowls)


def _bowl_plot(bowls: Mapping[int, Mapping[float, Mapping[str, Bowl]]]) -> Plot:
    lines = []
    for name in ("none", *NORMED):
        points = {scale: [by[scale][name][0] for by in bowls.values()] for scale in SCALES}
        lines.append(Line.over_seeds(name, points))
    return Plot("Sharpness at the start", "Xavier weights ×", "λ_max of the Hessian", lines, log="xy")
