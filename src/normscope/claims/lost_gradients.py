"""The part of a gradient that a norm erases, as it travels by the transpose, and the blind directions of one.

Shapes: B batch, T tokens, D width.
"""

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope.claims.experiments import ROUND_OFF, calls_of, jacobian, of_part, on_text, spread
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_at, lines_by, plots
from normscope.claims.one_layer import degenerate_layers, layers, pulled_back
from normscope.linalg import left_kernel, left_kernel_share

DEPTHS, WIDTHS, STARTS = (2, 6, 12, 24), (32, 64), ("xavier", "normal")


@dataclass(frozen=True)
class Crossing:
    """A real gradient at a norm of the stream.

    Attributes:
        share: of its energy, erased there.
        leak: ‖JᵀPg‖/(‖J‖‖Pg‖), P onto the left kernel: what of the erased part does get through.
        variance: the smallest of a token that enters, in ε.
    """

    share: float
    leak: float
    variance: float


def crossings(scheme: str, start: str, depth: int, width: int, seed: int, setup: Setup) -> list[Crossing]:
    """Crossings of every norm of the stream, first to last, in a model at its start, on text."""
    model = f"nn:decoder,scheme={scheme},init={start},depth={depth},width={width},heads=2"
    subject = on_text(model, seed, setup)
    is_on_stream = "final_norm" if scheme == "pre" else "stream"
    named = subject.model.named_modules()
    norms = [m for name, m in named if isinstance(m, nn.LayerNorm) and name.endswith(is_on_stream)]
    with calls_of(norms) as calls:
        loss = subject.loss()
    gradients = torch.autograd.grad(loss, [out for _, _, out in calls])
    return [_crossing(norm, z, g) for (norm, z, _), g in zip(calls, gradients, strict=True)]


def _crossing(norm: nn.Module, z: Tensor, gradient: Tensor) -> Crossing:
    assert isinstance(norm, nn.LayerNorm)
    z, g, weight = z.detach().double().requires_grad_(), gradient.double(), norm.weight.detach().double()
    shape = (z.shape[-1],)
    z_hat = functional.layer_norm(z.detach(), shape, eps=norm.eps)
    basis, _ = left_kernel(z_hat, weight, centred=True)
    erased = torch.einsum("...dr,...er,...e->...d", basis, basis, g)
    out = functional.layer_norm(z, shape, weight, norm.bias.detach().double(), norm.eps)
    (through,) = torch.autograd.grad(out, z, erased)
    smallest = float(z.detach().var(-1, correction=0).min())
    gain = float(weight.abs().max()) / (smallest + norm.eps) ** 0.5
    return Crossing(
        share=float(left_kernel_share(g, z_hat, weight, centred=True)),
        leak=float(through.norm() / (gain * erased.norm())),
        variance=smallest / norm.eps,
    )


@claim("A7")
def erased_at_each_norm(setup: Setup) -> Evidence:
    """Shares of real gradients, norm by norm, in models at their start; Pre-LN's final norm beside them."""
    cases: list[Case] = []
    shares: dict[int, list[float]] = {seed: [] for seed in setup.seeds}
    for seed, start, depth, width in itertools.product(setup.seeds, STARTS, DEPTHS, WIDTHS):
        found = crossings("post", start, depth, width, seed, setup)
        where = f"{start} weights, {depth} blocks, d = {width}"
        for index, each in enumerate(found, 1):
            norm = f"{where}, norm {index}, smallest variance {each.variance:.3g} ε"
            cases.append(Case.at_most(seed, norm, each.leak, 1e-3, met=each.variance > 1000))
        lost = 1 - math.prod(1 - each.share for each in found)
        at: dict[str, float | str] = {"stack": f"{start}, d = {width}", "depth": depth}
        cases.append(Case(seed, where, lost, lost >= 0.5, "vanishing", at=at))
        shares[seed] += [each.share * width / 2 for each in found]
    final = [crossings("pre", "xavier", 6, 32, seed, setup)[-1].share for seed in setup.seeds]
    medians = {seed: statistics.median_low(each) for seed, each in shares.items()}
    return Evidence(
        cases,
        Figure("median share erased at a norm, in units of 2/d", medians),
        plots=plots("A7", lines_by(of_part(cases, "vanishing"), "depth", "stack")),
        notes=[
            f"Shares erased at a norm run from {spread(itertools.chain(*shares.values()))} times 2/d.",
            f"Pre-LN's final norm, the one norm on its stream, takes {spread(final, '.1%')} at d = 32, "
            f"where 2/d is {2 / 32:.1%}.",
        ],
    )


@claim("A19")
def erased_again(setup: Setup) -> Evidence:
    """Shares by the place of the norm; beside them a stack whose branches are zero."""
    cases: list[Case] = []
    points: list[tuple[str, float, float]] = []
    last: list[float] = []
    for seed, start, width in itertools.product(setup.seeds, STARTS, WIDTHS):
        shares = [each.share * width / 2 for each in crossings("post", start, 12, width, seed, setup)]
        where = f"{start} weights, 12 blocks, d = {width}"
        cases.append(Case.at_least(seed, where, statistics.median(shares[:-1]), 0.5))
        last.append(shares[-1])
        points += [(f"{start}, d = {width}", index, share) for index, share in enumerate(shares, 1)]
    zero = max(_share_without_branches(seed) for seed in setup.seeds)
    medians = {s: statistics.median(case.value for case in cases if case.seed == s) for s in setup.seeds}
    return Evidence(
        cases,
        Figure("median share erased at a norm below the last, in units of 2/d", medians),
        plots=plots("A19", lines_at(points)),
        notes=[
            f"The last norm takes {spread(last)} times 2/d.",
            "What one norm takes away is gone before the norm below it, and where the branch adds little the "
            f"two take the same: without branches the lower one finds {zero:.0e} left to erase.",
        ],
    )


def _share_without_branches(seed: int) -> float:
    """The share erased of a drawn gradient at the lower of two norms with nothing between them."""
    torch.manual_seed(seed)
    z = torch.randn(64, dtype=torch.float64)
    low = functional.layer_norm(z, (64,), eps=0.0).requires_grad_()
    high = functional.layer_norm(low, (64,), eps=0.0)
    (gradient,) = torch.autograd.grad(high, low, torch.randn(64, dtype=torch.float64))
    return float(left_kernel_share(gradient, low, None, centred=True))


@claim("A18")
def right_and_left(setup: Setup) -> Evidence:
    """Right kernel against left kernel, by the backward pass itself."""
    cases = setup.cases(_side_cases)
    return Evidence(cases, Figure.largest("largest share of ‖J‖ that gets through along v", cases))


def _side_cases(seed: int) -> Iterator[Case]:
    for layer in (*layers("post", seed), *degenerate_layers(seed)):
        if layer.x.numel() > 256:
            continue
        _, values, vectors = torch.linalg.svd(jacobian(layer, layer.x))
        size = float(values[0])
        if size < ROUND_OFF:
            continue
        lost = vectors[values < 1e-9 * size]  # rows v
        z_hat = functional.layer_norm(layer.joined[0], layer.x.shape[-1:], eps=layer.norm.eps)
        left = torch.block_diag(*left_kernel(z_hat, layer.norm.weight.detach(), centred=True)[0]).T
        arriving = pulled_back(layer, torch.randn(4, layer.x.numel(), dtype=torch.float64))
        for part, value in (
            ("", pulled_back(layer, lost).norm(dim=1).max() / size),
            ("left", pulled_back(layer, left).norm(dim=1).max() / size),
            ("arriving", (arriving @ lost.T).abs().max() / arriving.norm(dim=1).max()),
        ):
            yield Case.at_most(seed, layer.name, float(value), 1e-7, part)
