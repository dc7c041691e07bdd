"""Verdicts of the claims that tune, on results that are known."""

import pytest
from planted_runs import FLIES_OFF, STANDS_STILL, TRAINS, TRAINS_WELL, Planted, judged

from normscope.claims import Verdict, rates
from normscope.claims.training import Outcome, unigram_losses
from normscope.train import RunConfig

SEEDS = (0, 1)


def scheme_of(config: RunConfig) -> str:
    return config.model.partition("scheme=")[2].partition(",")[0]


def post_is(end: float):
    """Post-LN ends there, what else there is trains."""
    return lambda config: end if scheme_of(config) == "post" else TRAINS


@pytest.mark.parametrize("long", [False, True])
def test_b7_asks_who_ends_lower(long):
    better = judged("B7", post_is(TRAINS_WELL), SEEDS, long=long)
    assert better.judgement.verdict is Verdict.HOLDS
    assert better.evidence.figure.value == pytest.approx(TRAINS - TRAINS_WELL, abs=0.01)
    assert judged("B7", post_is(-0.3), SEEDS, long=long).judgement.verdict is Verdict.REFUTED
    assert judged("B7", post_is(TRAINS - 0.02), SEEDS).judgement.verdict is Verdict.REFUTED  # too little


def test_b7_takes_the_best_rate_of_each():
    """One good setting among bad ones is what tuning finds; it is the same for all seeds."""

    def plan(config: RunConfig) -> float:
        good = scheme_of(config) == "post" and config.trial.lr == 1e-3 and "init" in config.model
        return TRAINS_WELL if good else TRAINS if scheme_of(config) == "pre" else FLIES_OFF

    assert judged("B7", plan, SEEDS).judgement.verdict is Verdict.HOLDS


def test_b8_asks_who_falls_first():
    assert judged("B8", post_is(-2.0), SEEDS).judgement.verdict is Verdict.HOLDS
    assert judged("B8", post_is(STANDS_STILL), SEEDS).judgement.verdict is Verdict.REFUTED


@pytest.mark.parametrize("long", [False, True])
def test_c10_compares_the_rungs_that_train(long):
    def plan(config: RunConfig) -> float:
        limit = {"pre": 1e-2, "post": 1e-3, "residual-no-norm": 3e-3}[scheme_of(config)]
        return TRAINS if config.trial.lr <= limit else FLIES_OFF

    found = judged("C10", plan, SEEDS, long=long)
    assert found.judgement.verdict is Verdict.CONDITION
    assert found.evidence.figure.value == 1
    assert judged("C10", lambda config: TRAINS, SEEDS).judgement.verdict is Verdict.REFUTED
    assert judged("C10", lambda config: FLIES_OFF, SEEDS).judgement.verdict is Verdict.REFUTED


@pytest.mark.parametrize(
    ("steps", "than", "saved"), [(70, 100, 0.3), (100, 100, 0.0), (150, 100, -0.5), (60, float("inf"), 0.8)]
)
def test_steps_saved(steps, than, saved):
    assert rates._saved(steps, than, 300) == pytest.approx(saved)


@pytest.mark.parametrize("long", [False, True])
def test_c11_tells_norms_from_residuals(long):
    def plan(config: RunConfig) -> float:
        if scheme_of(config) == "plain" or ("depth=16" in config.model and scheme_of(config) != "pre"):
            return STANDS_STILL
        return TRAINS

    found = judged("C11", plan, SEEDS, long=long)
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["band"].verdict is Verdict.REFUTED
    assert found.parts["norms"].verdict is Verdict.REFUTED
    assert found.parts["deep"].verdict is Verdict.HOLDS
    assert found.evidence.figure.value > 50
    assert [case.value for case in found.evidence.cases if case.part == "norms"] == [0, 0]


def test_c39_counts_the_settings_that_train():
    assert judged("C39", post_is(FLIES_OFF), SEEDS).judgement.verdict is Verdict.REFUTED

    def pre_is_narrow(config: RunConfig) -> float:
        return TRAINS if scheme_of(config) == "post" or config.trial.lr == 1e-3 else STANDS_STILL

    found = judged("C39", pre_is_narrow, SEEDS)
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.evidence.figure.value == 8 - 2


def test_a_rise_is_measured_over_the_first_loss():
    losses = [5.0, 6.0, 4.0] + [3.0] * 97 + [50.0]
    outcome = Outcome(tuple(losses), unigram_losses(None, 0, len(losses)), 3.16)
    assert rates._rise(outcome) == pytest.approx(1.2)


def test_every_seed_is_used():
    assert {case.seed for case in judged("C39", post_is(TRAINS), (0, 3)).evidence.cases} == {0, 3}
    assert Planted(seeds=(0, 3)).seeds == (0, 3)
