"""Verdicts of the claims on warm-up and clipping, on results that are known."""

import pytest
from planted_runs import FLIES_OFF, STANDS_STILL, TRAINS, TRAINS_WELL, judged

from normscope.claims import Verdict
from normscope.train import RunConfig

SEEDS = (0, 1)


def is_post(config: RunConfig) -> bool:
    return "scheme=post" in config.model


def only_warm(config: RunConfig) -> float:
    """Post-LN stands still without warm-up, and trains with it."""
    return STANDS_STILL if is_post(config) and config.trial.warmup == 0 else TRAINS


@pytest.mark.parametrize("long", [False, True])
def test_b4_holds_where_no_post_ln_trains_without_warmup(long):
    found = judged("B4", only_warm, SEEDS, long=long)
    assert found.judgement.verdict is Verdict.HOLDS
    assert {part.verdict for part in found.parts.values()} == {Verdict.HOLDS}
    assert found.evidence.figure.value == pytest.approx(STANDS_STILL, abs=0.01)


def test_b4_is_refuted_where_one_kind_of_post_ln_trains():
    def plan(config: RunConfig) -> float:
        easy = "depth=4" in config.model or "init=normal" in config.model
        return TRAINS if easy else only_warm(config)

    found = judged("B4", plan, SEEDS)
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["deep"].verdict is Verdict.HOLDS


def test_b4_is_undecided_where_seeds_disagree():
    def plan(config: RunConfig) -> float:
        return TRAINS if config.trial.seed == 0 else only_warm(config)

    found = judged("B4", plan, (0, 1, 2))
    assert found.judgement.verdict is found.parts["deep"].verdict is Verdict.UNDECIDED


def test_b4_knows_when_pre_ln_gains_by_warmup():
    def plan(config: RunConfig) -> float:
        return TRAINS_WELL if config.trial.warmup else TRAINS

    assert judged("B4", plan, SEEDS).parts["short"].verdict is Verdict.REFUTED


def test_b17_tells_a_plateau_from_a_loss_that_flies_off():
    still = judged("B17", only_warm, SEEDS)
    assert still.judgement.verdict is still.parts["sgd"].verdict is Verdict.REFUTED
    assert still.parts["adamw"].verdict is Verdict.HOLDS
    flown = judged("B17", lambda config: FLIES_OFF, SEEDS)
    assert flown.judgement.verdict is flown.parts["sgd"].verdict is Verdict.HOLDS
    assert flown.parts["adamw"].verdict is Verdict.REFUTED


def test_b17_is_not_measured_where_nothing_fails():
    found = judged("B17", lambda config: TRAINS)
    assert found.judgement.verdict is Verdict.NOT_MEASURED
    assert found.reason == "every Post-LN run without warm-up trains under AdamW"


@pytest.mark.parametrize("long", [False, True])
def test_c26_asks_whether_clipping_saves_what_fails(long):
    saved = judged("C26", lambda config: TRAINS if config.trial.clip else STANDS_STILL, SEEDS, long=long)
    assert saved.judgement.verdict is saved.parts["sgd"].verdict is Verdict.HOLDS
    lost = judged("C26", lambda config: STANDS_STILL, SEEDS, long=long)
    assert lost.judgement.verdict is lost.parts["sgd"].verdict is Verdict.REFUTED


def test_c26_tells_the_optimisers_apart():
    def plan(config: RunConfig) -> float:
        return TRAINS if config.trial.clip and config.trial.optimizer == "sgd" else STANDS_STILL

    found = judged("C26", plan, SEEDS)
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["sgd"].verdict is Verdict.HOLDS


def test_c26_knows_what_clipping_costs_a_run_that_trains():
    found = judged("C26", lambda config: TRAINS if config.trial.clip else TRAINS_WELL, SEEDS)
    assert found.parts["harm"].verdict is Verdict.REFUTED
