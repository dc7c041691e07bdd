"""Runs that differ in rounding alone, effects paired by seed, and conditions confirmed on unused seeds."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from planted_runs import Planted, planted
from torch import nn

from normscope.claims import Claim, Evidence, Figure, Runs, Sentence, Setup, measure_claim, runs
from normscope.claims.evidence import Case, effect
from normscope.claims.runs import perturb
from normscope.claims.setup import FRESH_SEEDS, SEEDS
from normscope.claims.training import Setting, effects, trained
from normscope.maps import Cell, Result
from normscope.train import RunConfig

TINY = Setting(scheme="pre", depth=1, width=16, lr=1e-2, steps=12)
PLANTED = dataclasses.replace(TINY, steps=300)


def perturbed(replica: int, seed: int = 0) -> torch.Tensor:
    model = nn.Linear(50, 50, bias=False)
    nn.init.ones_(model.weight)
    perturb(Cell(TINY.config(seed)), model, replica=replica)
    return model.weight.detach().double() - 1


def test_a_replica_is_off_by_about_one_rounding() -> None:
    assert perturbed(0).abs().max() == 0
    off = perturbed(1)
    assert 2e-8 < off.abs().mean() < 2e-7
    assert off.abs().max() < 1e-6
    assert torch.equal(off, perturbed(1)), "the same each time"
    assert not torch.equal(off, perturbed(2))
    assert not torch.equal(off, perturbed(1, seed=1))


def test_replicas_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "NOISE", 1e-4)  # twelve steps do not carry a rounding into a loss
    setup = Setup(seeds=(0,), runs=Runs(tmp_path))
    first, second = (trained(setup, [TINY], replica)[TINY][0].losses for replica in (0, 1))
    assert first != second
    assert first[0] == pytest.approx(second[0], rel=1e-3)
    assert len(list(tmp_path.glob("*.json"))) == 2
    again = Setup(seeds=(0,), runs=Runs(tmp_path))
    assert trained(again, [TINY], 1)[TINY][0].losses == second


def test_effects_are_paired_by_seed_and_replica() -> None:
    plan = lambda config: -0.5 if "post" in config.model else -0.1 * config.trial.seed  # noqa: E731
    other = dataclasses.replace(PLANTED, scheme="post")
    found = effects(
        Planted(seeds=(0, 1, 2), plan=plan),
        [PLANTED, other],
        lambda outcomes: outcomes[0].excess - outcomes[1].excess,
        "here",
        replicas=2,
        part="which",
    )
    assert [(case.seed, case.replica) for case in found] == [(s, r) for r in (0, 1) for s in (0, 1, 2)]
    assert [case.value for case in found[:3]] == pytest.approx([0.5, 0.4, 0.3], abs=1e-3)
    assert {(case.where, case.part) for case in found} == {("here", "which")}


class ByReplica(Planted):
    """Each replica ends 0.2 nats lower than the one before."""

    def train(self, configs: Sequence[RunConfig], replica: int = 0) -> list[Result]:
        return [planted(config, -0.2 * replica) for config in configs]


def test_an_effect_is_that_of_its_replicas_runs() -> None:
    found = effects(ByReplica(seeds=(0,)), [PLANTED], lambda outcomes: -outcomes[0].excess, replicas=3)
    assert [case.value for case in found] == pytest.approx([0.0, 0.2, 0.4], abs=1e-3)


@pytest.mark.parametrize(("end", "value"), [(math.inf, -3.0), (-9.0, 3.0)])
def test_an_effect_is_bounded_so_that_its_mean_is_finite(end: float, value: float) -> None:
    setup = Planted(seeds=(0,), plan=lambda config: end)
    found = effects(setup, [PLANTED], lambda outcomes: -outcomes[0].excess, replicas=2)
    assert [(case.where, case.value) for case in found] == [(str(PLANTED), value)] * 2
    assert effect(0, "x", -value, most=2.0).value == math.copysign(2.0, -value)


def a_claim(odd: dict[str, Claim], measured: list[Setup], **sentences: Sentence) -> Claim:
    def measure(setup: Setup) -> Evidence:
        measured.append(setup)
        cases = [
            Case(seed=seed, where=f"size {setup.sizes(1, 2)}", value=1.0, holds=met, met=met, part=part)
            for seed in setup.seeds
            for part in ("", "a", "b")
            for met in (True, False)
        ]
        return Evidence(cases=cases, figure=Figure.largest("x", cases))

    parts = {"a": Sentence("A.", "x < 1"), "b": Sentence("B.")}
    return dataclasses.replace(odd["Z1"], measure=measure, parts=parts)


def test_a_condition_is_confirmed_on_unused_seeds_and_sizes(odd: dict[str, Claim]) -> None:
    asked: list[Setup] = []
    setup = Setup(seeds=(0, 1), long=True)
    result = measure_claim(a_claim(odd, asked), setup)
    assert [(each.seeds, each.fresh, each.long) for each in asked] == [
        ((0, 1), False, True),
        (FRESH_SEEDS, True, False),
    ]
    assert not set(FRESH_SEEDS) & set(SEEDS)
    fresh = [case for case in result.evidence.cases if case.fresh]
    assert {(case.part, case.seed, case.where) for case in fresh} == {("a", s, "size 2") for s in FRESH_SEEDS}
    assert {case.where for case in result.evidence.cases if not case.fresh} == {"size 1"}
    assert result.evidence.figure is not None
    assert set(result.evidence.figure.by_seed) == {0, 1}, "the figure is of the seeds that were asked for"
    assert str(result.parts["a"].verdict) == "holds under our condition"
    assert (result.parts["a"].met, result.parts["a"].cases) == (2, 4)
    assert str(result.parts["b"].verdict) == "refuted"


def test_without_a_condition_nothing_is_measured_twice(odd: dict[str, Claim]) -> None:
    asked: list[Setup] = []
    measure_claim(
        dataclasses.replace(a_claim(odd, asked), parts={"a": Sentence("A."), "b": Sentence("B.")}), Setup()
    )
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(seed=0, where="x", value=math.inf, holds=True), "finite"),
        (Case(seed=0, where="x", value=math.nan, holds=True), "has a figure"),
    ],
)
def test_an_effect_that_does_not_fit_its_case_is_an_error(
    case: Case, words: str, odd: dict[str, Claim]
) -> None:
    evidence = Evidence(cases=[case], figure=Figure("x", {0: 1.0}))
    sentence = Sentence("It helps.", smallest=0.1)
    claim = dataclasses.replace(odd["Z1"], sentence=sentence, measure=lambda setup: evidence)
    result = measure_claim(claim, Setup(seeds=(0,)))
    assert result.error is not None
    assert words in result.error


def test_an_effect_holds_from_the_smallest_of_its_sentence_on(odd: dict[str, Claim]) -> None:
    values = {"": (0.05, 0.1, 0.2), "a": (0.0, 0.2, 0.35)}
    cases = [effect(0, "x", value, part=part) for part, each in values.items() for value in each]
    wrong = Case(0, "x", 0.05, holds=True)
    evidence = Evidence(cases=[*cases, wrong], figure=Figure("x", {0: 1.0}))
    claim = dataclasses.replace(
        odd["Z1"],
        sentence=Sentence("It helps.", smallest=0.1),
        parts={"a": Sentence("It helps a lot.", smallest=0.35)},
        measure=lambda setup: evidence,
    )
    found = measure_claim(claim, Setup(seeds=(0,))).evidence.cases
    assert [case.holds for case in found] == [False, True, True, False, False, True, False]
