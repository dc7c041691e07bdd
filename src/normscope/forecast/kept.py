"""Trials that are kept after a short trial, to go on in a longer one."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.forecast.recent import mean_baseline, mean_recent
from normscope.forecast.record import ForecastStep
from normscope.subjects import Subject
from normscope.subjects.memory import COPIES, available_bytes
from normscope.train import LoneTrials, Recipe, Trial, Trials, endless, lone_trial, many_trials

MOST_KEPT = 0.25
"""Largest share of the free memory that kept trials may take."""


@dataclass(frozen=True)
class KeptTrial:
    """A trial that may go on, with its measurements.

    Attributes:
        random: state of the CPU's random generator after the trial, from which dropout goes on.
    """

    trial: Trial
    curve: tuple[ForecastStep, ...]
    random: Tensor

    def measurements(self, subject: Subject, config: Recipe) -> list[ForecastStep]:
        """The measurements as those at the start of a longer trial, without gradients compared."""
        return [
            dataclasses.replace(
                each,
                recent_loss=mean_recent(self.trial.losses[: each.step], config.steps),
                recent_baseline=mean_baseline(subject, config, each.step),
                coherence=None,
                alignment=None,
            )
            for each in self.curve
        ]


def kept_trials(trials: Trials, curves: Sequence[Sequence[ForecastStep]]) -> dict[float, KeptTrial]:
    """The trials that may go on, by learning rate: those of a stack, and those that diverged, may not."""
    if not isinstance(trials, LoneTrials):
        return {}
    state = torch.get_rng_state()
    return {
        trial.config.lr: KeptTrial(trial, tuple(curve), state)
        for trial, curve in zip(trials.trials, curves, strict=True)
        if not trial.diverged
    }


def is_room_for(num: int, model: nn.Module) -> bool:
    """Whether `num` trials of `model` can be kept in memory; only those on a CPU are."""
    if not _on_cpu([model]):
        return False
    room = available_bytes(torch.device("cpu"))
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return room is not None and num * COPIES * size <= MOST_KEPT * room


def side_by_side(
    subject: Subject,
    models: Sequence[nn.Module],
    configs: Sequence[Recipe],
    earlier: Sequence[KeptTrial | None],
) -> Trials:
    """Trials of `models` from their start, or from the end of an earlier one.

    They are stepped one after another on a CPU, else as a stack where they can be stacked. A stack of few
    small models saves little on one CPU and costs more on another (docs/forecast-evidence.md, Cost).
    The losses without the input of the batches are entered as they are drawn.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return subject.loss(batch, model)

    known = [before for before in earlier if before is not None]
    if known:
        torch.set_rng_state(known[0].random)
    else:
        torch.manual_seed(configs[0].seed)
    feeds = [_entered(subject) for _ in models]
    if not _on_cpu(models):
        return many_trials(models, feeds, loss, configs)
    return LoneTrials.of(
        [
            lone_trial(model, feed, loss, config) if before is None else before.trial
            for before, model, feed, config in zip(earlier, models, feeds, configs, strict=True)
        ]
    )


def _entered(subject: Subject) -> Iterator[Any]:
    """The endless batches of a subject, each entered as it is drawn."""
    batches = endless(subject.batches)
    return batches if subject.without_input is None else subject.without_input.seen(batches)


def _on_cpu(models: Sequence[nn.Module]) -> bool:
    return all(weight.is_cpu for model in models for weight in model.parameters())
