"""What claims about training share: one small setting, its recipes, and what is read off a loss curve.

Bytes of text, d = 32, 2 heads, AdamW, 300 steps of 4 × 32 bytes. A recipe asked for by several claims is
trained once a seed; recipes that differ in rate and warm-up alone are trained as one stack.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from normscope.claims.look import Look
from normscope.maps import Result
from normscope.train import LAST, TRUTH_STEPS, RunConfig, TrialConfig, last_loss

RATE = 3e-3
"""AdamW's rate where a claim names none."""
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
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
    steps: int = TRUTH_STEPS
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
        return RunConfig(model=self.model, batch_size=4, seq_len=32, validation=0.0, trial=trial)

    def __str__(self) -> str:
        init = "" if self.init is None else f" from {self.init} weights"
        clip = "" if self.clip is None else f", clipped at {self.clip:g}"
        return f"{self.scheme}{init}, {self.depth} blocks, rate {self.lr:g}, warm-up {self.warmup}{clip}"


def trained(look: Look, recipes: Iterable[Recipe]) -> dict[Recipe, dict[int, Result]]:
    """What comes of each recipe on each seed of `look`."""
    recipes = list(dict.fromkeys(recipes))
    results = iter(look.train([recipe.config(seed) for recipe in recipes for seed in look.seeds]))
    return {recipe: {seed: next(results) for seed in look.seeds} for recipe in recipes}


def trains(result: Result) -> bool:
    """Whether the run ends at least 0.1 nats under the unigram entropy."""
    return result.verdict == "trains"


def final(result: Result) -> float:
    """The mean of the last 20 losses, infinite where the run diverged."""
    loss = last_loss(result.losses)
    return loss if math.isfinite(loss) else math.inf


def excess(result: Result) -> float:
    """Nats by which the final loss is above the unigram entropy; below -0.1 the run trains."""
    return final(result) - result.unigram_entropy


def smooth(losses: Sequence[float]) -> list[float]:
    """The mean of the last 20 losses at each step from the twentieth."""
    return [last_loss(losses[: end + 1]) for end in range(LAST - 1, len(losses))]


def steps_to(result: Result, loss: float) -> float:
    """Steps until the mean of 20 losses is at most `loss`, `NEVER` where it is not reached."""
    reached = (end for end, mean in enumerate(smooth(result.losses), LAST) if mean <= loss)
    return next(reached, NEVER)


def best(results: Mapping[Recipe, Mapping[int, Result]], seed: int) -> tuple[Recipe, Result]:
    """The recipe with the lowest final loss on a seed: what tuning finds."""
    recipe = min(results, key=lambda recipe: final(results[recipe][seed]))
    return recipe, results[recipe][seed]


def fewest_steps(results: Mapping[Recipe, Mapping[int, Result]], seed: int, loss: float) -> float:
    """Steps to `loss` of the recipe that gets there first."""
    return min(steps_to(by_seed[seed], loss) for by_seed in results.values())


def ladder(recipe: Recipe, rates: Iterable[float] = RATES, warmups: Iterable[int] = (0,)) -> list[Recipe]:
    """`recipe` at each rate and warm-up."""
    warmups = tuple(warmups)
    return [replace(recipe, lr=lr, warmup=warmup) for lr in rates for warmup in warmups]


def curve(results: Iterable[Result]) -> dict[float, list[float]]:
    """Mean of 20 losses by step, every tenth step, of several seeds: the points of a line."""
    points: dict[float, list[float]] = {}
    for result in results:
        for step, loss in list(enumerate(smooth(result.losses), LAST))[::10]:
            points.setdefault(step, []).append(loss)
    return points
