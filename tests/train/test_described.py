"""A recipe as data and in words."""

import copy
import dataclasses
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from normscope import Run, UsageError
from normscope.schemas import schema
from normscope.train import LiveOptimizers, Recipe, described, recipe_in_words


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


def of_live(optimizers: list[Any], schedulers: list[Any], model: nn.Module, **given: Any) -> Recipe:
    run = Run(model=model, batches=None, optimizer=optimizers, scheduler=schedulers)
    return Recipe.of(run, **given)


def valid(data: dict[str, Any]) -> dict[str, Any]:
    whole = copy.deepcopy(schema("report"))
    jsonschema.validate(data, {"$ref": "#/$defs/recipe", "$defs": whole["$defs"]})
    return data


def test_options() -> None:
    data = valid(described(Recipe(lr=1e-3, warmup=5, clip=1.0, accumulation=4), small()))
    assert data["own"] is False
    (optimizer,) = data["optimizers"]
    assert optimizer == {
        "name": "AdamW",
        "groups": [
            {
                "tensors": 4,
                "parameters": 31,
                "roles": {"matrices": 24, "biases": 7},
                "lr": 1e-3,
                "weight_decay": 0.01,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
            }
        ],
    }
    assert recipe_in_words(data) == (
        "AdamW, betas 0.9, 0.999: 4 tensors at 0.001, decay 0.01 · constant rate after a warm-up of 5 steps "
        "· clipped to 1 · 4 batches per step · float32"
    )


class Decoder(nn.Module):
    """One of every role."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        self.pos_emb = nn.Parameter(torch.zeros(1, 5, 4))
        self.norm = nn.LayerNorm(4)
        self.map = nn.Linear(4, 4)
        self.gamma = nn.Parameter(torch.ones(4))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(4, 11)


def test_roles_of_groups_and_of_what_no_optimizer_has() -> None:
    model = Decoder()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [*model.norm.parameters(), model.map.bias, model.gamma]
    adamw = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])
    data = valid(described(of_live([adamw], [], model), model))
    assert [group["roles"] for group in data["optimizers"][0]["groups"]] == [
        {"embeddings": 64, "matrices": 16, "head": 44},
        {"biases": 4, "norm gains": 4, "norm biases": 4, "scales": 4},
    ]
    assert data["untrained"] == {"biases": 11, "scales": 1}


def test_a_tied_head_is_an_embedding() -> None:
    model = Decoder()
    model.head.weight = model.tokens.weight
    data = described(Recipe(), model)
    assert data["optimizers"][0]["groups"][0]["roles"]["embeddings"] == 64
    assert "head" not in data["optimizers"][0]["groups"][0]["roles"]


def test_a_tied_head_is_an_embedding_also_where_it_comes_first() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 11, bias=False), "tokens": nn.Embedding(11, 4)})
    model["tokens"].weight = model["head"].weight
    data = described(Recipe(), model)
    assert data["optimizers"][0]["groups"][0]["roles"] == {"embeddings": 44}


def test_a_schedule_over_a_run() -> None:
    recipe = Recipe(optimizer="sgd", schedule="cosine", run_steps=500, precision="bfloat16")
    data = valid(described(recipe, small()))
    assert data["optimizers"][0]["groups"][0]["momentum"] == 0.9
    assert recipe_in_words(data) == (
        "SGD, momentum 0.9: 4 tensors at 0.0003, decay 0 · schedule cosine over 500 steps · no clipping "
        "· bfloat16"
    )


def test_live_objects_are_described_at_their_full_rate() -> None:
    model = small()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(
        [{"params": vectors[:1], "lr": 2e-3}, {"params": vectors[1:], "weight_decay": 0.0}], lr=1e-3
    )
    ramps = [lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 8)) for o in (muon, adamw)]
    recipe = of_live([muon, adamw], ramps, model)
    data = valid(described(recipe, model))
    assert [[g["lr"] for g in o["groups"]] for o in data["optimizers"]] == [[0.02], [2e-3, 1e-3]]
    assert recipe_in_words(data) == (
        "Muon, momentum 0.95: 2 tensors at 0.02, decay 0.1 · AdamW, betas 0.9, 0.999: 1 tensor at 0.002, "
        "decay 0.01; 1 tensor at 0.001, decay 0 · schedule LambdaLR after a warm-up of 8 steps · no clipping "
        "· float32"
    )
    halved = described(dataclasses.replace(recipe, lr=0.01, eps=1e-5), model)
    assert [[g["lr"] for g in o["groups"]] for o in halved["optimizers"]] == [[0.01], [1e-3, 5e-4]]
    assert [g["eps"] for g in halved["optimizers"][1]["groups"]] == [1e-5, 1e-5]
    assert described(recipe.with_warmup(0), model)["schedule"] == "constant"


def test_many_groups_are_told_by_their_ranges() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    groups = [
        {"params": layer.parameters(), "lr": 10.0**-k, "weight_decay": 0.1} for k, layer in enumerate(model)
    ]
    optimizer = torch.optim.RMSprop(groups)
    words = recipe_in_words(valid(described(of_live([optimizer], [], model), model)))
    assert words == (
        "RMSprop: 12 tensors in 6 groups at 1e-05 to 1, decay 0.1 · constant rate · no clipping · float32"
    )


def test_a_record_and_odd_groups() -> None:
    model = small()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0]["weight_decay"] = "none"
    live = LiveOptimizers(model, (optimizer,), rates=((0.5,), (0.25,)))
    data = valid(described(Recipe(optimizer=live, lr=0.5, schedule="own"), model))
    assert data["schedule"] == "recorded"
    assert data["optimizers"][0]["groups"][0]["weight_decay"] is None
    assert recipe_in_words(data) == "Adafactor: 4 tensors at 0.5 · schedule recorded · no clipping · float32"


def test_what_cannot_be_built_has_no_description() -> None:
    with pytest.raises(UsageError, match="without trainable parameters"):
        described(Recipe(), small().requires_grad_(False))
