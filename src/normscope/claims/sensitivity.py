"""Sensitivity with norms and without: outputs to weights and inputs, gradients to scale, and curvature.

Shapes: B batch, T tokens, D width, V vocabulary, P parameters.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.claims.at_start import blocks_of
from normscope.claims.experiments import distance, gaussian, jacobian
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, flat, lines_at, plots
from normscope.claims.norm_jacobian import by_autograd
from normscope.claims.training import Setting, train_changed
from normscope.linalg import layer_norm_jacobian
from normscope.nn import NORMS, SCHEMES, Decoder, Slot, build, swap
from normscope.nn.models import Model
from normscope.nn.scheme import Role

BARE, NORMED = "residual-no-norm", ("pre", "post")
ROLES: tuple[Role, ...] = ("q", "k", "v", "o", "up", "down")
PLACED = ("post", "pre", "peri", "res-post", "olmo2")
NOISE = 0.01


@claim("C12")
def scaled_weights(setup: Setup) -> Evidence:
    """Doubled maps, one by one, in each placement; all weights a little off."""
    cases = setup.cases(lambda seed: _doubled_cases(seed, setup.sizes(6, 4)))
    post = [case for case in cases if case.where.startswith("post,")]
    figure = Figure.largest("largest relative change of Post-LN's logits by one doubled map", post)
    bare = max(case.value for case in cases if case.where.startswith(BARE))
    if not setup.fresh:  # the part has no condition to confirm
        cases += setup.cases(_damped_cases)
    notes = [f"Without norms a doubled map changes the logits by up to {bare:.3g} of their norm."]
    return Evidence(cases, figure, notes=notes)


def _models(seed: int, depth: int = 6) -> Iterator[tuple[str, Model]]:
    """One set of weights without norms and in each placement, with its ids."""
    torch.manual_seed(seed)
    bare = build(
        "decoder", scheme=BARE, depth=depth, width=32, heads=2, vocab=64, context=16, activation="relu"
    )
    yield BARE, bare.double()
    for name in PLACED:
        yield name, swap(bare, name).double()


def _ids(seed: int) -> Tensor:
    return torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(seed))


def is_read_by_norm(name: str, role: Role) -> bool:
    """True if a norm reads the map's output, by way of maps and ReLUs alone."""
    if role in ("q", "k"):
        return SCHEMES[name].inside.qk_norm is not None
    placement = SCHEMES[name].placement
    return not callable(placement) and Slot.BRANCH_OUT in placement


@torch.no_grad()
def _doubled_cases(seed: int, depth: int) -> Iterator[Case]:
    ids = _ids(seed)
    for name, model in _models(seed, depth):
        before, block = model(ids).logits, blocks_of(model)[2]
        for role in ROLES:
            module = getattr(block.attention, role, None) or getattr(block.feed_forward, role)
            module.weight.mul_(2)
            change, met = distance(model(ids).logits, before), is_read_by_norm(name, role)
            module.weight.div_(2)
            yield Case.at_most(seed, f"{name}, {role} doubled", change, 0.01, met=met)


@torch.no_grad()
def _damped_cases(seed: int) -> Iterator[Case]:
    """Geometric means over four sets of weights."""
    draws = [{n: _noise_move(m, seed) for n, m in _models(100 * seed + draw)} for draw in range(4)]
    for name in PLACED:
        ratio = statistics.geometric_mean(moves[name] / moves[BARE] for moves in draws)
        yield Case(seed, f"{name}, change over that without norms", ratio, ratio < 1, "damped")


def _noise_move(model: Model, seed: int) -> float:
    """Relative change of the logits by errors of 1 % in each weight of the blocks; rms of four draws."""
    ids, squares = _ids(seed), []
    before = model(ids).logits
    names = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in n]
    for draw in range(4):
        generator = torch.Generator().manual_seed(100 * seed + draw)
        noisy = {
            name: weight * (1 + NOISE * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
            for name, weight in ((name, model.get_parameter(name)) for name in names)
        }
        squares.append(distance(torch.func.functional_call(model, noisy, (ids,)).logits, before) ** 2)
    return statistics.fmean(squares) ** 0.5


STEPS = 100


@claim("C13")
def noisy_inputs(setup: Setup) -> Evidence:
    """Relative change of the output over that of the input, by kind of noise."""
    runs = {n: train_changed(setup, Setting(scheme=n, depth=6, steps=STEPS, lr=1e-3)) for n in NORMED}
    cases = setup.cases(
        lambda seed: _noise_cases(seed, {name: by_seed[seed].model for name, by_seed in runs.items()})
    )
    return Evidence(
        cases,
        Figure.largest("largest change of the output over that of the input", cases),
        notes=[
            f"{name}: at most {max(c.value for c in cases if c.where.startswith(name)):.3g}."
            for name in ("pre, drawn", "pre, trained", "post, drawn", "post, trained")
        ],
    )


@torch.no_grad()
def _gains(model: nn.Module, seed: int) -> dict[str, float]:
    """Share by which the output changes over that by which the input does, by kind of noise."""
    assert isinstance(model, Decoder)
    ids, generator = _ids(seed), torch.Generator().manual_seed(seed)
    at = torch.arange(ids.shape[1])[None]
    x_BTD = model.embedding(ids, at)
    y_BTD = functional.normalize(model.run(x_BTD), dim=-1)
    noise = torch.randn(x_BTD.shape, generator=generator, dtype=x_BTD.dtype) * x_BTD.std()
    outlier = x_BTD.clone()
    outlier[..., 0] += 10 * x_BTD.std()
    wrong = ids.clone()
    wrong[:, 5] = (wrong[:, 5] + 1 + seed) % model.config.vocab
    noisy = {
        "1 % noise": x_BTD + 0.01 * noise,
        "10 % noise": x_BTD + 0.1 * noise,
        "an outlier": outlier,
        "a wrong token": model.embedding(wrong, at),
    }
    return {
        name: distance(functional.normalize(model.run(x), dim=-1), y_BTD) / distance(x, x_BTD)
        for name, x in noisy.items()
    }


def _noise_cases(seed: int, trained: Mapping[str, nn.Module]) -> Iterator[Case]:
    drawn = {name: _gains(model, seed) for name, model in _models(seed) if name in (BARE, *NORMED)}
    for name in NORMED:
        for kind, gain in drawn[name].items():
            yield Case(seed, f"{name}, drawn, {kind}", gain, gain <= 1.05, "drawn")
            ratio = gain / drawn[BARE][kind]
            yield Case(seed, f"{name}, {kind}, change over that without norms", ratio, ratio < 1, "better")
        for kind, gain in _gains(trained[name].double(), seed).items():
            part = "outlier" if kind == "an outlier" else ""
            yield Case(seed, f"{name}, trained, {kind}", gain, gain <= 1.05, part)


WIDTHS = (4, 64, 256)
FACTORS = (1e-3, 0.1, 10.0, 1e3)
EXACT = 1e-10
"""Relative error that float64 explains."""
SCALES = (0.3, 1.0, 3.0)
TOKENS, VOCAB = 8, 16


@claim("C9")
def gradient_by_scale(setup: Setup) -> Evidence:
    """The scale law against autograd; curvature of one set of weights with and without norms."""
    cases = setup.cases(_scale_cases)
    bowls = setup.by_seed(SCALES, _bowls)
    for scale, seed, found in flat(bowls):
        for name in NORMED:
            where = f"{name} over no norms, weights × {scale:g}"
            for part, own, bare in zip(("flat", "even"), found[name], found["none"], strict=True):
                cases.append(Case(seed, where, own / bare, own / bare < 1, part))
    names = ("none", *NORMED)
    sharpest = [(name, scale, found[name][0]) for name in names for scale, _, found in flat(bowls)]
    return Evidence(
        cases,
        Figure.largest("largest relative error", cases),
        plots=plots("C9", lines_at(sharpest)),
        notes=[
            f"Xavier weights × {scale:g}, without norms, Pre-LN, Post-LN: {figure} "
            + ", ".join(f"{statistics.fmean(found[n][k] for found in by_seed.values()):.3g}" for n in names)
            + "."
            for scale, by_seed in bowls.items()
            for k, figure in enumerate(("λ_max of the Hessian", "condition number"))
        ],
    )


def _scale_cases(seed: int) -> Iterator[Case]:
    for width, eps, factor in itertools.product(WIDTHS, (0.0, 1e-5, 1e-2), FACTORS):
        z = gaussian(seed, width)
        expected = 1 / math.sqrt(factor**2 * float(z.var(correction=0)) + eps)
        z *= factor
        ours = jacobian(NORMS["layernorm"](width, eps).double(), z)
        jacobians = (ours, by_autograd(z, eps), layer_norm_jacobian(z, None, eps))
        error = max(abs(float(torch.linalg.matrix_norm(each, 2)) / expected - 1) for each in jacobians)
        yield Case(seed, f"d = {width}, ε = {eps:g}, input × {factor:g}", error, error <= EXACT)


Bowl = tuple[float, float]
"""λ_max of the Hessian, and the condition number of the Gauss-Newton matrix."""


def _bowls(scale: float, seed: int) -> dict[str, Bowl]:
    """The bowls of one set of weights without norms, in Pre-LN and in Post-LN."""
    torch.manual_seed(seed)
    bare = build("decoder", scheme=BARE, depth=4, width=16, heads=2, vocab=VOCAB, context=TOKENS)
    with torch.no_grad():
        for block in blocks_of(bare):
            for parameter in block.parameters():
                parameter.mul_(scale)
    ids, labels = torch.randint(VOCAB, (2, 1, TOKENS))
    return {
        name: _bowl((bare if name == "none" else swap(bare, name)).double(), ids, labels)
        for name in ("none", *NORMED)
    }


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
