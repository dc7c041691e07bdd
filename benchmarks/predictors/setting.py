"""Types of predictors, `Setting` in and `Prediction` out, and copies of the model in training."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normscope.anatomy import Anatomy
from normscope.subjects import Subject
from normscope.train import Recipe, endless, in_flushed_thread, many_trials, working_copy

BROKEN = 1e9
"""The loss of a run that was not finite, as a number that can be ranked."""


class NotMeasuredError(Exception):
    """A predictor does not apply to a model; the message is the reason."""


@dataclass(frozen=True)
class Setting:
    """One ladder, as a predictor sees it.

    Attributes:
        subject: the model with its batches and its loss; no predictor changes it.
        anatomy: the reading of the model.
        recipe: the training settings; its learning rate is replaced by each of `rates`.
        rates: learning rates, ascending.
    """

    subject: Subject
    anatomy: Anatomy
    recipe: Recipe
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """Work of a predictor for all learning rates of a ladder together.

    Attributes:
        forwards: losses or activations without a gradient.
        gradients: forwards with a backward.
        products: Hessian-vector products, each a backward through the graph of the gradient.
        steps: training steps.
    """

    forwards: int = 0
    gradients: int = 0
    products: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Prediction:
    """Scores of one ladder.

    Attributes:
        name: of the predictor, or of one of its variants.
        scores: one for each learning rate; larger means that a failure is more likely.
        cost: the work; variants share a measurement and name the same cost.
        largest_rate: the largest learning rate that trains, for predictors that name one.
        best_rate: the learning rate to use, likewise.
        facts: the figures behind the scores.
    """

    name: str
    scores: tuple[float, ...]
    cost: Cost
    largest_rate: float | None = None
    best_rate: float | None = None
    facts: dict[str, float] = field(default_factory=dict)


Predictor = Callable[[Setting], list[Prediction]]


def trained_stack(
    setting: Setting, steps: int, look: Callable[[nn.Module], Any] | None = None
) -> tuple[list[list[float]], list[Any]]:
    """Training losses of `steps` steps at each learning rate, and `look` of each model after them.

    A copy whose loss is not finite stops earlier.
    """
    subject = setting.subject
    recipes = [replace(setting.recipe, lr=rate, steps=steps) for rate in setting.rates]

    def train(checkpoint: Callable[[], None]) -> tuple[list[list[float]], list[Any]]:
        models = []
        for _ in recipes:
            with working_copy(subject.model) as model:
                models.append(model.train())
        torch.manual_seed(setting.recipe.seed)
        feeds = [endless(subject.batches) for _ in models]
        trials = many_trials(models, feeds, lambda model, batch: subject.loss(batch, model), recipes)
        while trials.step < steps and trials.live:
            checkpoint()
            trials.advance()
        return trials.losses, [] if look is None else [look(model) for model in trials.models]

    return in_flushed_thread(train)
