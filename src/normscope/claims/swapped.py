"""Cost of moving the norms of a trained model, and recovery by further training."""

import itertools
import math
import statistics
import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn

from normscope.claims.form import Evidence, Figure, Plot, Setup, claim, effect, flat, lines_along, mapped
from normscope.claims.training import ABOVE, LEVELS, Setting, subjects, train_models, unigram_losses
from normscope.nn import SwapWarning, swap
from normscope.subjects import Subject

FIRST = Setting(scheme="post", depth=4, lr=1e-3, steps=200)
"""The training before the swap; it succeeds without warm-up."""
AFTER = 100
"""Steps after the swap."""
HELD_OUT = 16
"""Batches that nothing was trained on, after those of both trainings."""


@dataclass(frozen=True)
class Moved:
    """Nats above the byte frequencies on held-out batches, of one seed and direction.

    Attributes:
        trained, swapped, tuned, scratch: before the swap, right after it, after further training, and of a
            new model of the other placement with those further steps alone.
        gradient: the gradient's norm right after the swap over that before.
    """

    trained: float
    swapped: float
    tuned: float
    scratch: float
    gradient: float


@claim("C27", has_long=True)
def swap_breaks(setup: Setup) -> Evidence:
    """Train, swap, measure, train on; beside it a new model with the further steps alone."""
    first = replace(FIRST, depth=8, lr=5e-4, warmup=500, steps=1000) if setup.long else FIRST
    ways = {
        "post → pre": _moved(setup, first, "pre"),
        "pre → post": _moved(setup, replace(first, scheme="pre"), "post"),
    }
    cases, there = [], ways["post → pre"]
    for way, seed, moved in flat(ways):
        back = "" if way == "post → pre" else "reverse "
        share = (moved.swapped - moved.trained) / max(-moved.trained, 1e-3)
        cases.append(effect(seed, f"{way}, share lost", share, part=back.strip()))
        behind, part = moved.tuned - moved.scratch, f"{back}scratch"
        cases.append(effect(seed, f"{way}, nats behind a new model", behind, part=part))
    for seed, moved in there.items():
        decades = math.log10(moved.gradient)
        cases.append(effect(seed, "decades that the gradient grows", decades, part="explosion"))
    rows = mapped(ways, lambda moved: [moved.trained, moved.swapped, moved.tuned, moved.scratch])
    medians = {
        way: [f"{statistics.median(values):+.2f}" for values in zip(*by_seed.values(), strict=True)]
        for way, by_seed in rows.items()
    }
    added = {seed: moved.swapped - moved.trained for seed, moved in there.items()}
    x = f"1 trained, 2 moved, 3 after {AFTER} steps more, 4 a new model with {AFTER} steps"
    y, lines = f"{ABOVE}, held-out", lines_along(range(1, 5), rows, marks=True)
    return Evidence(
        cases,
        Figure("loss added at once by moving the norms, in nats", added),
        plots=[Plot("Moving the norms of a trained model", x, y, lines, levels=LEVELS)],
        notes=[
            f"{way}, medians, nats from the byte frequencies: trained {trained}, moved {swapped}, "
            f"{AFTER} steps later {tuned}, a new model after {AFTER} steps {scratch}."
            for way, (trained, swapped, tuned, scratch) in medians.items()
        ],
    )


def _moved(setup: Setup, first: Setting, scheme: str) -> dict[int, Moved]:
    """Both trainings and the new model, for every seed."""
    later, seen = replace(first, scheme=scheme, steps=AFTER, warmup=0), first.steps + AFTER

    def above(models: dict[int, Subject]) -> dict[int, float]:
        unigram = {seed: unigram_losses(setup.text, seed, seen + HELD_OUT)[seen:] for seed in models}
        return {s: _held_out(model, seen) - statistics.fmean(unigram[s]) for s, model in models.items()}

    olds = subjects(setup, first)
    train_models(olds, first)
    news = {seed: replace(old, model=_swapped(old.model, scheme)) for seed, old in olds.items()}
    trained, swapped = above(olds), above(news)
    gradients = {seed: _gradient(news[seed]) / _gradient(olds[seed]) for seed in setup.seeds}
    train_models(news, later, skip=first.steps)
    fresh = subjects(setup, later)
    train_models(fresh, later, skip=first.steps)
    tuned, scratch = above(news), above(fresh)
    return {s: Moved(trained[s], swapped[s], tuned[s], scratch[s], gradients[s]) for s in setup.seeds}


def _swapped(model: nn.Module, scheme: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwapWarning)  # what it warns of is what is measured here
        return swap(model, scheme)  # type: ignore[arg-type]  # of a subject of ours


@torch.no_grad()
def _held_out(subject: Subject, skip: int) -> float:
    """Mean loss of the batches after the first `skip`."""
    batches = itertools.islice(subject.batches(), skip, skip + HELD_OUT)
    return statistics.fmean(float(subject.loss(batch)) for batch in batches)


def _gradient(subject: Subject) -> float:
    """Norm of the gradient of all weights, on the fixed batch."""
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(subject.loss(), parameters, allow_unused=True)
    return float(torch.cat([g.flatten() for g in gradients if g is not None]).norm())
