"""LayerNorm and BatchNorm in a small vision Transformer and in a small CNN, on real images.

Shapes: B images, C channels, H × W pixels.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.claims.form import Case, Evidence, Figure, Setup, claim, effect, flat, lines_at, plots
from normscope.claims.measure import NotMeasured
from normscope.claims.training import train_together
from normscope.errors import UsageError
from normscope.nn import ModelConfig, Output, Vision
from normscope.subjects.digits import Images, load_images
from normscope.train import Recipe

STEPS, BATCH = 300, 32
KEPT = 0.2
"""The share of the digits that is not trained on: the last ones, which other people wrote."""


def small_cnn(norm: str) -> nn.Module:
    """Three convolutions of 3 × 3, a norm and a ReLU after each, the mean over pixels, ten classes.

    The LayerNorm is one over channels and pixels together, as in GroupNorm(1).
    """
    widths, layers = (1, 16, 32, 32), list[nn.Module]()
    for num_in, num_out in itertools.pairwise(widths):
        layers += [
            nn.Conv2d(num_in, num_out, 3, stride=1 if num_in == 1 else 2, padding=1, bias=False),
            nn.BatchNorm2d(num_out) if norm == "batchnorm" else nn.GroupNorm(1, num_out),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def small_vit(norm: str) -> nn.Module:
    """A Pre-LN vision Transformer of 2 blocks on patches of 2 × 2 pixels, with any norm in its slots."""
    size: dict[str, Any] = {"depth": 2, "width": 32, "heads": 2, "image": 8, "patch": 2, "channels": 1}
    return Vision(ModelConfig(scheme="pre", norm=norm, init="xavier", **size))


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """(B, 1, H, W) → (B, 10)."""
    output: Tensor | Output = model(images)
    return output if isinstance(output, Tensor) else output.logits


MODELS: Mapping[str, Callable[[str], nn.Module]] = {"ViT": small_vit, "CNN": small_cnn}
NORMS = ("layernorm", "batchnorm")

RATES = (3e-3, 1e-2)
"""Learning rates; each norm counts with the better one."""
Found = Mapping[tuple[str, str], Mapping[int, float]]
"""Accuracy by model and norm, and by seed."""


@claim("C32")
def norms_of_images(setup: Setup) -> Evidence:
    """Accuracy on digits that were not trained on, both models with both norms."""
    images = _images()
    found = {(kind, norm): _best(setup, kind, norm, images) for kind in MODELS for norm in NORMS}
    cases = [_case(found, kind, seed) for kind in MODELS for seed in setup.seeds]
    points = [(norm, list(MODELS).index(kind) + 1.0, share) for (kind, norm), _, share in flat(found)]
    return Evidence(
        cases,
        Figure.largest("LayerNorm's lead over BatchNorm in a ViT, in points of accuracy", cases),
        plots=plots("C32", lines_at(points, marks=True)),
        notes=[
            f"{kind} with {norm}: {statistics.fmean(by_seed.values()):.1%} on average."
            for (kind, norm), by_seed in found.items()
        ],
        unmeasured=["larger images and longer training: the digits are what a package brings along"],
    )


def _case(found: Found, kind: str, seed: int) -> Case:
    """LayerNorm ahead in a ViT, BatchNorm ahead in a CNN."""
    own, other = NORMS if kind == "ViT" else NORMS[::-1]
    mine, theirs = found[kind, own][seed], found[kind, other][seed]
    where, part = f"{kind}: points of accuracy that {own} is ahead", "" if kind == "ViT" else "cnn"
    return effect(seed, where, 100 * (mine - theirs), part=part, most=100.0)


def _images() -> Images:
    try:
        return load_images("digits", KEPT)
    except UsageError as error:
        raise NotMeasured("scikit-learn, which brings the images, is not installed") from error


def _best(setup: Setup, kind: str, norm: str, images: Images) -> dict[int, float]:
    """The accuracy at the better of the learning rates, by seed."""
    tried = [_accuracies(setup, kind, norm, lr, images) for lr in RATES]
    return {seed: max(by_seed[seed] for by_seed in tried) for seed in setup.seeds}


def _accuracies(setup: Setup, kind: str, norm: str, lr: float, images: Images) -> dict[int, float]:
    """Share of the kept digits classified rightly after training, in eval mode, by seed."""
    models = [_model(kind, norm, seed) for seed in setup.seeds]
    batches = [images.batches(BATCH, seed) for seed in setup.seeds]
    configs = [Recipe(lr=lr, steps=STEPS, seed=seed, schedule="cosine") for seed in setup.seeds]
    train_together(models, batches, _loss, configs)
    return {seed: _accuracy(model.eval(), images) for seed, model in zip(setup.seeds, models, strict=True)}


def _model(kind: str, norm: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[kind](norm)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pixels, labels = batch
    return F.cross_entropy(logits_of(model, pixels[:, None]), labels)


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images) -> float:
    pixels = torch.from_numpy(images.pixels[images.end :])[:, None]
    labels = torch.from_numpy(images.labels[images.end :])
    return float((logits_of(model, pixels).argmax(dim=-1) == labels).float().mean())
