"""What claims about training share: one small setting, its recipes, and what is read off a loss curve.

Bytes of text, d = 32, 2 heads, AdamW, 300 steps of 4 × 32 bytes. A recipe asked for by several claims is
trained once a seed; recipes that differ in rate and warm-up alone are trained as one stack.
"""

import copy
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from normscope.claims.form import Case, Line, Setup
from normscope.maps import Result
from normscope.subjects import Subject
from normscope.subjects.corpus import encode
from normscope.subjects.text import load_text
from normscope.train import (
    CRITERION_STEPS,
    LAST,
    MARGIN,
    RunConfig,
    TrialConfig,
    in_flushed_thread,
    last_loss,
    many_trials,
)

BATCH, LENGTH = 4, 32
"""Sequences of a batch, bytes of a sequence."""

RATE = 3e-3
"""AdamW's rate where a claim names none."""
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""The ladder that "tuned" means: half a decade a rung."""
WARMUP = 200
"""Steps of a long warm-up, of 300."""
NEVER = math.inf
"""Steps to a loss that was not reached."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run without its seed.

    Attributes:
        scheme, depth, init, width: of the decoder; `init` None is the scheme's own.
        options: further options of the model, as in a MODEL spec: "norm=rmsnorm".
        lr, warmup, steps, clip, optimizer: of the training.
    """

    scheme: str
    depth: int
    init: str | None = None
    width: int = 32
    options: str = ""
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
        trial = TrialConfig(
            optimizer=self.optimizer,
            lr=self.lr,
            warmup=self.warmup,
            steps=self.steps,
            clip=self.clip,
            seed=seed,
        )
        return RunConfig(model=self.model, batch_size=BATCH, seq_len=LENGTH, validation=0.0, trial=trial)

    def __str__(self) -> str:
        init = "" if self.init is None else f" from {self.init} weights"
        clip = "" if self.clip is None else f", clipped at {self.clip:g}"
        return f"{self.scheme}{init}, {self.depth} blocks, rate {self.lr:g}, warm-up {self.warmup}{clip}"


@dataclass(frozen=True)
class Outcome:
    """What came of a recipe on one seed.

    Attributes:
        losses: of each step, before it; the last one is not finite where the run diverged.
        unigram: losses on the same batches of a model that knows the text's byte frequencies and nothing
            else. They tell a plateau, and not the entropy of the text: the batches of a seed may be easier.
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
        loss = last_loss(self.losses)
        return loss if math.isfinite(loss) else math.inf

    @property
    def excess(self) -> float:
        """Nats by which the final loss is above that of the byte frequencies on the same batches."""
        return self.final - last_loss(self.unigram[: len(self.losses)])

    @property
    def trains(self) -> bool:
        """Whether it ends at least 0.1 nats under the byte frequencies."""
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


Outcomes = Mapping[Recipe, Mapping[int, Outcome]]
"""By recipe and seed."""


def trained(setup: Setup, recipes: Iterable[Recipe], replica: int = 0) -> dict[Recipe, dict[int, Outcome]]:
    """What comes of each recipe on each seed of `setup`; see `Setup.train` for `replica`."""
    recipes = list(dict.fromkeys(recipes))
    configs = [recipe.config(seed) for recipe in recipes for seed in setup.seeds]
    results = iter(setup.train(configs, replica))
    return {
        recipe: {seed: _outcome(next(results), setup.text, seed, recipe.steps) for seed in setup.seeds}
        for recipe in recipes
    }


def effects(
    setup: Setup,
    recipes: Sequence[Recipe],
    effect: Callable[[Sequence[Outcome]], float],
    where: str,
    *,
    smallest: float,
    replicas: int = 2,
    met: bool = True,
    part: str = "",
    most: float = 3.0,
) -> list[Case]:
    """A case a seed and replica: `effect` of what comes of `recipes`, paired by seed and replica.

    Args:
        effect: given an outcome a recipe, in their order; above zero where it speaks for the sentence.
        smallest: that counts, as the sentence has it.
        most: larger effects count as this large, so that a run that diverges leaves the mean finite.
    """
    found = []
    for replica in range(replicas):
        outcomes = trained(setup, recipes, replica)
        for seed in setup.seeds:
            value = effect([outcomes[recipe][seed] for recipe in recipes])
            value = 0.0 if math.isnan(value) else max(-most, min(most, value))  # of two that both diverge
            found.append(Case(seed, where, value, value >= smallest, part, replica=replica, met=met))
    return found


def _outcome(result: Result, text: Path | None, seed: int, steps: int) -> Outcome:
    unigram = unigram_losses(text, seed, steps)
    return Outcome(result.losses, unigram, result.unigram_entropy, result.certain)


@functools.cache
def unigram_losses(text: Path | None, seed: int, steps: int) -> tuple[float, ...]:
    """Loss of each of the first `steps` batches of a seed, of a model that knows byte frequencies alone."""
    corpus = encode(load_text(text, 0.0), 256)
    nats = -torch.log(torch.from_numpy(corpus.counts / corpus.counts.sum()))
    windows = corpus.windows(BATCH, LENGTH + 1, seed)
    return tuple(float(nats[ids[:, 1:]].mean()) for ids in itertools.islice(windows, steps))


def saved_nats(outcomes: Sequence[Outcome]) -> float:
    """Nats by which the second of two outcomes ends lower than the first."""
    first, second = (outcome.final for outcome in outcomes)
    return first - second if math.isfinite(first) or math.isfinite(second) else 0.0


def mean_by_seed(cases: Sequence[Case]) -> dict[int, float]:
    """The mean over a seed's replicas and cells, for a figure."""
    seeds = sorted({case.seed for case in cases if case.seed is not None})
    return {seed: statistics.fmean(c.value for c in cases if c.seed == seed) for seed in seeds}


def subjects(setup: Setup, recipe: Recipe) -> dict[int, Subject]:
    """The recipe's models at their start with their batches, by seed, for claims that look into them."""
    text = None if setup.text is None else str(setup.text)
    return {seed: recipe.config(seed).replace(text=text).subject() for seed in setup.seeds}


def train_models(subjects: Mapping[int, Subject], recipe: Recipe, *, skip: int = 0) -> dict[int, list[float]]:
    """Train each subject's model in place, side by side; the losses of each step.

    Args:
        skip: batches of a subject that are not trained on.
    """
    first = next(iter(subjects.values()))
    trials = many_trials(
        [copy.deepcopy(subject.model) for subject in subjects.values()],
        [itertools.islice(subject.batches(), skip, None) for subject in subjects.values()],
        lambda model, batch: first.loss(batch, model),
        [recipe.config(seed).trial for seed in subjects],
    )

    def run(checkpoint: Callable[[], None]) -> None:
        for _ in range(recipe.steps):
            checkpoint()
            trials.advance()

    in_flushed_thread(run)
    for k, subject in enumerate(subjects.values()):
        trials.export(k, subject.model)
    return dict(zip(subjects, trials.losses, strict=True))


def best(outcomes: Outcomes, seed: int) -> tuple[Recipe, Outcome]:
    """The recipe with the lowest final loss on a seed: what tuning finds."""
    recipe = min(outcomes, key=lambda recipe: outcomes[recipe][seed].final)
    return recipe, outcomes[recipe][seed]


def fewest_steps(outcomes: Outcomes, seed: int, nats: float) -> float:
    """Steps to `nats` above the byte frequencies of the recipe that gets there first."""
    return min(by_seed[seed].steps_to(nats) for by_seed in outcomes.values())


def ladder(recipe: Recipe, rates: Iterable[float] = RATES, warmups: Iterable[int] = (0,)) -> list[Recipe]:
    """`recipe` at each rate and warm-up."""
    warmups = tuple(warmups)
    return [replace(recipe, lr=lr, warmup=warmup) for lr in rates for warmup in warmups]


def curve(name: str, by_seed: Mapping[int, Outcome], *, every: int = 10, most: float = math.inf) -> Line:
    """Nats above the byte frequencies, at most `most`, by step; median and range over seeds."""
    points: dict[float, list[float]] = {}
    for outcome in by_seed.values():
        for step, above in list(enumerate(outcome.progress, LAST))[::every]:
            points.setdefault(step, []).append(min(above, most))
    return Line.over_seeds(name, points)


STEP, ABOVE = "step", "nats above the byte frequencies"
"""The axes of `curve`."""
LEVELS: Mapping[str, float] = {"byte frequencies alone": 0.0}
"""Where a run stands still that learns nothing else."""
