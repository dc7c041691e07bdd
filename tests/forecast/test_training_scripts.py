"""The training scripts of `benchmarks.loops`: their records and scores, on made-up runs."""

import functools
import math
from typing import Any

import pytest

from benchmarks.loops import forecasts, scores
from benchmarks.loops.scripts import FOLDER, SCRIPTS, command, run
from benchmarks.loops.truth import trained, trains
from benchmarks.process import ROOT, records_of
from benchmarks.regimes.best_rates import Named
from benchmarks.regimes.case import RATES
from benchmarks.regimes.forecasts import finite
from benchmarks.regimes.scores import figures, ladders

SCRIPT = """
import json, sys
lr, seed = float(sys.argv[2]), int(sys.argv[4])
print("step 1")
print(json.dumps({"losses": [2.5] * 20 + [lr if seed else float("nan")] * 20} | TARGETS))
"""


EVIDENCE = (ROOT / "docs/forecast-evidence.md").read_text(encoding="utf-8")


def test_every_script_of_the_folder_is_listed() -> None:
    held = {file.stem for file in FOLDER.glob("*.py") if "def main" in file.read_text("utf-8")}
    assert held == {*SCRIPTS, "forecasts", "scores", "truth"}


@pytest.mark.parametrize(
    ("last", "baseline", "unit", "right"),
    [(1.9, 2.0, 1.0, True), (1.91, 2.0, 1.0, False), (0.44, 0.5, 0.5, True), (None, 2.0, 1.0, False)],
)
def test_a_run_trains_a_tenth_of_its_unit_under_the_baseline(
    last: float | None, baseline: float, unit: float, right: bool
) -> None:
    assert trains(last, baseline, unit) == right


def test_the_last_line_of_a_script_is_its_record(tmp_path: Any) -> None:
    file = tmp_path / "toy.py"
    file.write_text(SCRIPT.replace("TARGETS", "{'counts': [3, 0, 1]}"))
    found = trained(file, 1e-3, 2)
    assert (found["case"], found["lr"], found["replica"], found["trains"]) == ("toy", 1e-3, 2, True)
    assert (found["curve"], found["last"]) == ([2.5, 1e-3], 1e-3)
    assert found["own_baseline"] == round(0.75 * math.log(4 / 3) + 0.25 * math.log(4), 4)
    assert found["unit"] == 1
    broken = trained(file, 1e-3, 0)
    assert (broken["curve"], broken["last"], broken["trains"]) == ([2.5, None], None, False)
    file.write_text(SCRIPT.replace("TARGETS", "{'constant': 0.5}"))
    assert (trained(file, 1e-3, 1)["own_baseline"], trained(file, 1e-3, 1)["unit"]) == (0.5, 0.5)
    file.write_text("raise SystemExit('it broke')")
    with pytest.raises(RuntimeError, match="it broke"):
        trained(file, 1e-3, 2)


def test_a_script_that_cannot_be_forecast_is_not_measured(tmp_path: Any) -> None:
    file = tmp_path / "toy.py"
    file.write_text("print('nothing to train')")
    found = forecasts.forecasts(file)
    assert [each["lr"] for each in found] == list(RATES)
    assert {each["outcome"] for each in found} == {"not measured"}
    assert found[0]["best"]["rate"] is None
    assert "expected a script that trains" in found[0]["best"]["reason"]
    assert run(command(file, 1e-3, 0))[0].stdout == "nothing to train\n"


def test_figures_that_are_not_finite_are_null() -> None:
    assert finite({"a": ["nan", "inf", 1 / 3, None, 3], "reason": "information"}) == {
        "a": [None, None, 0.333333, None, 3],
        "reason": "information",
    }


def test_a_script_is_scored_by_the_rates_that_the_command_named() -> None:
    best = {"rate": 1e-3, "low": 5e-4, "high": 2e-3, "reason": "why", "warmup": 0}
    said = [
        {"case": "toy", "lr": lr, "outcome": outcome, "reason": "why", "certainty": certainty}
        | {"seconds": 1.0, "curve": [], "best": best, "largest_rate": 1e-3}
        for lr, outcome, certainty in (
            (1e-4, "trains", 0.99),
            (1e-3, "trains", 0.95),
            (1e-2, "diverges", 0.02),
        )
    ]
    runs = [
        {"case": "toy", "replica": seed, "lr": lr, "last": last, "trains": last < 1.9, "seconds": 10.0}
        | {"baseline": 2.0, "own_baseline": 2.0, "curve": [1.0] * 15}
        for seed in range(3)
        for lr, last in ((1e-4, 1.5), (1e-3, 1.0), (1e-2, 3.0 if seed else 1.85))
    ]
    found, _ = ladders(runs, said)
    text = scores.table([scores.named(ladder) for ladder in found])
    assert "toy: sure cells right 2 of 2; cells right 2 of 2" in text
    assert "sure at the edge 1 of 1" in text
    assert "largest 0.001, seeds 0.01 0.001 0.001: right" in text
    assert "best 0.001 (0.0005 0.002), seeds 0.001 0.001 0.001: right, 0.0 % of the fall lost" in text
    assert "best right on 1 of 1; 0.0 % of the fall lost (median)" in text
    worse = [rung | {"best": best | {"rate": 1e-4}} for rung in said]
    (ladder,), _ = ladders(runs, worse)
    assert not scores.named(ladder).is_right
    assert scores.named(ladder).excess == pytest.approx(0.5)
    assert math.isclose(ladder.cost, 0.1)


@functools.cache
def kept() -> list[Named]:
    """The scripts as their kept forecasts and runs score."""
    truth, said = (records_of(FOLDER / name) for name in ("truth.jsonl", "forecasts.jsonl"))
    found, incomplete = ladders(truth, said)
    assert not incomplete
    return [scores.named(ladder) for ladder in found]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_row_of_a_script_in_the_docs_is_what_the_scores_are(name: str) -> None:
    (script,) = (each for each in kept() if each.ladder.name == name)
    f = figures([script.ladder])
    assert script.said.rate is not None
    largest, best = (
        ", ".join(f"{rate:g}" for rate in dict.fromkeys(sorted(rates)))
        for rates in (script.ladder.largest_of_replicas, script.best)
    )
    row = (
        f" | {script.ladder.largest:g} | {largest} | {script.said.rate:.2g} | {best} "
        f"| {100 * (script.excess or 0):.1f} % | {f['sure and right']} of {f['sure']} "
        f"| {f['edge cells']}, {f['sure at the edge']} |"
    )
    (line,) = (line for line in EVIDENCE.splitlines() if line.startswith(f"| `{name}`"))
    assert line.endswith(row)


def test_the_sums_over_the_scripts_in_the_docs_are_what_the_scores_are() -> None:
    found = [each.ladder for each in kept()]
    f, near = figures(found), sum(each.is_right for each in kept())
    said = (
        f"The largest rate is within ×1.5 on {f['largest rates']} of {len(found)}, the rate to use within ×2 "
        f"on {near} of {len(found)}, and {f['sure and right']} of {f['sure']} sure cells are right"
    )
    assert said in EVIDENCE
