"""LayerNorm and BatchNorm in a small vision Transformer and in a small CNN, on real images.

Shapes: B images, C channels, H × W pixels.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure, Line, Plot
from normscope.claims.look import Look
from normscope.claims.put_to_test import NotMeasured
from normscope.claims.sources import Source
from normscope.errors import UsageError
from normscope.nn import Output, build
from normscope.subjects.digits import Images, load_images
from normscope.train import TrialConfig, in_flushed_thread, many_trials

STEPS, BATCH = 200, 16
RATES = (1e-3, 3e-3)
KEPT = 0.2
"""The share of the digits that is not trained on: the last ones, which other people wrote."""
Batch = Mapping[str, Tensor]


class SmallCNN(nn.Module):
    """Three convolutions of 3 × 3, a norm and a ReLU after each, the mean over pixels, ten classes.

    Args:
        norm: "batchnorm", or "layernorm": one over channels and pixels together, as in GroupNorm(1).
    """

    def __init__(self, norm: str) -> None:
        super().__init__()
        widths = (1, 16, 32, 32)
        layers: list[nn.Module] = []
        for num_in, num_out in itertools.pairwise(widths):
            layers += [
                nn.Conv2d(num_in, num_out, 3, stride=1 if num_in == 1 else 2, padding=1, bias=False),
                nn.BatchNorm2d(num_out) if norm == "batchnorm" else nn.GroupNorm(1, num_out),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, H, W) → (B, 10)."""
        return self.head(self.body(images).mean(dim=(-2, -1)))


class SmallViT(nn.Module):
    """A Pre-LN vision Transformer of 2 blocks on patches of 2 × 2 pixels, with any norm in its slots."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.model = build(
            "vision", scheme="pre", norm=norm, depth=2, width=32, heads=2, image=8, patch=2, channels=1
        )

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, H, W) → (B, 10)."""
        output = self.model(images)
        assert isinstance(output, Output), "a model of ours"
        return output.logits


MODELS: Mapping[str, Callable[[str], nn.Module]] = {"ViT": SmallViT, "CNN": SmallCNN}
NORMS = ("layernorm", "batchnorm")


@dataclass(frozen=True)
class Setting:
    """What is trained: which model, with which norm, at which rate."""

    kind: str
    norm: str
    lr: float


@claim(
    "C32",
    Source("004", "§3.4 selection", "同样选用 **Layer Norm**"),
    Source("004", "§3.4 selection", "首选 **Batch Norm** 或 **Instance Norm**"),
    Source("004", "§8.4", "LN能更好地处理Patch之间的关系"),
    Source("004", "§8.4", "**BatchNorm** 依然是首选"),
    says="LayerNorm suits a vision Transformer better than BatchNorm.",
    hypothesis="the 1797 digits of 8 × 8 pixels, the last fifth kept: a ViT of 2 blocks with LayerNorm "
    "classifies more of them after 200 steps of 16 images than with BatchNorm, each at the better of two "
    "rates",
    kind=Kind.TENDENCY,
    parts={"cnn": Sentence("BatchNorm suits a CNN better than LayerNorm.")},
)
def norms_of_images(look: Look) -> Evidence:
    """Accuracy on digits that were not trained on, both models with both norms."""
    images = _images()
    settings = [Setting(kind, norm, lr) for kind in MODELS for norm in NORMS for lr in RATES]
    found = {setting: _accuracies(look, setting, images) for setting in settings}
    cases, ahead = [], {}
    for seed in look.seeds:
        for kind, (own, other) in {"ViT": NORMS, "CNN": NORMS[::-1]}.items():
            mine, theirs = (_best(found, kind, norm, seed) for norm in (own, other))
            where = f"{kind}: {own} {mine:.1%}, {other} {theirs:.1%}"
            part = "" if kind == "ViT" else "cnn"
            points = 100 * (mine - theirs)
            cases.append(Case(seed=seed, where=where, value=points, holds=mine > theirs, part=part))
            if not part:
                ahead[seed] = points
    lines = [
        Line.over_seeds(
            f"{kind}, {norm}", {lr: list(found[Setting(kind, norm, lr)].values()) for lr in RATES}
        )
        for kind in MODELS
        for norm in NORMS
    ]
    return Evidence(
        cases=cases,
        figure=Figure("LayerNorm's lead over BatchNorm in a ViT, in points of accuracy", ahead),
        plots=[Plot("Digits not trained on", "rate", "share classified rightly", lines, log="x")],
        notes=[
            f"{kind} with {norm}: "
            f"{statistics.fmean(_best(found, kind, norm, seed) for seed in look.seeds):.1%} on average."
            for kind in MODELS
            for norm in NORMS
        ],
        of="seeds",
    )


def _images() -> Images:
    try:
        return load_images("digits", KEPT)
    except UsageError as error:
        raise NotMeasured("scikit-learn, which brings the images, is not installed") from error


def _best(found: Mapping[Setting, Mapping[int, float]], kind: str, norm: str, seed: int) -> float:
    return max(found[Setting(kind, norm, lr)][seed] for lr in RATES)


def _accuracies(look: Look, setting: Setting, images: Images) -> dict[int, float]:
    """Share of the kept digits classified rightly, in eval mode, by seed."""
    models = []
    for seed in look.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            models.append(MODELS[setting.kind](setting.norm))
    trials = many_trials(
        models,
        [_batches(images, seed) for seed in look.seeds],
        _loss,
        [TrialConfig(lr=setting.lr, steps=STEPS, seed=seed) for seed in look.seeds],
    )

    def run(checkpoint: Callable[[], None]) -> None:
        for _ in range(STEPS):
            checkpoint()
            trials.advance()

    in_flushed_thread(run)
    accuracies = {}
    for k, seed in enumerate(look.seeds):
        with torch.random.fork_rng(devices=[]):
            model = MODELS[setting.kind](setting.norm)
        trials.export(k, model)
        accuracies[seed] = _accuracy(model.eval(), images)
    return accuracies


def _batches(images: Images, seed: int) -> Iterator[Batch]:
    for pixels, labels in images.batches(BATCH, seed):
        yield {"images": pixels[:, None], "labels": labels}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images) -> float:
    pixels = torch.from_numpy(images.pixels[images.end :])[:, None]
    labels = torch.from_numpy(images.labels[images.end :])
    return float((model(pixels).argmax(dim=-1) == labels).float().mean())
