"""Batches of the regimes: tokens, masked tokens, pairs, digits and series, with the loss without the input.

Shapes: B sequences a batch, T tokens, V ids, C channels, H × W pixels.
"""

import functools
import math
import re
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.entropy import plain
from normscope.subjects.subject import LOSS_INPUTS

BYTES = 256
IGNORED = -100
MASKED, HIDDEN = 0.15, 0.3
"""Shares of tokens that a masked model has to fill in, and that a source leaves out."""
_MOST = 2**22
_IN_PACKAGES = {
    "licences": ("torch", "licenses"),
    "modules": ("torch", "torch/nn/modules/"),
    "arrays": ("numpy", r"^numpy/.*\.py$"),
    "solvers": ("scipy", r"^scipy/.*\.py$"),
    "learners": ("scikit-learn", r"^sklearn/.*\.py$"),
    "models": ("transformers", r"^transformers/models/[a-f].*/modeling_.*\.py$"),
}
"""Texts of installed packages: the package, and the pattern of its files' paths."""
_SERIES = 40_000


@functools.cache
def text(name: str) -> str:
    """A text: "library" (the standard library's source), "help" (its help topics), "licences" and others.

    "licences" of its parts and "modules", the source of its modules, are in the package of PyTorch; "arrays"
    is NumPy's source, "solvers" SciPy's, "learners" scikit-learn's, "models" that of models in transformers.
    """
    library = Path(sysconfig.get_path("stdlib"))
    if name == "library":
        files = sorted(library.glob("*.py")) + sorted(library.glob("[a-m]*/*.py"))
    elif name == "help":
        files = [library / "pydoc_data" / "topics.py"]
    else:
        package, part = _IN_PACKAGES[name]
        found = metadata.files(package) or []
        files = sorted(Path(str(f.locate())) for f in found if re.search(part, str(f)) and f.suffix != ".pyc")
    whole = "".join(file.read_text(errors="replace") for file in files if "test" not in file.parts)
    return whole[:_MOST]


@functools.cache
def ids_of(name: str, vocabulary: int) -> np.ndarray:
    """Ids (N,) of a text: bytes if `vocabulary` is 256, else of a byte-level BPE that was trained on it."""
    if vocabulary == BYTES:
        return np.frombuffer(text(name).encode(), np.uint8).astype(np.int64)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    lines = text(name).splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    return np.concatenate([np.array(each.ids, np.int64) for each in tokenizer.encode_batch(lines)])


def entropy_of(ids: np.ndarray) -> float:
    """Entropy of the frequencies of ids (N,), in nats."""
    return plain(np.bincount(ids))


def cross_entropy_of(targets: np.ndarray, ids: np.ndarray) -> float:
    """Mean cross-entropy of targets (M,) under the frequencies of ids (N,), in nats."""
    return float(np.log(len(ids) / np.bincount(ids)[targets]).mean())


def windows(ids: np.ndarray, size: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless windows (B, T) of ids at random places."""
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, len(ids) - length, size=size)
        yield torch.from_numpy(np.stack([ids[start : start + length] for start in starts]))


def masked(
    ids: np.ndarray, vocabulary: int, size: int, length: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless ids with 15 % of them masked, and labels, as for BERT; the mask's id is `vocabulary`.

    Of the chosen tokens, 80 % are masked, 10 % replaced by a random one, and 10 % kept.
    """
    generator = torch.Generator().manual_seed(seed)
    for window in windows(ids, size, length, seed):
        chosen = torch.rand(window.shape, generator=generator) < MASKED
        way = torch.rand(window.shape, generator=generator)
        random = torch.randint(vocabulary, window.shape, generator=generator)
        seen = torch.where(chosen & (way < 0.8), vocabulary, window)
        seen = torch.where(chosen & (way >= 0.9), random, seen)
        yield seen, torch.where(chosen, window, IGNORED)


def pairs(
    ids: np.ndarray, vocabulary: int, size: int, length: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless sources with 30 % of the tokens hidden, the decoder's inputs, and targets, all (B, T).

    The id `vocabulary` stands for a hidden token in the source and starts the decoder's input.
    """
    generator = torch.Generator().manual_seed(seed)
    for window in windows(ids, size, length, seed):
        hidden = torch.rand(window.shape, generator=generator) < HIDDEN
        inputs = torch.cat([torch.full((size, 1), vocabulary), window[:, :-1]], 1)
        yield torch.where(hidden, vocabulary, window), inputs, window


@functools.cache
def digits(kind: str) -> tuple[Tensor, Tensor]:
    """Images (N, 1, H, W) with mean 0 and variance 1, and their classes (N,).

    "plain" are scikit-learn's digits; "noisy" are turned by a quarter, twice as large, with noise of the
    same variance. "gratings" and "photographs" are no digits, see `_gratings` and `_photographs`.
    """
    if kind == "gratings":
        return _gratings()
    if kind == "photographs":
        return _photographs()
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.from_numpy(found.images).float()[:, None]
    pixels = (pixels - pixels.mean()) / pixels.std()
    if kind == "noisy":
        generator = torch.Generator().manual_seed(1)
        pixels = F.interpolate(pixels.rot90(1, (2, 3)), scale_factor=2, mode="bilinear")
        pixels = pixels + torch.randn(pixels.shape, generator=generator)
        pixels = pixels / pixels.std()
    return pixels, torch.from_numpy(found.target)


def _gratings() -> tuple[Tensor, Tensor]:
    """Sinusoidal gratings (2000, 1, 16, 16) of five directions and two periods, with noise, and the classes.

    The phase is random; the noise has one and a half times the variance of the grating.
    """
    generator = torch.Generator().manual_seed(2)
    classes = torch.randint(10, (2000,), generator=generator)
    angles, periods = math.pi * (classes % 5) / 5, 4.0 + 3.0 * (classes // 5)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    along = angles.cos()[:, None, None] * columns + angles.sin()[:, None, None] * rows
    phases = 2 * math.pi * torch.rand(2000, 1, 1, generator=generator)
    waves = torch.sin(2 * math.pi * along / periods[:, None, None] + phases)[:, None]
    pixels = waves + math.sqrt(0.75) * torch.randn(waves.shape, generator=generator)
    return (pixels - pixels.mean()) / pixels.std(), classes


def _photographs() -> tuple[Tensor, Tensor]:
    """Grey pieces (3000, 1, 16, 16) of scikit-learn's two photographs, at half their size, and the classes.

    A class is one of three vertical strips of one photograph.
    """
    from sklearn.datasets import load_sample_images

    generator = torch.Generator().manual_seed(3)
    photographs = torch.stack([torch.from_numpy(found.copy()) for found in load_sample_images().images])
    grey = F.avg_pool2d(photographs.float().mean(-1)[:, None], 2)[:, 0]
    classes = torch.randint(6, (3000,), generator=generator)
    width = grey.shape[2] // 3
    tops = torch.randint(grey.shape[1] - 15, classes.shape, generator=generator)
    lefts = torch.randint(width - 15, classes.shape, generator=generator) + width * (classes % 3)
    places = zip((classes // 3).tolist(), tops.tolist(), lefts.tolist(), strict=True)
    pixels = torch.stack([grey[k, top : top + 16, left : left + 16] for k, top, left in places])[:, None]
    return (pixels - pixels.mean()) / pixels.std(), classes


def images(kind: str, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless images (B, 1, H, W) and classes (B,)."""
    pixels, classes = digits(kind)
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(classes), (size,), generator=generator)
        yield pixels[chosen], classes[chosen]


@functools.cache
def series_of(kind: str) -> np.ndarray:
    """A series (N,) with mean 0 and variance 1.

    "waves" are three sinusoids with a slow change of phase and autoregressive noise; "chaos" is the
    Mackey–Glass equation with a delay of 17, sampled every 6 of its units, and observed with 5 % noise;
    "convection" is the first of Lorenz' three values, sampled every 0.06 of his units, with 10 % noise;
    "switching" is an autoregression that changes between a slow and a fast oscillation every 50 values or so;
    "storms" is one whose shocks have a size that wanders over a factor of 10.
    """
    generator = np.random.default_rng(7)
    if kind == "waves":
        time = np.arange(_SERIES)
        phase = np.cumsum(generator.normal(0, 0.02, (3, _SERIES)), 1)
        periods, sizes = np.array([[11.0], [24.0], [61.0]]), np.array([[1.0], [0.7], [0.5]])
        values = (sizes * np.sin(2 * math.pi * time / periods + phase)).sum(0)
        noise, shocks = np.zeros(_SERIES), generator.normal(0, 0.2, _SERIES)
        for i in range(1, _SERIES):
            noise[i] = 0.8 * noise[i - 1] + shocks[i]
        values = values + noise
    elif kind == "switching":
        values = _switching(generator)
    elif kind == "storms":
        values = _storms(generator)
    elif kind == "convection":
        values = _convection(_SERIES)
        values = values + generator.normal(0, 0.1 * values.std(), _SERIES)
    else:
        past, every, values = 17, 6, np.full(_SERIES * 6 + 100, 1.2)
        for i in range(past, len(values) - 1):
            late = values[i - past]
            values[i + 1] = values[i] + 0.2 * late / (1 + late**10) - 0.1 * values[i]
        values = values[100::every][:_SERIES]
        values = values + generator.normal(0, 0.05 * values.std(), _SERIES)
    return (values - values.mean()) / values.std()


def _switching(generator: np.random.Generator) -> np.ndarray:
    """A series (N,) of poles of radius 0.98 at angles of 0.25 or 1.1, with changes of probability 0.02."""
    values, shocks = np.zeros(_SERIES), generator.normal(0, 1, _SERIES)
    fast = np.cumsum(generator.random(_SERIES) < 0.02) % 2
    for i in range(2, _SERIES):
        angle = 1.1 if fast[i] else 0.25
        values[i] = 2 * 0.98 * math.cos(angle) * values[i - 1] - 0.98**2 * values[i - 2] + shocks[i]
    return values


def _storms(generator: np.random.Generator) -> np.ndarray:
    """A series (N,) of poles of radius 0.97 at an angle of 0.5; the shocks' log-size has a memory of 200."""
    values, size = np.zeros(_SERIES), 0.0
    for i in range(2, _SERIES):
        size = 0.995 * size + generator.normal(0, 0.06)
        shock = math.exp(size) * generator.normal()
        values[i] = 2 * 0.97 * math.cos(0.5) * values[i - 1] - 0.97**2 * values[i - 2] + shock
    return values


def _convection(number: int, every: int = 12, step: float = 0.005) -> np.ndarray:
    """The x (N,) of the Lorenz equations (σ 10, ρ 28, β 8/3) at every `every`-th step of Heun's method."""

    def change(point: np.ndarray) -> np.ndarray:
        x, y, z = point
        return np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    point, found = np.array([1.0, 1.0, 20.0]), np.empty(number)
    for i in range(-100, number):  # the first hundred values lead to the attractor
        for _ in range(every):
            slope = change(point)
            point = point + step / 2 * (slope + change(point + step * slope))
        if i >= 0:
            found[i] = point[0]
    return found


def series(kind: str, size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pieces (B, T, 1) of a series, and the values that follow, (B, T, 1)."""
    values = series_of(kind).astype(np.float32)
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, len(values) - length - 1, size=size)
        both = torch.from_numpy(np.stack([values[start : start + length + 1] for start in starts]))[..., None]
        yield both[:, :-1], both[:, 1:]


def next_token(logits: Any, ids: Any) -> Tensor:
    """Next-token cross-entropy of logits (B, T, V) on ids (B, T)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def squared(output: Any, batch: Any) -> Tensor:
    """Mean squared error of values (B, T, 1)."""
    return F.mse_loss(output, batch[LOSS_INPUTS][0])
