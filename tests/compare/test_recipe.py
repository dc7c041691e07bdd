"""Recipes: settings by role, however the groups are ordered or split."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from made import WIDTH, Options, batch, made
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from normscope import Run
from normscope.compare.align import align
from normscope.compare.outcome import Outcome
from normscope.compare.recipe import compare, recipe_of, recipe_of_report
from normscope.compare.structure import read_for_structure, structure_of
from normscope.pipeline import check
from normscope.subjects import Subject, make_subject

Groups = Callable[[nn.Module], list[dict[str, Any]]]


def split(decayed: Callable[[str, nn.Parameter], bool], decay: float = 0.1) -> Groups:
    """Two groups, as most scripts make them."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for n, p in named if decayed(n, p)], "weight_decay": decay},
            {"params": [p for n, p in named if not decayed(n, p)], "weight_decay": 0.0},
        ]

    return groups


def matrices(_: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1


def everything(_: str, parameter: nn.Parameter) -> bool:
    return True


def subject_of(
    way: str = "plain",
    groups: Groups | None = None,
    schedule: Callable[[Any], Any] | None = None,
    given: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> Subject:
    model = made(way, Options()) if model is None else model
    settings = {"lr": 3e-4, "betas": (0.9, 0.95)} | options
    optimizer = torch.optim.AdamW([g for g in (groups or split(matrices))(model) if g["params"]], **settings)
    run = Run(
        model=model,
        batches=batch(),
        loss=lambda output, ids: F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
        optimizer=optimizer,
        scheduler=() if schedule is None else schedule(optimizer),
        **(given or {}),
    )
    subject = make_subject(model, batch())
    subject.run = run
    return subject


def outcome(a: Subject, b: Subject) -> Outcome:
    read = [(each, read_for_structure(each)) for each in (a, b)]
    data = [recipe_of(*each) for each in read]
    places = [structure_of(*each) for each in read]
    assert data[0] is not None
    assert data[1] is not None
    return compare(data[0], data[1], align(*places))


def one_by_one(model: nn.Module) -> list[dict[str, Any]]:
    """A group for each parameter, in reverse."""
    return [
        {"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0}
        for p in reversed(list(model.parameters()))
    ]


@pytest.mark.parametrize("way", ["plain", "fused", "flat"])
@pytest.mark.parametrize("groups", [split(matrices), one_by_one])
def test_the_same_settings_in_other_groups_do_not_differ(way: str, groups: Groups) -> None:
    found = outcome(subject_of(), subject_of(way, groups))
    assert found.differences == ()
    assert (found.compared.how, found.compared.said) == ("whole", "the same recipe")


def test_weight_decay_on_gains_after_a_refactoring() -> None:
    (found,) = outcome(subject_of(), subject_of("fused", split(everything))).differences
    assert (found.name, found.a, found.b) == ("weight-decay", 0.0, 0.1)
    assert found.message == "The weight decay of biases, norm gains and norm biases is 0 in A and 0.1 in B."


class Rescaled(nn.Module):
    """An RMSNorm that neither its class nor its parameter names."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.s


def test_roles_come_from_what_a_parameter_does() -> None:
    def with_own_norms(way: str) -> nn.Module:
        model = made(way, Options(rms=True))
        model.norm = Rescaled()
        for block in model.get_submodule("layers").children():
            block.ln1, block.ln2 = Rescaled(), Rescaled()  # type: ignore[assignment]
        return model

    a = subject_of(model=made("plain", Options(rms=True)))
    b = subject_of(model=with_own_norms("plain"), groups=split(everything))
    found = [each for each in outcome(a, b).differences if "norm gains" in each.message]
    assert [(each.name, each.a, each.b) for each in found] == [("weight-decay", 0.0, 0.1)]


def test_embeddings_without_decay() -> None:
    def no_tables(name: str, parameter: nn.Parameter) -> bool:
        return parameter.dim() > 1 and "tokens" not in name and "positions" not in name

    (found,) = outcome(subject_of(), subject_of(groups=split(no_tables))).differences
    assert found.message == "The weight decay of embeddings is 0.1 in A and 0 in B."


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": 6e-4}, "learning-rate"),
        ({"betas": (0.9, 0.999)}, "betas"),
        ({"eps": 1e-6}, "optimizer-eps"),
    ],
)
def test_a_setting_of_all_groups_is_one_difference(options: dict[str, Any], name: str) -> None:
    (found,) = outcome(subject_of(), subject_of(**options)).differences
    assert found.name == name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"clip": 1.0}, "clip"),
        ({"accumulation": 4}, "accumulation"),
        ({"precision": "bfloat16"}, "precision"),
    ],
)
def test_settings_of_a_step(given: dict[str, Any], name: str) -> None:
    (found,) = outcome(subject_of(), subject_of(given=given)).differences
    assert found.name == name


def ramp(steps: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def test_one_schedule_written_in_two_ways_is_the_same() -> None:
    a = subject_of(schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, 500))
    b = subject_of(
        schedule=lambda o: lr_scheduler.LambdaLR(
            o, lambda step: 0.5 * (1 + torch.cos(torch.tensor(step / 500 * torch.pi)).item())
        )
    )
    assert outcome(a, b).differences == ()


def test_a_shorter_warmup_is_a_warmup_and_no_other_schedule() -> None:
    (found,) = outcome(subject_of(schedule=ramp(100)), subject_of(schedule=ramp(10))).differences
    assert (found.name, found.a, found.b) == ("warmup", 100, 10)


def test_another_schedule() -> None:
    found = outcome(subject_of(), subject_of(schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, 500)))
    assert [each.name for each in found.differences] == ["schedule"]


def test_parameters_that_no_optimizer_has() -> None:
    def without_biases(model: nn.Module) -> list[dict[str, Any]]:
        kept: Iterable[nn.Parameter] = [
            p for n, p in model.named_parameters() if "mlp" not in n or p.dim() > 1
        ]
        return [
            {"params": [p for p in kept if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in kept if p.dim() < 2], "weight_decay": 0.0},
        ]

    (found,) = outcome(subject_of(), subject_of(groups=without_biases)).differences
    assert found.name == "untrained"
    assert "of the biases" in found.message


def test_a_report_and_a_live_recipe_are_compared_by_role() -> None:
    a, b = subject_of(), subject_of("fused", split(everything))
    report = check(a, steps=1, budget="fast").to_dict()
    data, other = recipe_of_report(report), recipe_of(b, read_for_structure(b))
    assert data is not None
    assert other is not None
    rows = align(*(structure_of(each, read_for_structure(each)) for each in (a, b)))
    found = compare(data, other, rows)
    assert "weight-decay" in {each.name for each in found.differences}
    assert recipe_of_report({"recipe": None}) is None


def test_a_model_without_a_run_has_no_recipe() -> None:
    subject = make_subject(made("plain", Options()), batch())
    assert recipe_of(subject, read_for_structure(subject)) is None
