"""Small real images: the 1797 digits of 8 × 8 pixels in scikit-learn (extra `vision`).

Shapes: N images, B images of a batch, C channels, H × W pixels.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normscope.errors import UsageError
from normscope.subjects.corpus import Source
from normscope.subjects.text import SHARE, kept

IMAGES = ("digits",)
CLASSES = 10
_WHITE = 16.0


@dataclass(frozen=True, eq=False)
class Images(Source):
    """Images (N, 8, 8) with mean 0 and variance 1, and their classes (N,)."""

    pixels: np.ndarray
    labels: np.ndarray

    def __str__(self) -> str:
        return f"{len(self.labels)} digits of scikit-learn{kept(self.validation, 'them')}"

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Number of images of each class, (V,)."""
        return np.bincount(self.labels[self.begin : self.end])

    def batches(self, num_images: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless images (B, 8, 8) and classes (B,), determined by `seed`."""
        if self.begin == self.end:
            raise UsageError(f"{self} (none left for it)", "at least one image", "keep a larger share")
        generator = np.random.default_rng(seed)
        while True:
            chosen = generator.integers(self.begin, self.end, size=num_images)
            yield torch.from_numpy(self.pixels[chosen]), torch.from_numpy(self.labels[chosen])


def load_images(name: str, validation: float = 0.0) -> Images:
    """The images called `name`; UsageError if the name is unknown or scikit-learn is missing."""
    if name not in IMAGES:
        raise UsageError(f'images "{name}"', " or ".join(IMAGES), "leave --images out for noise")
    SHARE.require("validation", validation)
    pixels, labels = _digits()
    return Images(pixels, labels, size=len(labels), validation=validation)


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            'images "digits"', "scikit-learn to be installed", "run pip install 'normscope[vision]'"
        ) from error
    digits = load_digits()
    pixels = digits.images / _WHITE
    scaled = (pixels - pixels.mean()) / pixels.std()
    return scaled.astype(np.float32), digits.target.astype(np.int64)


def resized(images: Tensor, channels: int, height: int, width: int) -> Tensor:
    """(B, 8, 8) → (B, C, H, W), bilinear, the same in each channel."""
    larger = F.interpolate(images[:, None], (height, width), mode="bilinear", antialias=True)
    return larger.expand(-1, channels, -1, -1).contiguous()


def require_classes(num_classes: int, given: str, option: str) -> None:
    """Raise UsageError if a model has too few outputs for the ten digits."""
    if num_classes < CLASSES:
        raise UsageError(
            f"{given} with {num_classes} classes",
            f"at least {CLASSES}, one for each digit",
            f"add {option}={CLASSES}",
        )
