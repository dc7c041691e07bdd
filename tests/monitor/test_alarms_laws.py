"""Laws over all alarms: NaN first, sites and ranks, false alarms, speed, records."""

import copy
import math
import re
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from healthy_runs import ENTROPY, SITES_LAYOUT, STEP_LAYOUT, healthy_run

from normscope.cli.main import run
from normscope.monitor.alarms import ALARMS, NOT_MEASURED, Judges, is_measured
from normscope.monitor.entropy import STEPS
from normscope.rules import RULES, Finding, Severity, explain
from normscope.rules.pages import alarms_page

DOCS = Path(__file__).parents[2] / "docs"
NOTES = {"entropy": ENTROPY, "dtype": "float16"}


@pytest.mark.parametrize("seed", range(20))
def test_no_alarm_in_a_healthy_run_of_2000_steps(seed: int) -> None:
    judges = Judges(NOTES)
    found = [(step, each.message) for step, *row in healthy_run(seed) for each in judges.feed(step, *row)]
    assert found == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("row", [1, 30])
def test_a_wrong_value_in_any_column_is_found_at_its_row(wrong: float, row: int) -> None:
    rows = [each for each in healthy_run(0) if each[1] is SITES_LAYOUT][:row]
    steps = [each for each in healthy_run(0) if each[1] is STEP_LAYOUT][:row]
    for chosen in (rows, steps):
        before = Judges(NOTES)
        for each in chosen[:-1]:
            before.feed(*each)
        step, layout, values = chosen[-1]
        for column in range(0, len(layout), 1 if row == 1 else 7):
            judges = copy.deepcopy(before)
            changed = values.copy()
            changed[column] = wrong
            first = judges.feed(step, layout, changed)[0]
            assert first.code == ("NS802" if wrong == 1e30 else "NS801"), layout[column]
            assert first.severity is Severity.ERROR
            assert first.evidence[0].quantity == layout[column][0]
            assert first.sites == ((layout[column][1],) if layout[column][1] else ())


def test_what_was_not_measured_is_no_nan() -> None:
    judges, layout = Judges(NOTES), (("loss", ""), ("update/lost", "norm"))
    stored = np.frombuffer(np.array([1.0, NOT_MEASURED], dtype="<f8").tobytes(), dtype="<f8")
    assert is_measured(stored).tolist() == [True, False]
    assert is_measured(np.array([math.nan, -math.nan, np.float32("nan")])).all()
    assert [each for step in range(60) for each in judges.feed(step, layout, stored)] == []
    assert [each.code for each in judges.feed(60, layout, [1.0, math.nan])] == ["NS801"]


def test_a_row_must_fit_its_layout() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        Judges().feed(1, (("loss", ""), ("lr", "")), [1.0])


def test_equal_layouts_share_their_history() -> None:
    judges, rng, found = Judges(), np.random.default_rng(0), []
    for step in range(100):
        layout = tuple((name, "") for name in ["loss"])
        found += judges.feed(step, layout, [9.0 if step == 80 else 2 + 0.01 * rng.normal()])
    assert [each.code for each in found] == ["NS804"]


def test_a_run_that_goes_back_begins_anew() -> None:
    judges, layout = Judges(), (("loss", ""),)
    for step in range(100):
        assert judges.feed(step, layout, [2.0]) == []
    assert judges.feed(50, layout, [8.0]) == []
    assert judges.feed(51, layout, [math.nan])[0].code == "NS801"


def test_a_run_that_goes_back_forgets_its_learning_rate_and_its_ranks() -> None:
    judges, lost = Judges(), (("update/lost", "norm"),)
    judges.feed(100, (("lr", ""),), [0.0])
    found = [each.code for step in range(10, 100, 10) for each in judges.feed(step, lost, [1.0])]
    assert found == ["NS813"], "no update is lost at a learning rate of 0"
    judges, weights = Judges(), (("weight/norm", "b"),)
    for step in (20, 21, 22, 10, 11):
        found = [each.code for rank in (0, 1) for each in judges.feed(step, weights, [1.0 + rank], rank=rank)]
        assert found == (["NS814"] if step in (21, 11) else []), "each time the second step has all ranks"


SHARED = (("loss", ""), ("lr", ""), ("weight/norm", "b.0"), ("stream/rms", "b.0"))


def ranks(
    count: int, change: dict[int, dict[int, float]], steps: int = 60, notes: dict[str, object] | None = None
) -> list[tuple[int, Finding]]:
    """Alarms over rows of `count` ranks; `change` has factors by rank and column from step 20 on."""
    judges, rng, found = Judges(notes), np.random.default_rng(0), []
    for step in range(1, steps + 1):
        for rank in range(count):
            values = np.array([2.0, 1e-3, 10.0, 1.0]) * np.exp(
                [0.05 * rng.normal(), 0, 0, 0.05 * rng.normal()]
            )
            for column, factor in change.get(rank, {}).items():
                values[column] *= factor if step >= 20 else 1
            found += [(step, each) for each in judges.feed(step, SHARED, values, rank=rank)]
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_agree_raise_nothing(count: int) -> None:
    assert ranks(count, {}) == []
    assert ranks(count, {1: {2: 1 + 1e-6}}) == []


@pytest.mark.parametrize("count", [2, 4])
def test_weights_that_part_are_an_error_at_that_step(count: int) -> None:
    ((step, finding),) = ranks(count, {1: {2: 1.01}})
    assert (step, finding.code, finding.severity, finding.sites) == (20, "NS814", Severity.ERROR, ("b.0",))
    if count > 2:
        assert "on rank 1" in finding.message
    assert ranks(count, {1: {2: 1.01}}, notes={"sharded": True}) == []


def test_a_rank_whose_loss_stays_apart_is_a_warning() -> None:
    ((step, finding),) = [each for each in ranks(4, {2: {0: 1.8}}, 80) if each[1].code == "NS814"]
    assert finding.severity is Severity.WARNING
    assert 20 < step <= 60
    assert "on rank 2" in finding.message
    assert [each for each in ranks(4, {2: {0: 1.2}}, 80) if each[1].code == "NS814"] == []


def test_a_nan_on_one_rank_is_named_and_compared_with_nothing() -> None:
    found = ranks(3, {1: {0: math.nan, 2: math.nan}})
    assert [(step, each.code) for step, each in found] == [(20, "NS801")]
    assert "on rank 1" in found[0][1].message
    assert [each.code for _, each in ranks(3, {1: {0: 1e30, 2: 1e30}})] == ["NS802"]


def test_a_row_of_500_columns_costs_little() -> None:
    """0.1 to 0.25 ms were measured on one core; the limit leaves room for a busy machine."""
    names = sorted({quantity for quantity, _ in SITES_LAYOUT} | {"gradient/block", "stream/rms"})
    layout = tuple((names[i % len(names)], f"blocks.{i // len(names)}") for i in range(500))
    values = 0.3 * np.exp(0.1 * np.random.default_rng(0).normal(size=(150, 500)))
    judges, best = Judges(NOTES), math.inf
    for first in range(0, 150, 50):
        begun = time.perf_counter()
        for row in range(first, first + 50):
            judges.feed(row, layout, values[row])
        best = min(best, (time.perf_counter() - begun) / 50)
    assert best < 1e-3


@pytest.mark.parametrize("code", ALARMS)
def test_an_alarm_says_why_whence_and_what_to_do(code: str) -> None:
    record, text = ALARMS[code], explain(code)
    assert explain(record.name) == text
    assert text.startswith(f"# {code} {record.name}\n")
    for part in (record.summary, record.why, record.threshold, record.source, record.remedy):
        assert part.endswith("."), part
        assert part in text
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|[Oo]ur |IEEE|[Ee]xact|closed form|documentation", record.source)
    for named in re.findall(r"NS\d{3}", text):
        assert named in RULES | ALARMS


def test_the_page_is_in_step_with_the_alarms() -> None:
    written = (DOCS / "alarms.md").read_text(encoding="utf-8")
    assert written == alarms_page(), "run: python -m normscope.monitor.alarms > docs/alarms.md"


def test_the_texts_say_what_is_read_for_late_collapse_and_stuck_at_unigram() -> None:
    chinese = tomllib.loads((DOCS / "findings" / "zh-alarms.toml").read_text(encoding="utf-8"))
    for code, said in (("NS808", ("eval", "undecided")), ("NS809", (str(STEPS), "entropy="))):
        for text in (ALARMS[code].threshold, chinese[code]["threshold"]):
            assert all(each in text for each in said), text


def test_codes_and_names_of_alarms_are_frozen() -> None:
    assert [(each.code, each.name) for each in ALARMS.values()] == [
        ("NS801", "not-finite"),
        ("NS802", "garbage-value"),
        ("NS803", "steps-skipped"),
        ("NS804", "loss-spike"),
        ("NS805", "gradient-spike"),
        ("NS806", "update-spike"),
        ("NS807", "slow-growth"),
        ("NS808", "late-collapse"),
        ("NS809", "stuck-at-unigram"),
        ("NS810", "branch-dies"),
        ("NS811", "gains-decay"),
        ("NS812", "headroom"),
        ("NS813", "gains-freeze"),
        ("NS814", "rank-apart"),
        ("NS815", "loss-rises"),
        ("NS816", "rescued-often"),
        ("NS817", "adam-forgets"),
        ("NS819", "entropy-collapse"),
    ]


def test_the_command_explains_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "gains-freeze"]) == 0
    assert "NS813" in capsys.readouterr().out
