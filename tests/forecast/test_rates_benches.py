"""The grids of warm-ups and sizes: their scores and fits on made-up runs, and training that stops early."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rates import scale_fit, scale_truth, training, warmup_forecasts, warmup_scores, warmup_truth
from benchmarks.rates.scale_cases import FAMILIES, Family
from benchmarks.rates.scale_fit import best_of, exponent, known, of_map, of_runs, pairs, spread
from benchmarks.rates.warmup_cases import CASES, WARMUPS, WarmupCase
from benchmarks.rates.warmup_scores import HELPS_NOT, scored, shortest
from benchmarks.regimes.builders import decoder
from benchmarks.regimes.case import Case
from benchmarks.regimes.feeds import tokens
from normscope.forecast.scaling import Law

RATES = tuple(1e-3 * 2**i for i in range(-3, 4))


def runs(best: float, size: int, **more: Any) -> list[dict[str, Any]]:
    """Runs whose loss is a parabola in log₂ of the rate."""
    about = {"family": "a", "part": "seen", "parametrisation": "standard", "depth": 3, "width": size}
    about |= {"seed": 0} | more
    return [about | {"lr": lr, "last": 2 + 0.1 * math.log2(lr / best) ** 2} for lr in RATES]


def test_a_power_law_is_found_with_its_exponent() -> None:
    rows = [row for size in (16, 32, 64) for row in runs(2e-3 * (size / 16) ** -0.75, size)]
    best = known(of_runs(rows, "standard", "seen"))
    assert {size: 2**rate for (_, _, size), rate in best.items()} == pytest.approx(
        {size: 2e-3 * (size / 16) ** -0.75 for size in (16, 32, 64)}
    )
    slope, half = exponent(best)
    assert (slope, half) == (pytest.approx(-0.75), pytest.approx(0, abs=1e-9))
    assert spread(pairs(best), slope) == pytest.approx(1)
    assert spread(pairs(best), slope + 0.5) == pytest.approx(2), "16 to 64 is two octaves"
    assert len(pairs(best | {("a", 0, 256): 0.0})) == 3 + 2, "16 and 256 are too far apart"
    assert of_runs(rows, "mup", "seen") == of_runs(rows, "standard", "held-out") == {}
    assert "3 of 3 within ×2" in scale_fit.line("width", best, Law(-0.5, 2.0, 4))
    assert "0 of 3 within ×2" in scale_fit.line("width", best, Law(0.5, 2.0, 4))


def test_each_family_and_seed_has_its_own_constant() -> None:
    rows = [
        row
        for seed, start in ((0, 2e-3), (1, 5e-4))
        for size in (16, 64)
        for row in runs(start * (size / 16) ** -0.5, size, seed=seed)
    ]
    assert exponent(known(of_runs(rows, "standard", "seen")))[0] == pytest.approx(-0.5)


def test_a_best_rate_at_an_end_is_not_known() -> None:
    assert best_of([(1e-3, 1.0), (2e-3, 2.0), (4e-3, 3.0)]) is None
    assert best_of([(1e-3, None), (2e-3, None), (4e-3, None)]) is None
    assert best_of([]) is None
    assert best_of([(4e-3, 2.0), (1e-3, 2.0), (2e-3, 1.0)]) == pytest.approx(math.log2(2e-3))


def test_a_run_that_failed_is_a_neighbour_of_the_best_rate() -> None:
    assert best_of([(1e-3, 3.0), (2e-3, 2.0), (4e-3, None)]) == math.log2(2e-3)
    assert best_of([(1e-3, None), (2e-3, 2.0), (4e-3, 3.0)]) == math.log2(2e-3)
    near, far = [(1e-3, 3.0), (2e-3, 2.0), (4e-3, 2.5)], [(8e-3, None), (1.6e-2, 2.4)]
    assert best_of(near + far) == best_of(near)


def test_sizes_whose_best_rate_is_at_an_end_are_left_out_and_counted() -> None:
    rows = [row for size in (16, 32) for row in runs(1e-3, size)] + runs(1e-9, 64)
    found = of_runs(rows, "standard", "seen")
    assert found["a", 0, 64] is None
    assert scale_fit.line("width", found, None).endswith(
        "(1 pairs, 1 families × seeds), spread ×1.00; 1 of 3 sizes × seeds left out"
    )
    assert scale_fit.line("width", {}, None) == "width: no pair of sizes; 0 of 0 sizes × seeds left out"


def test_a_loss_of_zero_is_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {2e-3: 1.0, 4e-3: 0.0, 8e-3: None}
    monkeypatch.setattr(
        scale_truth, "_trained", lambda case, number, rates: {lr: {"last": losses[lr]} for lr in rates}
    )
    assert [run["last"] for run in scale_truth.runs(FAMILIES[0], 3, 16, 0)] == [1.0, 0.0, None]


def test_the_table_of_maps_is_read_without_the_sections_behind_it() -> None:
    left, right = "+1.00 | +0.10 +0.20 | **−0.30** **−0.40**", "**−0.20** **−0.20** | +0.02 −0.01 | +0.1 +0.2"
    row = f"| {{}} | {{}} | {left} | {{}} | {right} | x |"
    text = "\n".join(
        [row.format("pre", 4, "**−0.60** **−0.30**"), row.format("post", 4, "+0.1 +0.1"), "### Later"]
    )
    text += "\n" + row.format("pre", 8, "**−0.60** **−0.30**")
    found = of_map(text, ["pre"])
    assert found.keys() == {("pre", 0, 4), ("pre", 1, 4)}
    rates = scale_fit.MAP_RATES
    assert rates[2] < 2 ** found["pre", 1, 4] < rates[3]
    assert rates[2] < 2 ** found["pre", 0, 4] < rates[4]
    assert of_map(text.replace("−", "+"), ["pre"]) == {}, "none trains"


def truth(*trained: tuple[int, str], rate: float = 2e-3) -> list[dict[str, Any]]:
    """Runs of a case; a warm-up has a word such as "10", a figure for each replica."""
    return [
        {"case": "x", "lr": rate, "warmup": warmup, "replica": k, "trains": bit == "1", "last": 2.0 + warmup}
        for warmup, word in trained
        for k, bit in enumerate(word)
    ]


def said(warmup: int | None, words: str = "does not help: the run fails too") -> dict[str, Any]:
    rows = [{"steps": 36}, {"steps": 20}]
    about = {"case": "x", "part": "seen", "wanted": 2e-3, "rungs": rows, "ramps": rows[:1]}
    return about | {"warmup": warmup, "words": words if warmup is None else f"{warmup} steps or more"}


@pytest.mark.parametrize(
    ("trained", "true"),
    [
        ([(0, "00"), (9, "01"), (18, "11"), (36, "11")], 18),
        ([(0, "11"), (9, "11")], 0),
        ([(0, "00"), (9, "00")], HELPS_NOT),
        ([(0, "00"), (9, "01")], None),
    ],
)
def test_the_true_shortest_trains_in_every_replica(trained: list[tuple[int, str]], true: int | None) -> None:
    assert shortest(truth(*trained) + truth((0, "11"), rate=1e-3), 2e-3) == true


@pytest.mark.parametrize(
    ("name", "trained", "right"),
    [
        (18, "0011", False),
        (36, "0011", True),
        (18, "0111", True),
        (9, "0111", True),
        (0, "0111", False),
        (None, "0111", False),
        (None, "0000", True),
        (36, "0000", False),
        (0, "1111", True),
        (None, "1111", False),
        (9, "1111", False),
    ],
)
def test_a_name_is_right_within_a_factor_of_two(name: int | None, trained: str, right: bool) -> None:
    found = scored(truth(*zip((0, 18, 72, 150), (2 * bit for bit in trained), strict=True)), said(name))
    assert found.is_right is right
    assert (found.trial_steps, found.rung_steps) == (36, 56)
    assert (found.lowest_bare, found.lowest_ramped) == (2.0, 20.0)
    assert ("right" if right else "WRONG") in warmup_scores.table([found])


@pytest.mark.parametrize(
    "words", ["not tried: the trial at 0.002 is slow", "not known to help: the trial with one is undecided"]
)
def test_a_forecast_without_an_answer_is_neither_right_nor_wrong(words: str) -> None:
    bare = truth((0, "00"), (18, "00"))
    found = [scored(bare, said(None, words)), scored(bare, said(None)), scored(bare, said(36))]
    assert [each.is_right for each in found] == [None, True, False]
    shown = warmup_scores.table(found)
    assert "said nothing, true none helps in 2 replicas: no answer" in shown
    assert "seen: 1 of 2 right (9 to 91 %); 1 without an answer" in shown


def test_cases_that_are_held_out_have_other_data_and_names() -> None:
    parts = {part: [of.case for of in CASES if of.case.part == part] for part in ("seen", "held-out")}
    assert min(map(len, parts.values())) == 7
    assert not {case.feed.baseline() for case in parts["seen"]} & {
        case.feed.baseline() for case in parts["held-out"]
    }
    assert len({of.case.name for of in CASES}) == len(CASES)
    assert {family.part for family in FAMILIES} == {"seen", "held-out"}


def tiny(steps: int = 3) -> Case:
    feed = tokens("help", 256, "ids", size=1, length=8)
    return Case("t", "tiny", lambda: decoder("pre", 1, 16).build(256), feed, "adamw", 1, "seen", steps)


def test_a_run_stops_where_its_tokens_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "FIRST", 1)
    monkeypatch.setattr(training, "LATER", 1)
    case = tiny(8)
    recipes = [case.recipe(1e-3, 1), case.recipe(1e-3, 1).with_warmup(4)]
    assert [len(each) for each in training.train_watched(case.subject(1), recipes)] == [8, 8]
    monkeypatch.setattr(training, "ALIKE", 2.0)
    assert [len(each) for each in training.train_watched(case.subject(1), recipes)] == [2, 6]


def test_the_commands_keep_a_line_a_run_and_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of = WarmupCase(tiny(), 1e-3)
    family = Family(
        "f", "seen", "standard", lambda depth, width: decoder("pre", 1, 16).build(256), tiny().feed
    )
    monkeypatch.setattr(warmup_truth, "CASES", (of,))
    monkeypatch.setattr(warmup_forecasts, "CASES", (of,))
    monkeypatch.setattr(scale_truth, "FAMILIES", (family,))
    monkeypatch.setattr(Family, "shapes", lambda self: [(1, 16)])
    monkeypatch.setattr(Family, "case", lambda self, depth, width: tiny())
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(warmup_forecasts, "with_baseline", lambda subject: (subject, ()))
    files = [tmp_path / f"{name}.jsonl" for name in ("truth", "said", "scale")]
    for _ in range(2):
        for module, file in zip((warmup_truth, warmup_forecasts, scale_truth), files, strict=True):
            monkeypatch.setattr(sys, "argv", ["x", str(file)])
            module.main()
    rows, said, sizes = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert [(row["lr"], row["warmup"]) for row in rows if row["replica"] == 1] == of.runs
    assert len(rows) == 2 * (3 + len(WARMUPS))
    assert len(said) == 1
    assert [rung["lr"] for rung in said[0]["rungs"]] == [2.5e-4, 5e-4, 1e-3]
    assert {row["seed"] for row in sizes} == {0, 1}
    for seed in (0, 1):
        rates = [run["lr"] for run in sizes if run["seed"] == seed]
        assert {2e-3, 4e-3, 8e-3} <= set(rates)
        assert len(rates) == len(set(rates)), "the second call trains nothing again"
