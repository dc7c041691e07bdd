"""The validation loss, and the exchanges between processes in a step."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope.subjects import Subject
from normscope.train import Recipe, RunConfig, Trial
from normscope.train.processes import Processes
from normscope.train.recipe import Every
from normscope.train.run import BATCHES, Run, validation_loss
from normscope.train.state import take_state


class Noisy(nn.Module):
    """A model that draws and updates a running mean in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.map(self.norm(x)), 0.5, self.training)


def numbers(start: int = 0) -> Iterator[Tensor]:
    """Batches that hold their index."""
    for n in itertools.count(start):
        yield torch.full((4, 3), float(n)) + torch.arange(4.0)[:, None]


def subject_of(model: nn.Module, **more: Any) -> Subject:
    return Subject(
        model, next(numbers()), lambda out, batch: out.square().mean(), numbers, 0, "noisy", "numbers", **more
    )


def trial_of(subject: Subject, config: Recipe, **more: Any) -> Trial:
    return Trial(
        subject.model, subject.batches(), lambda model, batch: subject.loss(batch, model), config, **more
    )


def test_the_validation_loss_is_that_of_eval_mode_and_moves_nothing() -> None:
    subject = subject_of(Noisy(), validation=numbers)
    subject.model.norm.eval()  # a mode that somebody set stays
    trial = trial_of(subject, Recipe())
    trial.advance()
    state = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    gradients = [p.grad.clone() for p in subject.model.parameters()]
    drawn = torch.get_rng_state()
    found = validation_loss(subject, trial, Processes())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [module.training for module in subject.model.modules()] == [True, False, True]
    assert all(torch.equal(state[name], tensor) for name, tensor in subject.model.state_dict().items())
    assert all(map(torch.equal, gradients, (p.grad for p in subject.model.parameters())))
    subject.model.eval()
    with torch.no_grad():
        losses = [float(subject.loss(batch)) for batch in itertools.islice(numbers(), BATCHES)]
    assert found == pytest.approx(sum(losses) / BATCHES)
    assert validation_loss(subject_of(Noisy()), trial, Processes()) is None


class Two(Processes):
    """Stand-in for two equal processes, which counts exchanges."""

    size = 2

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.exchanged = rank, 0

    def means(self, values: Sequence[float]) -> list[float]:
        self.exchanged += 1
        return [value / 2 if index else value for index, value in enumerate(values)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_has_one_exchange_and_a_wish_of_one_process_is_heard_by_all(accumulation: int) -> None:
    processes, subject = Two(), subject_of(nn.Linear(3, 3))
    config = Recipe(steps=5, accumulation=accumulation)
    trial = trial_of(subject, config, keeps_norms=True)
    run = Run(RunConfig(model="it", trial=config), subject, trial, processes, None, Every(seconds=1e9))
    trial.shared_loss = run.share_loss
    run.go()
    assert trial.step == 5
    assert processes.exchanged == 5
    run.config = run.config.replace(steps=8)
    saved: list[int] = []
    run.save = lambda: saved.append(trial.step)  # type: ignore[method-assign]
    run.every = Every(seconds=0.0)  # late at once, but that it must be agreed on
    run.go()
    assert saved == [6, 7, 8]


def test_only_the_process_that_writes_copies_the_state() -> None:
    trial = trial_of(subject_of(Noisy()), Recipe())
    trial.advance()
    kept, helping = (take_state(trial, trial.model, is_kept=is_kept) for is_kept in (True, False))
    assert kept.tensors.keys() == helping.tensors.keys()
    large = [name for name in kept.tensors if name.startswith(("model.", "optimizer."))]
    assert len(large) >= 15
    assert all(helping.tensors[name].numel() == 0 for name in large)
    assert torch.equal(kept.tensors["model.map.weight"], trial.model.map.weight)
    trial.model.map.weight.data.zero_()
    assert kept.tensors["model.map.weight"].any(), "a copy"


def test_a_loss_that_is_not_finite_leaves_no_gradient() -> None:
    subject = subject_of(nn.Linear(3, 3))
    trial = trial_of(subject, Recipe(accumulation=2), keeps_norms=True)
    trial.loss = lambda model, batch: subject.loss(batch, model) / (float(batch[0, 0]) - 2)
    trial.advance()
    assert subject.model.weight.grad is not None
    assert trial.gradient_norms[0] > 0
    before = subject.model.weight.clone()
    trial.advance()  # batches 2 and 3
    assert trial.diverged
    assert subject.model.weight.grad is None
    assert trial.gradient_norms[1] != trial.gradient_norms[1]
    assert torch.equal(subject.model.weight, before)
