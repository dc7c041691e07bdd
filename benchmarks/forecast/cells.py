"""The held-out grid of `normscope bench forecast`: models, learning rates, text, and training results.

No cell of `LADDERS` was used to tune the rule: widths, depths and seeds differ, and more than half of the
schemes and models are new. The results of 300 training steps are kept in truth.json. To make it:

    python -m benchmarks.forecast.grid truth

Results are only comparable on the same bytes of text.
"""

import copy
import hashlib
import importlib.metadata
import json
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normscope.errors import UsageError
from normscope.subjects import Subject, load
from normscope.train import (
    CRITERION_STEPS,
    Recipe,
    Trials,
    endless,
    in_flushed_thread,
    last_loss,
    many_trials,
    trains,
)

KEPT = Path(__file__).parent / "truth.json"
RATES = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)


def licences() -> Path:
    """The licences in PyTorch's wheel, a third of a MiB of legal English, which were not used for tuning."""
    files = importlib.metadata.files("torch") or []
    found = [
        file for file in files if str(file).endswith("licenses/LICENSE") and "third_party" not in str(file)
    ]
    if not found:
        raise UsageError(
            "a PyTorch without its licence files", "PyTorch installed from a wheel", "install one"
        )
    return Path(str(found[0].locate())).parent


def help_topics() -> Path:
    """Python's help on its language, the training text of `SEEN`."""
    return Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"


@dataclass(frozen=True)
class Ladder:
    """One model and its training settings, at each of `RATES`; `new` if the rule was not tuned on the scheme.

    `text` returns the training text; None is the standard library's source.
    """

    model: str
    optimizer: str
    seed: int
    new: bool = False
    text: Callable[[], Path] | None = licences

    def subject(self) -> Subject:
        """The model on its text."""
        return load(self.model, seed=self.seed, text=None if self.text is None else self.text())

    def config(self, lr: float) -> Recipe:
        """The training settings of the truth."""
        return Recipe(optimizer=self.optimizer, lr=lr, seed=self.seed, steps=CRITERION_STEPS)


def _ours(scheme: str, depth: int, width: int = 48, init: str | None = None) -> str:
    spec = f"nn:decoder,scheme={scheme},depth={depth},width={width},heads={width // 16}"
    return spec if init is None else f"{spec},init={init}"


LADDERS: tuple[Ladder, ...] = (
    Ladder(_ours("b2t", 7), "adam", 105, new=True),
    Ladder(_ours("olmo2", 6, width=64), "adamw", 107, new=True),
    Ladder(_ours("normformer", 9), "adamw", 108, new=True),
    Ladder(_ours("post", 14, init="torch"), "adam", 111),
    Ladder(_ours("post", 5, width=80, init="xavier-uniform"), "adamw", 112),
    Ladder(_ours("peri,entry_norm=false", 11, init="torch"), "adamw", 117),
    Ladder(_ours("pre-no-final", 9, init="xavier"), "adam", 118),
    Ladder("hf:gpt2,n_layer=7,n_embd=48,n_head=3,vocab_size=256", "adamw", 119),
    Ladder(
        "hf:llama,num_hidden_layers=5,hidden_size=48,intermediate_size=128,num_attention_heads=3,vocab_size=256",
        "adamw",
        120,
        new=True,
    ),
    Ladder(_ours("swin-v2,entry_norm=false", 6, width=64), "adam", 121, new=True),
    Ladder(_ours("hybridnorm", 8), "adamw", 122, new=True),
    Ladder(_ours("deepnorm", 18, init="xavier-uniform"), "adam", 123),
    Ladder(_ours("pre", 18), "adamw", 124),
    Ladder(_ours("parallel", 7, init="xavier"), "adamw", 125, new=True),
    Ladder(_ours("layerscale", 6), "adamw", 126, new=True),
    Ladder(_ours("residual-dual", 6), "adamw", 127, new=True),
    Ladder(_ours("scalenorm", 6), "adam", 128, new=True),
    Ladder(_ours("post", 7, init="normal"), "adam", 129),
    Ladder(_ours("pre", 5, width=64, init="torch"), "adam", 130),
    Ladder(_ours("deepnorm", 6, init="torch"), "adamw", 131),
)

SEEN: tuple[Ladder, ...] = (
    Ladder(_ours("res-post,entry_norm=false", 10), "adamw", 101, text=help_topics),
    Ladder(_ours("admin", 10), "adam", 103, text=help_topics),
    Ladder(_ours("layernorm-scaling", 14), "adamw", 104, text=help_topics),
    Ladder(_ours("gpt2", 14), "adamw", 106, text=help_topics),
    Ladder(_ours("post", 9), "adam", 109, text=help_topics),
    Ladder(_ours("post", 18, init="gpt2"), "adamw", 110, text=help_topics),
    Ladder(_ours("deepnorm", 11), "adamw", 113, text=help_topics),
    Ladder(_ours("pre", 10, width=96, init="xavier"), "adam", 115, text=help_topics),
)
"""Ladders that were first held out, on another text, and later used to tune the rule for larger rates."""


@dataclass(frozen=True)
class Cell:
    """Result of one learning rate of a ladder; `gap` is the run's last loss minus the unigram entropy."""

    lr: float
    gap: float
    trains: bool
    seconds: float


def text_hash() -> str:
    """Hash of the held-out text, which shows whether a kept truth belongs to this text."""
    found = hashlib.sha256()
    for file in sorted(path for path in licences().rglob("*") if path.is_file()):
        found.update(file.read_bytes())
    return found.hexdigest()


def train(ladder: Ladder, rates: Sequence[float]) -> list[Cell]:
    """Train for 300 steps at each learning rate, as a stack if possible."""
    subject = ladder.subject()
    assert subject.unigram_entropy is not None
    started = time.perf_counter()
    curves = train_together(subject, [ladder.config(rate) for rate in rates]).losses
    seconds = (time.perf_counter() - started) / len(rates)
    entropy = subject.unigram_entropy
    return [
        Cell(rate, last_loss(losses) - entropy, trains(losses, entropy), seconds)
        for rate, losses in zip(rates, curves, strict=True)
    ]


def train_together(subject: Subject, recipes: Sequence[Recipe]) -> Trials:
    """Train a copy of the model with each recipe, as a stack if possible; steps and seed are of the first."""

    def train(_: object) -> Trials:
        models = [copy.deepcopy(subject.model).train() for _ in recipes]
        torch.manual_seed(recipes[0].seed)
        feeds = [endless(subject.batches) for _ in recipes]
        trials = many_trials(models, feeds, lambda model, batch: subject.loss(batch, model), recipes)
        while trials.step < recipes[0].steps and trials.live:
            trials.advance()
        return trials

    return in_flushed_thread(train)


def keep(cells: dict[str, dict[str, Any]], path: Path = KEPT) -> None:
    """Write the results so far; a gap that is nan is null."""
    path.write_text(json.dumps({"text": text_hash(), "cells": cells}, indent=1) + "\n")


def kept(path: Path = KEPT) -> dict[str, dict[str, Any]]:
    """The kept cells by `name`; empty if they belong to another text."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return dict(found["cells"]) if found["text"] == text_hash() else {}


def name(ladder: Ladder, lr: float) -> str:
    """Name of a cell, unique in the grid."""
    return f"{ladder.model} {ladder.optimizer} {lr:g} seed {ladder.seed}"


def row(cell: Cell) -> dict[str, Any]:
    """The JSON object of a kept cell."""
    gap = round(cell.gap, 3) if math.isfinite(cell.gap) else None
    return {"gap": gap, "trains": cell.trains, "seconds": round(cell.seconds, 2)}
