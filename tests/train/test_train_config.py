"""Recipe, the optimisers and the schedule."""

import math

import pytest
import torch
from torch import nn

from normscope.errors import UsageError
from normscope.train import OPTIMIZERS, Recipe, build_optimizers, hidden_matrices, warmup_factor


def language_model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adamww"}, 'nearest name is "adamw"'),
        ({"optimizer": "lion"}, "choose one"),
        ({"lr": 0.0}, "positive"),
        ({"lr": math.nan}, "positive"),
        ({"lr": math.inf}, "positive"),
        ({"warmup": -1}, "warmup -1"),
        ({"steps": -1}, "steps -1"),
        ({"steps": 1.5}, "steps 1.5"),
        ({"warmup": True}, "warmup True"),
        ({"lr": "3e-4"}, "'3e-4'.*positive"),
    ],
)
def test_a_config_that_cannot_run_is_refused_in_one_line(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        Recipe(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_every_parameter_once(name: str) -> None:
    model = language_model()
    optimizers = build_optimizers(model, Recipe(optimizer=name, lr=1e-2))
    held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    nn.functional.cross_entropy(model(torch.tensor([1, 2, 3])), torch.tensor([2, 3, 4])).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_muon_takes_hidden_matrices_only() -> None:
    model = language_model()
    assert [id(p) for p in hidden_matrices(model)] == [id(model[1].weight)]
    kinds = [type(o).__name__ for o in build_optimizers(model, Recipe(optimizer="muon"))]
    assert kinds == ["Muon", "AdamW"]


def test_frozen_parameters_stay_out_and_an_all_frozen_model_is_refused() -> None:
    model = language_model()
    model[0].weight.requires_grad_(False)
    (optimizer,) = build_optimizers(model, Recipe())
    assert id(model[0].weight) not in {id(p) for p in optimizer.param_groups[0]["params"]}
    with pytest.raises(UsageError, match="requires a gradient"):
        build_optimizers(model.requires_grad_(False), Recipe())


def test_warmup_rises_linearly_from_one_part_to_the_full_rate() -> None:
    assert [warmup_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [warmup_factor(step, 0) for step in range(3)] == [1.0, 1.0, 1.0]
