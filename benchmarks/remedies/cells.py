"""Runs that fail, for trying remedies: their widths and text were not used to tune the forecast."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.forecast.cells import help_topics, licences
from normscope.anatomy import Anatomy, read_anatomy
from normscope.demo.examples import CausalEncoder
from normscope.rules.remedies import apply_all
from normscope.subjects import Subject, load, make_subject
from normscope.train import (
    CRITERION_STEPS,
    Recipe,
    Trial,
    endless,
    in_flushed_thread,
    last_loss,
    trains,
    working_copy,
)


@dataclass(frozen=True)
class Cell:
    """One run: `model` is a MODEL, or "encoder,DEPTH,WIDTH" for `CausalEncoder`; `text` one of `TEXTS`."""

    model: str
    lr: float
    optimizer: str = "adamw"
    seed: int = 0
    text: str = "licences"

    @property
    def words(self) -> str:
        """The cell on one line."""
        return f"{self.model} {self.optimizer} {self.lr:g} seed {self.seed}"


TEXTS: dict[str, Callable[[], Path | None]] = {
    "licences": licences,
    "help": help_topics,
    "library": lambda: None,
}


def held_out() -> list[Cell]:
    """Runs at learning rates where most fail; nothing was tuned on this text, these widths or these runs."""
    return [Cell(model, lr, optimizer, seed) for model, lr, optimizer, seed in _held_out()]


def _held_out() -> Iterable[tuple[str, float, str, int]]:
    for depth, lr, seed in ((7, 2e-2, 41), (9, 8e-3, 42), (11, 2e-3, 43), (14, 1e-3, 44), (18, 1e-3, 45)):
        yield f"nn:decoder,scheme=post,depth={depth},width=48,heads=4", lr, "adamw", seed
    yield "nn:decoder,scheme=post,depth=8,width=48,heads=4,activation=swiglu", 5e-3, "adam", 46
    yield "nn:decoder,scheme=post,depth=7,width=48,heads=4,init=normal", 1.5e-2, "adamw", 47
    yield "nn:decoder,scheme=post,depth=10,width=48,heads=4,init=normal", 1e-2, "adam", 48
    yield "nn:decoder,scheme=post,depth=8,width=48,heads=4,init=torch", 8e-3, "adamw", 49
    yield "nn:decoder,scheme=post,depth=9,width=48,heads=4,norm=rmsnorm", 5e-3, "adamw", 50
    yield "nn:decoder,scheme=deepnorm,depth=12,width=48,heads=4", 1.2e-2, "adamw", 51
    yield "nn:decoder,scheme=deepnorm,depth=8,width=48,heads=4", 2.5e-2, "adamw", 52
    others = ("mix-ln", 2e-2, 53), ("b2t", 2.5e-2, 54), ("keel", 5e-2, 55), ("admin", 2e-2, 56)
    for scheme, lr, seed in others:
        yield f"nn:decoder,scheme={scheme},depth=8,width=48,heads=4", lr, "adamw", seed
    for scheme, lr, seed in (("pre", 1.5e-1, 57), ("gpt2", 1.5e-1, 58), ("residual-no-norm", 5e-2, 59)):
        yield f"nn:decoder,scheme={scheme},depth=7,width=48,heads=4", lr, "adamw", seed
    for depth, lr, seed in ((6, 1e-2, 60), (9, 2e-3, 61), (12, 1e-3, 62)):
        yield f"encoder,{depth},48", lr, "adam", seed
    yield _post_opt(8, 48), 1e-2, "adamw", 63
    yield "nn:encoder-decoder,scheme=post,depth=5,width=48,heads=4", 5e-3, "adamw", 64


def _post_opt(depth: int, width: int) -> str:
    """OPT with its norms after the sums, as OPT-350m has them."""
    sizes = f"num_hidden_layers={depth},hidden_size={width},word_embed_proj_dim={width},ffn_dim={4 * width}"
    return f"hf:opt,{sizes},num_attention_heads=4,vocab_size=256,do_layer_norm_before=false"


def seen() -> list[Cell]:
    """Runs on which the order was tuned; those on the help topics were held out at first."""
    return [
        *(Cell(model, lr, optimizer, seed, "library") for model, lr, optimizer, seed in _first()),
        *(Cell(model, lr, optimizer, seed, "help") for model, lr, optimizer, seed in _second()),
    ]


def _first() -> Iterable[tuple[str, float, str, int]]:
    for scheme, depth, lr in (("post", 6, 1e-2), ("post", 11, 2e-3), ("deepnorm", 7, 2e-2), ("pre", 5, 1e-1)):
        yield f"nn:decoder,scheme={scheme},depth={depth},width=32,heads=2", lr, "adamw", 31
    yield "encoder,6,48", 1e-2, "adam", 32


def _second() -> Iterable[tuple[str, float, str, int]]:
    for depth, lr, seed in ((8, 1e-2, 1), (10, 3e-3, 2), (12, 1e-3, 3), (16, 1e-3, 4)):
        yield f"nn:decoder,scheme=post,depth={depth},width=40,heads=4", lr, "adamw", seed
    yield "nn:decoder,scheme=post,depth=7,width=56,heads=4,activation=relu", 3e-3, "adam", 7
    yield "nn:decoder,scheme=post,depth=8,width=40,heads=4,init=normal", 2e-2, "adamw", 8
    yield "nn:decoder,scheme=post,depth=9,width=40,heads=4,init=torch", 5e-3, "adamw", 9
    yield "nn:encoder,scheme=post,depth=6,width=40,heads=4", 1e-2, "adamw", 10
    yield "nn:decoder,scheme=deepnorm,depth=16,width=40,heads=4", 1e-2, "adamw", 11
    yield "nn:decoder,scheme=deepnorm,depth=6,width=40,heads=4", 3e-2, "adamw", 12
    pre = ("pre", 13), ("gpt2", 14), ("res-post,entry_norm=false", 15), ("peri,entry_norm=false", 24)
    for scheme, seed in pre:
        yield f"nn:decoder,scheme={scheme},depth=6,width=40,heads=4", 1e-1, "adamw", seed
    yield "nn:decoder,scheme=b2t,depth=6,width=40,heads=4", 2e-2, "adamw", 17
    yield "nn:decoder,scheme=pre,depth=8,width=56,heads=4,init=xavier", 1e-1, "adam", 16
    for depth, lr, seed in ((5, 2e-2, 18), (8, 5e-3, 19), (10, 1e-3, 20)):
        yield f"encoder,{depth},40", lr, "adam", seed
    yield "nn:encoder-decoder,scheme=post,depth=4,width=40,heads=4", 1e-2, "adamw", 23
    yield _post_opt(6, 40), 1e-2, "adamw", 21
    bert = "num_hidden_layers=6,hidden_size=40,intermediate_size=160,num_attention_heads=4,vocab_size=256"
    yield f"hf:bert,{bert}", 1e-2, "adamw", 22


def subject_of(cell: Cell) -> Subject:
    """The cell's model on its text."""
    text = TEXTS[cell.text]()
    if not cell.model.startswith("encoder,"):
        return load(cell.model, seed=cell.seed, text=text)
    depth, width = map(int, cell.model.split(",")[1:])
    torch.manual_seed(cell.seed)
    model = CausalEncoder(depth=depth, width=width)
    return make_subject(model, seed=cell.seed, text=text)


def settings_of(cell: Cell) -> Recipe:
    """The training settings of a cell."""
    return Recipe(optimizer=cell.optimizer, lr=cell.lr, seed=cell.seed)


def truth(cell: Cell, names: Iterable[str], subject: Subject, anatomy: Anatomy) -> dict[str, Any]:
    """Train a cell with these remedies for `CRITERION_STEPS` steps; NotApplicable if one does not apply."""
    changed, settings = apply_all(names, subject, anatomy, settings_of(cell))
    losses = losses_of(changed, settings)
    assert changed.unigram_entropy is not None
    return {
        "last_loss": round(last_loss(losses), 4),
        "unigram_entropy": round(changed.unigram_entropy, 4),
        "steps": len(losses),
        "trains": trains(losses, changed.unigram_entropy),
    }


def losses_of(subject: Subject, settings: Recipe) -> list[float]:
    """The losses of `CRITERION_STEPS` steps, or fewer if one is not finite."""
    return in_flushed_thread(lambda checkpoint: _train(subject, settings, checkpoint))


def _train(subject: Subject, settings: Recipe, checkpoint: Any) -> list[float]:
    torch.manual_seed(settings.seed)
    with working_copy(subject.model) as model:
        model.train()
        batches = endless(subject.batches)
        trial = Trial(model, batches, lambda m, b: subject.loss(b, m), settings)
        while trial.step < CRITERION_STEPS and not trial.diverged:
            checkpoint()
            trial.advance()
        return trial.losses


def read(cell: Cell) -> tuple[Subject, Anatomy]:
    """The cell's subject and its anatomy."""
    subject = subject_of(cell)
    return subject, read_anatomy(subject)
