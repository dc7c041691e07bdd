"""Runs that claims on training share: one small setting, its settings, and readings of a loss curve.

Bytes of text, width 32, 2 heads, AdamW, 300 steps of 4 × 32 bytes. A setting that several claims ask for is
trained once a seed; settings that differ in rate and warm-up alone are trained as one stack.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from normscope import train
from normscope.claims.evidence import effect
from normscope.claims.form import Case, Plot, Setup, flat, lines_along, lines_at, mapped
from normscope.subjects import Subject
from normscope.subjects.corpus import encode
from normscope.subjects.text import load_text
from normscope.train import CRITERION_STEPS, LAST, MARGIN, Recipe, RunConfig, last_loss
from normscope.train.stack_forward import LossOf

BATCH, LENGTH = 4, 32
"""Sequences in a batch, bytes in a sequence."""
RATE = 3e-3
"""AdamW's learning rate where a claim names none."""
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""The ladder that "tuned" means: half a decade a rung."""
WARMUP = 200
"""Steps of a long warm-up, of 300."""
MANY = 10**6
"""More steps than any run has."""
NEVER = math.inf
"""Steps to a loss that was not reached."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training run without its seed.

    Attributes:
        scheme, depth, init, width: of the decoder; `init` None is the scheme's own.
        options: further options of the model, as in a MODEL spec: "norm=rmsnorm".
        batch: sequences in a batch.
        lr, warmup, steps, clip, optimizer: of the training.
    """

    scheme: str
    depth: int
    init: str | None = None
    width: int = 32
    options: str = ""
    batch: int = BATCH
    lr: float = RATE
    warmup: int = 0
    steps: int = CRITERION_STEPS
    clip: float | None = None
    optimizer: str = "adamw"

    @property
    def model(self) -> str:
        """The MODEL spec."""
        parts = [f"nn:decoder,scheme={self.scheme}", f"depth={self.depth},width={self.width},heads=2"]
        parts += [f"init={self.init}"] * (self.init is not None) + [self.options] * bool(self.options)
        return ",".join(parts)

    def config(self, seed: int) -> RunConfig:
        """The run of one seed, which is that of weights and batches."""
        trial = Recipe(
            optimizer=self.optimizer,
            lr=self.lr,
            warmup=self.warmup,
            steps=self.steps,
            clip=self.clip,
            seed=seed,
        )
        return RunConfig(model=self.model, batch_size=self.batch, seq_len=LENGTH, validation=0.0, trial=trial)

    def subject(self, setup: Setup, seed: int) -> Subject:
        """The model at its start, and its batches."""
        return setup.on_text(self.config(seed)).subject()

    def __str__(self) -> str:
        init = "" if self.init is None else f" from {self.init} weights"
        clip = "" if self.clip is None else f", clipped at {self.clip:g}"
        return f"{self.scheme}{init}, {self.depth} blocks, rate {self.lr:g}, warm-up {self.warmup}{clip}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a setting on one seed.

    Attributes:
        losses: of each step, before it; the last one is not finite where the run diverged.
        unigram: losses on the same batches of a model that knows the text's byte frequencies and nothing
            else. They show a plateau better than the entropy of the text, as a seed's batches may be easier.
        entropy: of the byte frequencies of the whole text, nats.
        certain: why it was likely to fail before its end (token diversity under 2e-6), None where it was not.
    """

    losses: tuple[float, ...]
    unigram: tuple[float, ...]
    entropy: float
    certain: str | None = None

    @property
    def final(self) -> float:
        """The mean of the last 20 losses, infinite where the run diverged."""
        return final_loss(self.losses)

    @property
    def excess(self) -> float:
        """Nats by which the final loss is above that of the byte frequencies on the same batches."""
        return self.final - last_loss(self.unigram[: len(self.losses)])

    @property
    def trains(self) -> bool:
        """True if it ends at least 0.1 nats under the byte frequencies."""
        return self.excess <= -MARGIN

    @property
    def progress(self) -> list[float]:
        """Nats above the byte frequencies, as the mean of 20 steps, at each step from the twentieth."""
        above = [loss - alone for loss, alone in zip(self.losses, self.unigram, strict=False)]
        return [sum(above[end - LAST : end]) / LAST for end in range(LAST, len(above) + 1)]

    def steps_to(self, nats: float) -> float:
        """Steps until `progress` is at most `nats`, `NEVER` where it is not."""
        reached = (step for step, above in enumerate(self.progress, LAST) if above <= nats)
        return next(reached, NEVER)


Outcomes = Mapping[Setting, Mapping[int, Outcome]]
"""Outcomes by setting and seed."""


def final_loss(losses: Sequence[float]) -> float:
    """The mean of the last 20 losses, infinite where the run diverged."""
    loss = last_loss(losses)
    return loss if math.isfinite(loss) else math.inf


def trained(setup: Setup, settings: Iterable[Setting], replica: int = 0) -> dict[Setting, dict[int, Outcome]]:
    """The outcome of each setting on each seed of `setup`; see `Setup.train` for `replica`."""
    runs = [(setting, seed) for setting in dict.fromkeys(settings) for seed in setup.seeds]
    results = setup.train([setting.config(seed) for setting, seed in runs], replica)
    outcomes: dict[Setting, dict[int, Outcome]] = {}
    for (setting, seed), result in zip(runs, results, strict=True):
        unigram = unigram_losses(setup.text, seed, setting.steps)
        outcome = Outcome(result.losses, unigram, result.unigram_entropy, result.certain)
        outcomes.setdefault(setting, {})[seed] = outcome
    return outcomes


def effects(
    setup: Setup,
    settings: Sequence[Setting],
    figure: Callable[[Sequence[Outcome]], float],
    where: str = "",
    *,
    replicas: int = 1,
    part: str = "",
) -> list[Case]:
    """A case for each seed and replica: `figure` of the outcomes of `settings`, paired by seed and replica.

    Args:
        figure: given an outcome a setting, in their order; above zero where it speaks for the sentence.
        where: the case, in words; by default the first setting.
    """
    found = []
    for replica in range(replicas):
        outcomes = trained(setup, settings, replica)
        for seed in setup.seeds:
            value = figure([outcomes[setting][seed] for setting in settings])
            case = effect(seed, where or str(settings[0]), value, part=part)
            found.append(replace(case, replica=replica))
    return found


@functools.cache
def unigram_losses(text: Path | None, seed: int, steps: int) -> tuple[float, ...]:
    """Loss on each of the first `steps` batches of a seed of a model that knows byte frequencies alone."""
    corpus = encode(load_text(text, 0.0), 256)
    nats = -torch.log(torch.from_numpy(corpus.counts / corpus.counts.sum()))
    windows = corpus.windows(BATCH, LENGTH + 1, seed)
    return tuple(float(nats[ids[:, 1:]].mean()) for ids in itertools.islice(windows, steps))


def lead(outcomes: Sequence[Outcome]) -> float:
    """Nats by which the second of two outcomes ends lower than the first."""
    return outcomes[0].final - outcomes[1].final


def misses(outcomes: Sequence[Outcome]) -> float:
    """Nats by which a run misses training: 0.1 nats under the byte frequencies."""
    return outcomes[0].excess + MARGIN


def reaches(outcomes: Sequence[Outcome]) -> float:
    """Nats by which a run passes the threshold of training."""
    return -misses(outcomes)


def tally(outcomes: Outcomes) -> list[str]:
    """Notes on how many seeds of each setting train, and where they end."""
    notes = []
    for setting, by_seed in outcomes.items():
        ends = sorted(outcome.excess for outcome in by_seed.values())
        count = sum(outcome.trains for outcome in by_seed.values())
        notes.append(f"{setting}: {count} of {len(ends)} train ({ends[0]:+.2f} … {ends[-1]:+.2f} nats).")
    return notes


def subjects(setup: Setup, setting: Setting) -> dict[int, Subject]:
    """The setting's models at their start with their batches, by seed, for claims that look into them."""
    return {seed: setting.subject(setup, seed) for seed in setup.seeds}


def train_models(
    subjects: Mapping[int, Subject], setting: Setting, *, skip: int = 0
) -> dict[int, list[float]]:
    """Train each subject's model in place, side by side; the losses of each step.

    Args:
        skip: batches of a subject that are not trained on.
    """
    first = next(iter(subjects.values()))
    losses = train_together(
        [subject.model for subject in subjects.values()],
        [itertools.islice(subject.batches(), skip, None) for subject in subjects.values()],
        lambda model, batch: first.loss(batch, model),
        [setting.config(seed).trial for seed in subjects],
    )
    return dict(zip(subjects, losses, strict=True))


def train_together(
    models: Sequence[nn.Module],
    batches: Sequence[Iterator[Any]],
    loss: LossOf,
    configs: Sequence[Recipe],
) -> list[list[float]]:
    """Train `models` in place, side by side, for the steps of the first config; the losses of each."""
    trials = train.many_trials([copy.deepcopy(model) for model in models], batches, loss, configs)

    def run(checkpoint: Callable[[], None]) -> None:
        for _ in range(configs[0].steps):
            checkpoint()
            trials.advance()

    train.in_flushed_thread(run)
    for k, model in enumerate(models):
        trials.export(k, model)
    return trials.losses


@dataclass(frozen=True)
class ShortRun:
    """A run of one seed: the loss before each step, and the model after the last."""

    losses: list[float]
    model: nn.Module


def train_changed(
    setup: Setup, setting: Setting, change: Callable[[nn.Module], None] | None = None
) -> dict[int, ShortRun]:
    """Runs of `setting` by seed; `change` is done to each model before its first step.

    Use `trained` where nothing is changed and the models are not needed: those runs are kept.
    """
    models = subjects(setup, setting)
    if change:
        for subject in models.values():
            change(subject.model)
    losses = train_models(models, setting)
    return {seed: ShortRun(losses[seed], models[seed].model) for seed in models}


def best(outcomes: Outcomes, seed: int) -> tuple[Setting, Outcome]:
    """The setting with the lowest final loss on a seed: what tuning finds."""
    setting = min(outcomes, key=lambda setting: outcomes[setting][seed].final)
    return setting, outcomes[setting][seed]


def fewest_steps(outcomes: Outcomes, seed: int, nats: float) -> float:
    """Steps to `nats` above the byte frequencies of the setting that gets there first."""
    return min(by_seed[seed].steps_to(nats) for by_seed in outcomes.values())


def ladder(setting: Setting, rates: Iterable[float] = RATES) -> list[Setting]:
    """`setting` at each rate."""
    return [replace(setting, lr=lr) for lr in rates]


ABOVE = "nats above the byte frequencies"
LEVELS: Mapping[str, float] = {"byte frequencies alone": 0.0}
"""The loss of a run that learns nothing else."""


def curves(
    title: str,
    outcomes: Mapping[str, Mapping[int, Outcome]] | Outcomes,
    *,
    every: int = 10,
    most: float = math.inf,
) -> Plot:
    """Nats above the byte frequencies, at most `most`, by step, a line for each setting or name."""
    named = {str(name): by_seed for name, by_seed in outcomes.items()}
    rows = mapped(named, lambda outcome: [min(above, most) for above in outcome.progress[::every]])
    lines = lines_along(range(LAST, MANY, every), rows)
    return Plot(title, "step", ABOVE, lines, levels=LEVELS)


def losses_plot(
    title: str,
    runs: Mapping[str, Mapping[int, ShortRun] | Mapping[int, Outcome]],
    *,
    every: int = 3,
    log: Literal["", "y"] = "",
) -> Plot:
    """The loss at every third step, or every `every`-th, of short runs by name and seed."""
    rows = {name: {s: run.losses[::every] for s, run in by_seed.items()} for name, by_seed in runs.items()}
    return Plot(title, "step", "loss, nats", lines_along(range(0, MANY, every), rows), log)


def rates_plot(title: str, tried: Mapping[str, Outcomes]) -> Plot:
    """Ends of the runs without warm-up, at most a nat above the byte frequencies, by learning rate."""
    runs = ((name, *run) for name, outcomes in tried.items() for run in flat(outcomes))
    ends = [(name, setting.lr, min(run.excess, 1.0)) for name, setting, _, run in runs if not setting.warmup]
    return Plot(title, "learning rate", ABOVE, lines_at(ends), "x", LEVELS)
