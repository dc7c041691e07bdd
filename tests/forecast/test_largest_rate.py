"""Tests of the largest learning rate that trains, and of the rungs that are tried again for it."""

import dataclasses
import importlib
from typing import Any

import pytest
from test_forecast import Tiny, anatomy_of, subject_of

from normscope.forecast import Forecast, forecast_ladder
from normscope.forecast.largest_rate import (
    MOST_AGAIN,
    beside_limit,
    in_doubt,
    largest_rate,
    with_doubt,
)
from normscope.forecast.record import ForecastStep
from normscope.train import CRITERION_STEPS, Recipe

ladder_module: Any = importlib.import_module("normscope.forecast.ladder")
RATES = tuple(1e-4 * 2**k for k in range(8))
SURE = {"T": ("trains", 0.97), "F": ("collapses", 0.02), "S": ("slow", 0.05)}
UNSURE = {"t": ("trains", 0.7), "f": ("plateau", 0.3), "s": ("slow", 0.2), "u": ("undecided", None)}


def rungs_of(letters: str, steps: int = 36) -> list[Forecast]:
    """Rungs of rising rates; a capital letter is sure."""
    said = SURE | UNSURE
    return [
        Forecast(said[each][0], "so", "adamw", lr, 0, steps, 2.4, certainty=said[each][1])
        for each, lr in zip(letters, RATES, strict=False)
    ]


@pytest.mark.parametrize(
    ("letters", "place"),
    [
        ("TTFF", None),
        ("TtFF", 1),
        ("TTfF", 2),
        ("TTuF", 2),
        ("tTfF", 2),  # below the largest rate that trains, nothing is decided
        ("TTFf", None),
        ("TtfF", 1),  # the largest that trains comes first
        ("TT", None),
        ("Tt", 1),
        ("sfF", 1),  # none trains: the likeliest
        ("SFF", None),
        ("ssF", None),  # a slow rate stays slow
        ("TFTFF", 1),  # a larger one trains, so that it cannot be sure to fail
        ("FFTFF", 1),
        ("FTtFF", 2),  # the largest that trains comes first here too
        ("SST", None),  # a small rate may be slow
        ("fTFF", None),  # it is in doubt, but decides nothing
        ("TfTFF", 1),  # smaller and larger ones train
        ("uuS", 1),  # of open ones that with the lowest predicted loss, here the last
        ("ufS", 0),
        ("utF", 1),
    ],
)
def test_the_rung_in_doubt_is_the_one_that_decides(letters: str, place: int | None) -> None:
    rungs = rungs_of(letters)
    found = in_doubt(rungs, [])
    assert found is (None if place is None else rungs[place])
    assert in_doubt(rungs, RATES) is None, "all have had their longer trial"


def test_a_failure_that_a_larger_rate_contradicts_is_not_sure() -> None:
    found = with_doubt(rungs_of("FfST"))
    assert [rung.certainty for rung in found] == [0.5, 0.3, 0.05, 0.97]
    assert [rung.certainty for rung in with_doubt(rungs_of("tfT"))] == [0.7, 0.5, 0.97]
    whole = rungs_of("FT", steps=CRITERION_STEPS)
    assert with_doubt(whole) == whole, "a whole run has shown it"
    assert with_doubt(rungs_of("FF")) == rungs_of("FF")


@pytest.mark.parametrize(
    ("letters", "near"),
    [
        ("TTFF", (1, 2)),
        ("TFTSF", (2, 3)),  # the failure below is contradicted
        ("SSTT", ()),  # a larger rate was not tried, so that no limit is known
        ("FFF", ()),
        ("TtfF", (1, 2)),
        ("TuF", (0, 1)),
    ],
)
@pytest.mark.parametrize("steps", [36, CRITERION_STEPS])
def test_the_rates_beside_the_limit_may_go_either_way(
    letters: str, near: tuple[int, ...], steps: int
) -> None:
    rungs = rungs_of(letters, steps)
    found = with_doubt(rungs)
    assert [rung.lr for rung in beside_limit(rungs)] == [rungs[k].lr for k in near]
    for k, (rung, before) in enumerate(zip(found, rungs, strict=True)):
        if k in near and before.certainty is not None:
            assert rung.certainty == pytest.approx(0.75 * before.certainty + 0.125, abs=1e-3)
            assert not rung.is_sure
        elif steps == CRITERION_STEPS or letters != "TFTSF":
            assert rung.certainty == before.certainty
    assert [rung.outcome for rung in found] == [rung.outcome for rung in rungs]


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({}, True),
        ({"lr": RATES[1] * (1 + 1e-9)}, True),
        ({"lr": 1.1 * RATES[1]}, False),
        ({"warmup": 20}, False),
        ({"outcome": "not measured"}, False),
        ({"curve": (ForecastStep(36, 1.0, 1.0, {}),)}, False),
    ],
)
def test_the_users_own_steps_stand_for_the_trial_of_their_rate(
    change: dict[str, Any], is_taken: bool
) -> None:
    first, second = (
        dataclasses.replace(rung, curve=(ForecastStep(36, 1.0, 1.0, {}),), divergence=0.3)
        for rung in rungs_of("TF")
    )
    seen = dataclasses.replace(
        second, outcome="trains", divergence=None, curve=(ForecastStep(300, 1.0, 1.0, {}),)
    )
    found = ladder_module._longer(second, dataclasses.replace(seen, **change))
    assert found == (dataclasses.replace(seen, divergence=0.3) if is_taken else second)
    assert ladder_module._longer(first, seen) is first


def test_without_a_loss_to_beat_an_open_rung_is_not_tried_again() -> None:
    for letters in ("uuu", "TtF", "TfF"):
        rungs = [dataclasses.replace(rung, unigram_entropy=None) for rung in rungs_of(letters)]
        assert in_doubt(rungs, []) is None


@pytest.mark.parametrize(("above", "place"), [(0.0, 1), (-0.09, 1), (-0.11, None)])
def test_a_sure_rung_whose_loss_does_not_show_that_it_trains_is_tried_again(
    above: float, place: int | None
) -> None:
    loss = 2.4 + above  # beside the entropy of these rungs
    ends = ForecastStep(36, loss, loss, {}, recent_loss=loss)
    rungs = [dataclasses.replace(rung, curve=(ends,)) for rung in rungs_of("TTFF")]
    assert in_doubt(rungs, []) is (None if place is None else rungs[place])


def test_rates_that_differ_by_rounding_are_one_run() -> None:
    own, other = rungs_of("TF")
    assert dataclasses.replace(own, lr=1e-3).is_of_run(dataclasses.replace(own, lr=9.99e-4))
    assert not own.is_of_run(dataclasses.replace(own, lr=1.1 * own.lr))
    assert not own.is_of_run(dataclasses.replace(own, warmup=5))
    assert not own.is_of_run(other)


def test_of_open_rungs_the_one_with_the_lowest_predicted_loss_is_tried() -> None:
    rungs = [
        dataclasses.replace(rung, curve=tuple(ForecastStep(k, None, loss, {}) for k in (0, 18, 36)))
        for rung, loss in zip(rungs_of("uuu"), (2.3, 2.1, 2.2), strict=True)
    ]
    assert in_doubt(rungs, []) is rungs[1]


@pytest.mark.parametrize(("letters", "largest"), [("TtfF", RATES[1]), ("SfF", None), ("TfT", RATES[2])])
def test_the_largest_rate_is_the_largest_that_trains(letters: str, largest: float | None) -> None:
    assert largest_rate(rungs_of(letters)) == largest


@pytest.mark.parametrize(
    ("short", "long", "tried"),
    [
        ("TTTffFFF", "TTTFFFFF", [3]),  # the next one fails indeed
        ("TTTffFFF", "TTTtFFFF", [3, 4]),  # it trains, so that the one above it decides
        ("TTttfFFF", "TTTfFFFF", [3, 2]),  # it fails, so that the one below decides
        ("Tfffffff", "Tttttttt", [1, 2, 3, 4]),  # no more than that
        ("TTTTFFFF", "TTTTFFFF", []),
        ("FFFTFFFF", "TTTTFFFF", [2, 1, 0]),  # sure to fail below one that trains
        ("fTfTFFFF", "TTTTFFFF", [2]),
    ],
)
def test_rates_around_the_largest_are_tried_again_until_it_is_settled(
    short: str, long: str, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def try_all(self: Any, configs: list[Recipe], *, brief: bool = False) -> None:
        for config in configs:
            place = RATES.index(config.lr)
            if config.steps == CRITERION_STEPS:
                seen.append(place)
            letters = long if config.steps == CRITERION_STEPS else short
            self.rungs.append(dataclasses.replace(rungs_of(letters)[place], steps=config.steps))

    monkeypatch.setattr(ladder_module._Ladder, "try_all", try_all)
    monkeypatch.setattr(ladder_module, "candidates", lambda rungs: [])
    model = Tiny(depth=1)
    ladder = forecast_ladder(subject_of(model), anatomy_of(model), Recipe(lr=RATES[0]), RATES, whole=True)
    assert seen == tried
    assert len(tried) <= MOST_AGAIN
    by_place = [long if k in tried else short for k in range(len(RATES))]
    expected = [k for k, letters in enumerate(by_place) if letters[k] in "Tt"][-1]
    assert ladder.largest_rate == RATES[expected]


def test_a_rate_whose_longer_trial_cannot_be_made_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def try_all(self: Any, configs: list[Recipe], *, brief: bool = False) -> None:
        for config in configs:
            rung = rungs_of("TTfF")[RATES.index(config.lr)]
            if config.steps == CRITERION_STEPS:
                seen.append(config.lr)
                rung = dataclasses.replace(rung, outcome="not measured", reason="a schedule ended")
            self.rungs.append(rung)

    monkeypatch.setattr(ladder_module._Ladder, "try_all", try_all)
    monkeypatch.setattr(ladder_module, "candidates", lambda rungs: [])
    model = Tiny(depth=1)
    rates = RATES[:4]
    ladder = forecast_ladder(subject_of(model), anatomy_of(model), Recipe(lr=RATES[0]), rates, whole=True)
    assert seen == [RATES[2]]
    assert [rung.outcome for rung in ladder.rungs] == ["trains", "trains", "plateau", "collapses"]
    assert ladder.notes == (f"no trial of {CRITERION_STEPS} steps at {RATES[2]:g}: a schedule ended",)
