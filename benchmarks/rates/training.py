"""Training of runs side by side, which stop early where all tokens are alike."""

import copy
from collections.abc import Sequence

import torch

from normscope.anatomy import read_anatomy
from normscope.forecast.evaluator import Evaluator
from normscope.subjects import Subject
from normscope.train import Recipe, Trials, endless, in_flushed_thread, many_trials

ALIKE = 1e-11
"""Token diversity from which no run recovers: a tenth of the forecast's own `DEAD`."""
FIRST, LATER = 100, 25
"""Steps after which diversity is first measured, and between two measurements."""


def train_watched(subject: Subject, recipes: Sequence[Recipe]) -> list[list[float]]:
    """The losses of a copy of the model under each recipe, as a stack where that is possible."""
    anatomy = read_anatomy(subject)

    def train(_: object) -> Trials:
        models = [copy.deepcopy(subject.model).train() for _ in recipes]
        torch.manual_seed(recipes[0].seed)
        feeds = [endless(subject.batches) for _ in recipes]
        trials = many_trials(models, feeds, lambda model, batch: subject.loss(batch, model), recipes)
        alike = dict.fromkeys(range(len(recipes)), 0)
        while trials.step < recipes[0].steps and trials.live:
            trials.advance()
            if trials.step < FIRST or trials.step % LATER:
                continue
            for k in list(trials.live):
                diversity = list(Evaluator.of(subject, anatomy, trials.models[k]).state()[1].values())[-1:]
                alone = trials.step >= recipes[k].warmup + LATER and diversity and diversity[0] < ALIKE
                alike[k] = alike[k] + 1 if alone else 0
                if alike[k] == 2:
                    trials.drop(k)
        return trials

    return in_flushed_thread(train).losses
