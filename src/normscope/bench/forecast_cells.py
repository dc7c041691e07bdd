"""The held-out grid of `normscope bench forecast`: models, rates, text, and what training them came to.

Nothing here was used in setting the rule: the text, the widths, the depths and the seeds are others, and half
of the schemes were not seen at all. What 300 steps came to is kept in forecast_truth.json, which

    python benchmarks/forecast_grid.py truth

makes; a run that differs in the text's bytes cannot be compared with it.
"""

import copy
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normscope.errors import UsageError
from normscope.subjects import Subject, load
from normscope.train import (
    TRUTH_STEPS,
    TrialConfig,
    endless,
    in_flushed_thread,
    last_loss,
    many_trials,
    trains,
)

KEPT = Path(__file__).parent / "forecast_truth.json"
RATES = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)


@dataclass(frozen=True)
class Ladder:
    """One model and how it is trained, at each of `RATES`; `new` where the rule was not set on the scheme.

    `text` is what it is trained on where it is not held out; None is the standard library's source.
    """

    model: str
    optimizer: str
    seed: int
    new: bool = False
    held_out: bool = True
    text: Path | None = None

    def subject(self) -> Subject:
        """The model on its text."""
        return load(self.model, seed=self.seed, text=held_out_text() if self.held_out else self.text)

    def config(self, lr: float) -> TrialConfig:
        """As the truth was trained."""
        return TrialConfig(optimizer=self.optimizer, lr=lr, seed=self.seed, steps=TRUTH_STEPS)


def _ours(scheme: str, depth: int, width: int = 48, init: str | None = None) -> str:
    spec = f"nn:decoder,scheme={scheme},depth={depth},width={width},heads={width // 16}"
    return spec if init is None else f"{spec},init={init}"


LADDERS: tuple[Ladder, ...] = (
    Ladder(_ours("res-post", 10), "adamw", 101, new=True),
    Ladder(_ours("res-post", 18, init="xavier"), "adam", 102, new=True),
    Ladder(_ours("admin", 10), "adam", 103, new=True),
    Ladder(_ours("layernorm-scaling", 14), "adamw", 104, new=True),
    Ladder(_ours("b2t", 9, width=80), "adam", 105, new=True),
    Ladder(_ours("gpt2", 14), "adamw", 106, new=True),
    Ladder(_ours("olmo2", 7, width=80), "adamw", 107, new=True),
    Ladder(_ours("normformer", 9), "adamw", 108, new=True),
    Ladder(_ours("post", 9), "adam", 109),
    Ladder(_ours("post", 18, init="gpt2"), "adamw", 110),
    Ladder(_ours("post", 14, init="torch"), "adam", 111),
    Ladder(_ours("post", 5, width=96, init="xavier-uniform"), "adamw", 112),
    Ladder(_ours("deepnorm", 11), "adamw", 113),
    Ladder(_ours("deepnorm", 28, init="xavier-uniform"), "adam", 114),
    Ladder(_ours("pre", 10, width=96, init="xavier"), "adam", 115),
    Ladder(_ours("pre", 28), "adamw", 116),
    Ladder(_ours("peri", 13, init="torch"), "adamw", 117),
    Ladder(_ours("pre-no-final", 10, init="xavier"), "adam", 118),
    Ladder(
        "hf:gpt2,n_layer=7,n_embd=48,n_head=3,vocab_size=256",
        "adamw",
        119,
        new=True,
    ),
    Ladder(
        "hf:llama,num_hidden_layers=7,hidden_size=48,intermediate_size=128,num_attention_heads=3,vocab_size=256",
        "adamw",
        120,
        new=True,
    ),
)


@dataclass(frozen=True)
class Cell:
    """What one rate of a ladder came to: `gap`, the run's last loss less the unigram entropy."""

    lr: float
    gap: float
    trains: bool
    seconds: float


def held_out_text() -> Path:
    """Python's own help on its language, as every Python has it: prose in quotes."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    if not path.is_file():
        raise UsageError(f'"{path}" (not found)', "the help topics of a whole Python", "install one")
    return path


def text_hash() -> str:
    """Of the held-out text, to know whether a kept truth is of this text."""
    return hashlib.sha256(held_out_text().read_bytes()).hexdigest()


def train(ladder: Ladder, rates: Sequence[float]) -> list[Cell]:
    """Train for 300 steps at each rate, stacked where that can be, as `trains` wants them."""
    subject = ladder.subject()
    assert subject.unigram_entropy is not None
    started = time.perf_counter()
    curves = in_flushed_thread(lambda checkpoint: _losses(ladder, subject, rates))
    seconds = (time.perf_counter() - started) / len(rates)
    entropy = subject.unigram_entropy
    return [
        Cell(rate, last_loss(losses) - entropy, trains(losses, entropy), seconds)
        for rate, losses in zip(rates, curves, strict=True)
    ]


def _losses(ladder: Ladder, subject: Subject, rates: Sequence[float]) -> list[list[float]]:
    models = [copy.deepcopy(subject.model).train() for _ in rates]
    torch.manual_seed(ladder.seed)
    trials = many_trials(
        models,
        [endless(subject.batches) for _ in rates],
        lambda model, batch: subject.loss(batch, model),
        [ladder.config(rate) for rate in rates],
    )
    while trials.step < TRUTH_STEPS and trials.live:
        trials.advance()
    return trials.losses


def keep(cells: dict[str, dict[str, Any]], path: Path = KEPT) -> None:
    """Write what was trained so far; a gap that is not a number is null."""
    path.write_text(json.dumps({"text": text_hash(), "cells": cells}, indent=1) + "\n")


def kept(path: Path = KEPT) -> dict[str, dict[str, Any]]:
    """The kept cells by `name`, or nothing where they are of another text."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return dict(found["cells"]) if found["text"] == text_hash() else {}


def name(ladder: Ladder, lr: float) -> str:
    """Of a cell, unique in the grid."""
    return f"{ladder.model} {ladder.optimizer} {lr:g} seed {ladder.seed}"


def row(cell: Cell) -> dict[str, Any]:
    """A cell as it is kept."""
    gap = round(cell.gap, 3) if math.isfinite(cell.gap) else None
    return {"gap": gap, "trains": cell.trains, "seconds": round(cell.seconds, 2)}
