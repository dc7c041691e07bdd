"""`normscope check RUN.db`: the report on a run that is over, died, or goes on, from its store."""

import contextlib
import json
import math
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import nn

from normscope.cli.main import run
from normscope.completion import complete_codes, complete_model
from normscope.database import Database
from normscope.errors import UsageError
from normscope.maps import Store
from normscope.monitor import Event, Layout, Monitor, Raised, Row, RunReader, RunStore
from normscope.monitor.after import RunReport, check_run
from normscope.monitor.after.findings import Past, judged_again
from normscope.monitor.scene import Scene, Watcher
from normscope.rules import Finding, Severity
from normscope.schemas import schema

STEP: Layout = (
    *((name, "") for name in ("loss", "gradient/norm", "lr", "seconds", "tokens", "skipped")),
    *(("stream/rms", f"blocks.{i}") for i in range(3)),
)
SITES: Layout = tuple(("weight/norm", kind) for kind in ("attention", "feed-forward"))
WRONG = "blocks.1.mlp overflowed in the forward (model.py:12)."


def figures(step: int, loss: float | None = None) -> np.ndarray:
    noise = np.random.default_rng(step).normal(size=5) * 0.01
    falling = 2.0 + math.exp(-step / 50) + noise[0]
    streams = [1.0 + i + noise[2 + i] for i in range(3)]
    return np.array([falling if loss is None else loss, 1.0 + noise[1], 1e-3, 0.25, 1024.0, 0.0, *streams])


def add_steps(store: RunStore, last: int, first: int = 1, losses: dict[int, float] | None = None) -> None:
    """Healthy steps, with some other losses."""
    store.declare("step", STEP)
    given = losses or {}
    rows = [(step, figures(step, given.get(step))) for step in range(first, last + 1)]
    store.add([Row(step, store.rank, float(step), "step", row) for step, row in rows])


def alarm(step: int, code: str = "NS804", severity: Severity = Severity.WARNING, rank: int = 0) -> Raised:
    name = {"NS804": "loss-spike", "NS801": "not-finite", "NS807": "slow-growth"}[code]
    remedy = "Lower the <b>rate</b>."
    finding = Finding(code, name, severity, ("blocks.1",), f"It rose at {step}.", (), "t", "s", remedy)
    return Raised(step, rank, float(step), finding)


@pytest.fixture
def store(path: Path) -> Iterator[RunStore]:
    with RunStore(path) as store:
        store.note("model", "GPT")
        yield store


def validate(document: Any) -> None:
    jsonschema.Draft202012Validator(schema("run")).validate(document)


def said(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of `normscope check PATH`."""
    status = run(["check", str(path), *options])
    found = capsys.readouterr()
    return status, found.out, found.err


# Verdicts.


def test_a_run_without_alarms_is_healthy(store: RunStore, path: Path) -> None:
    add_steps(store, 120)
    store.end()
    report = check_run(path)
    assert (report.verdict, report.why, report.findings) == ("healthy", "no alarm in 120 steps", ())
    report.assert_healthy()
    found = report.figures
    assert (found.first_step, found.last_step, found.num_steps, found.num_missing) == (1, 120, 120, 0)
    assert (found.seconds, found.tokens, found.tokens_per_second) == (30.0, 122880.0, 4096.0)
    losses = [figures(step)[0] for step in range(1, 121)]
    assert (found.first_loss, found.last_loss) == (losses[0], losses[-1])
    assert (found.best_loss, found.best_step) == (min(losses), losses.index(min(losses)) + 1)


def nothing(store: RunStore) -> None:
    store.end()


def five_steps(store: RunStore) -> None:
    add_steps(store, 5)
    store.end()


def still_running(store: RunStore) -> None:
    add_steps(store, 120)


def interrupted(store: RunStore) -> None:
    add_steps(store, 120)
    store.end("KeyboardInterrupt")


def failed_monitor(store: RunStore) -> None:
    add_steps(store, 120)
    store.add(events=[Event(120, 0, 1.0, "monitor-failed", {"error": "RuntimeError: no room"})])
    store.end()


def ranks_left_out(store: RunStore) -> None:
    add_steps(store, 120)
    sentence = "rank 1 has written no row to this store: not compared"
    store.add(events=[Event(120, 0, 1.0, "ranks", {"sentence": sentence})])
    store.end()


def a_gap(store: RunStore) -> None:
    add_steps(store, 120)
    add_steps(store, 140, first=130)
    store.end()


def no_loss(store: RunStore) -> None:
    store.declare("step", STEP[1:])
    store.add([Row(step, 0, 1.0, "step", figures(step)[1:]) for step in range(1, 121)])
    store.end()


def no_streams(store: RunStore) -> None:
    store.declare("step", STEP[:6])
    store.add([Row(step, 0, 1.0, "step", figures(step)[:6]) for step in range(1, 121)])
    store.end()


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (nothing, "no step was stored"),
        (five_steps, "5 steps are fewer than the 100 that slow alarms need"),
        (still_running, "the run still goes on at step 120"),
        (interrupted, "the run was interrupted after step 120"),
        (failed_monitor, "the monitor stopped at step 120: RuntimeError: no room"),
        (ranks_left_out, "rank 1 has written no row to this store: not compared"),
        (a_gap, "9 steps before the last have no figures"),
        (no_loss, "the loss was not measured at every step"),
        (no_streams, "the residual stream was not measured at every step"),
    ],
)
def test_what_is_partly_unread_is_not_judged_healthy(
    written: Callable[[RunStore], None], why: str, store: RunStore, path: Path
) -> None:
    written(store)
    report = check_run(path)
    assert (report.verdict, report.why) == ("undecided", why)
    assert report.severities == {"warning"}
    with pytest.raises(AssertionError, match=f"verdict 'undecided', {re.escape(why)}"):
        report.assert_healthy()


def test_a_run_that_failed_says_after_which_step_and_why(store: RunStore, path: Path) -> None:
    add_steps(store, 120)
    store.end("ValueError: bad batch")
    report = check_run(path)
    assert (report.verdict, report.why) == ("failed", "the run failed after step 120: ValueError: bad batch")


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from test_check_run import RunStore, add_steps
store = RunStore(sys.argv[1])
add_steps(store, 7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_died_is_read_from_its_log(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file itself does not say yet that it is a run: its first page lies in the log."""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), here], check=False)
    assert done.returncode == -signal.SIGKILL
    other = path.rename(path.with_name("kept"))
    Path(f"{path}-wal").rename(f"{other}-wal")
    status, document, _ = said(other, capsys, "--format", "json")
    validate(json.loads(document))
    status, out, _ = said(other, capsys)
    assert status == 1
    assert out.startswith("failed  kept")
    assert "died without an end, after step 7;" in " ".join(out.split())
    assert out.count("no longer runs") == 1


@pytest.mark.parametrize(
    ("said_of_looks", "line"),
    [
        (["a", "a", "b"], "looks 3, of which 1 was like the one before"),
        (["a", "a", "a", "b"], "looks 4, of which 2 were like the one before"),
        (["a", "b", "b"], "looks 3 step 10"),
    ],
)
def test_looks_that_are_not_listed_are_counted(
    said_of_looks: list[str], line: str, store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_steps(store, 120)
    for step, names in enumerate(said_of_looks, 1):
        data = {"sentence": f"step {10 * step}, {names}", "why": "asked", "findings": []}
        store.add(events=[Event(10 * step, 0, 1.0, "look", data)])
    _, out, _ = said(path, capsys)
    assert line in " ".join(out.split())


def test_an_interrupted_run_is_said_to_be_that_in_both_lines(
    store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(store)
    _, out, _ = said(path, capsys)
    assert "was interrupted after step 120; began" in " ".join(out.split())
    assert "failed" not in out


def test_the_first_wrong_value_comes_before_all_alarms(
    store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_steps(store, 120, losses={31: math.nan})
    store.add(
        alarms=[alarm(20), alarm(31, "NS801", Severity.ERROR), alarm(40)],
        events=[Event(31, 0, 31.0, "first-wrong-value", {"sentence": WRONG, "module": "blocks.1.mlp"})],
    )
    store.end()
    report = check_run(path)
    assert (report.verdict, report.why) == ("failed", "a value went wrong at step 31")
    assert [each.finding.code for each in report.findings] == ["NS801", "NS804", "NS804"]
    status, out, _ = said(path, capsys)
    assert status == 1
    order = [out.index(words) for words in (WRONG, "NS801 not-finite  step 31", "NS804 loss-spike  step 20")]
    assert order == sorted(order)
    assert "Again at step 40." in out
    assert "→ Lower the <b>rate</b>." in out
    assert "! not finite: 1" in out


# The stored alarms and the rows judged again.


def test_stored_alarms_stand_and_are_not_raised_twice(store: RunStore, path: Path) -> None:
    add_steps(store, 120, losses={60: 9.0})
    alarms = [(each.step, each.by) for each in check_run(path).findings if each.finding.code == "NS804"]
    assert alarms == [(60, "check")]  # this run's monitor raised none
    store.add(alarms=[alarm(61)])
    store.end()
    report = check_run(path)
    assert [(each.step, each.by, each.finding.code) for each in report.findings] == [(61, "monitor", "NS804")]
    assert report.verdict == "at risk"


def test_a_run_judged_again_has_the_alarms_of_its_monitor(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    quiet: list[Finding] = []
    stops = contextlib.suppress(SystemExit)
    with stops, Monitor(model, optimizer, store=path, on_alarm=quiet.append) as monitor:
        for step in range(170):
            ids = torch.randint(0, 16, (32,))
            loss = nn.functional.cross_entropy(model(ids), ids) * (50.0 if step in (110, 111, 140) else 1.0)
            if step == 160:
                loss = loss * math.nan
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        sys.exit()
    report = check_run(path)
    assert report.scene.state == "ended"
    assert [each.finding.code for each in report.findings if each.by == "check"] == []
    assert sorted(each.code for each in quiet) == sorted(each.finding.code for each in report.findings)
    assert {"NS801", "NS805"} <= {each.finding.code for each in report.findings}
    with RunReader(path) as reader:  # alarm by alarm: the same steps as well
        again = [
            (step, finding.code)
            for step, _, _, finding in judged_again(reader, report.scene, Past(reader, report.scene))
        ]
    assert again == [(each.step, each.finding.code) for each in report.scene.alarms]


def two_ranks(path: Path, apart: int | None, last: int = 40) -> None:
    """Weights of two ranks, which part at a step."""
    for rank in (0, 1):
        with RunStore(path, rank=rank) as store:
            add_steps(store, last)
            store.declare("sites", SITES)
            for step in range(1, last + 1):
                size = 1.1 if rank and apart is not None and step >= apart else 1.0
                store.add([Row(step, rank, float(step), "sites", np.array([10.0 * size, 20.0]))])
            store.end()


def test_ranks_that_part_are_found_by_judging_all_rows_together(path: Path) -> None:
    two_ranks(path, apart=20)
    (found,) = check_run(path).findings
    assert (found.finding.code, found.step, found.by, found.finding.severity) == (
        "NS814",
        20,
        "check",
        Severity.ERROR,
    )
    with RunStore(path, rank=0, resume=True) as store:
        parted = Finding("NS814", "rank-apart", Severity.ERROR, (), "They parted.")
        store.add(alarms=[Raised(20, 0, 20.0, parted)])
        store.end()
    (again,) = check_run(path).findings
    assert (again.by, again.finding.message) == ("monitor", "They parted.")


def test_shards_are_not_compared(path: Path) -> None:
    two_ranks(path, apart=20)
    with RunStore(path, rank=0, resume=True) as store:
        store.note("facts", {"sharded": True})
        store.end()
    assert check_run(path).findings == ()


def test_ranks_that_agree_raise_nothing(path: Path) -> None:
    two_ranks(path, apart=None)
    assert check_run(path).findings == ()


def test_an_alarm_of_several_ranks_is_one_finding(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        with RunStore(path, rank=rank) as store:
            add_steps(store, 120)
            store.add(alarms=[alarm(50, "NS807", rank=rank)])
            store.end()
    (found,) = check_run(path).findings
    assert found.ranks == (0, 1)
    assert "NS807 slow-growth  step 50, ranks 0, 1" in said(path, capsys)[1]


def test_the_facts_of_the_run_are_used_again(store: RunStore, path: Path) -> None:
    """A model that is not fed tokens may start with equal ones; bfloat16 cannot run out of range."""
    store.note("facts", {"dtype": "float16"})
    store.declare("step", STEP)
    store.declare("sites", (("stream/max", "blocks.0"),))
    add_steps(store, 200)
    store.add([Row(step, 0, 1.0, "sites", np.array([60000.0])) for step in range(10, 201, 10)])
    store.end()
    assert [each.finding.code for each in check_run(path).findings] == ["NS812"]
    store.note("facts", {"dtype": "bfloat16"})
    assert check_run(path).findings == ()


# Selection and exit status.


@pytest.mark.parametrize("options", [{"select": "NS812"}, {"ignore": "not-finite"}, {"ignore": "NS8"}])
def test_a_first_wrong_value_counts_whatever_is_selected(
    options: dict[str, str], store: RunStore, path: Path
) -> None:
    add_steps(store, 120)
    store.add(events=[Event(31, 0, 31.0, "first-wrong-value", {"sentence": WRONG})])
    store.end()
    report = check_run(path, **options)
    assert (report.verdict, report.why) == ("failed", "a value went wrong at step 31")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"select": "NS812,NS807"}, "no alarm among NS812, NS807 in 120 steps"),
        ({"ignore": "NS804"}, "no alarm in 120 steps, NS804 ignored"),
    ],
)
def test_the_reason_of_healthy_names_what_was_judged(
    options: dict[str, str], why: str, store: RunStore, path: Path
) -> None:
    add_steps(store, 120)
    store.add(alarms=[alarm(20)])
    store.end()
    report = check_run(path, **options)
    assert (report.verdict, report.why) == ("healthy", why)


def test_codes_and_names_of_alarms_are_selected_and_ignored(store: RunStore, path: Path) -> None:
    add_steps(store, 120)
    store.add(alarms=[alarm(20), alarm(31, "NS807"), alarm(40, "NS801", Severity.ERROR)])
    store.end()

    def codes(**options: str) -> list[str]:
        return [each.finding.code for each in check_run(path, **options).findings]

    assert codes() == ["NS801", "NS804", "NS807"]
    assert codes(select="NS804,slow-growth") == ["NS804", "NS807"]
    assert codes(ignore="NS801, loss-spike") == ["NS807"]
    assert codes(select="NS8", ignore="NS80") == []
    assert check_run(path, ignore="NS801").verdict == "at risk"
    assert check_run(path, ignore="NS80").verdict == "healthy"
    assert codes(select="NS1,NS801") == ["NS801"]
    with pytest.raises(UsageError, match=r"no finding 'slow-grow'.*the nearest is NS807"):
        check_run(path, select="slow-grow")
    with pytest.raises(UsageError, match=r"'NS1' and 'NS5' alone, which no run raises.*NS801"):
        check_run(path, select="NS1,NS5")


@pytest.mark.parametrize(
    ("severity", "fail_on", "status"),
    [
        (Severity.WARNING, "error", 0),
        (Severity.WARNING, "warning", 1),
        (Severity.ERROR, "error", 1),
        (Severity.ERROR, "never", 0),
    ],
)
def test_exit_status(
    severity: Severity,
    fail_on: str,
    status: int,
    store: RunStore,
    path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_steps(store, 120)
    store.add(alarms=[alarm(20, severity=severity)])
    store.end()
    assert said(path, capsys, "--fail-on", fail_on)[0] == status


def test_an_undecided_run_counts_as_a_warning(
    store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five_steps(store)
    assert [said(path, capsys, "--fail-on", each)[0] for each in ("error", "warning")] == [0, 1]


def test_a_model_takes_no_alarm_alone(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["check", "nn:decoder,depth=1,width=16,heads=2", "--steps", "0", "--budget", "fast"]
    assert run([*small, "--select", "NS801"]) == 2
    assert "'NS801' alone, which only a run can raise" in capsys.readouterr().err
    assert run([*small, "--select", "NS801,NS1", "--ignore", "loss-spike"]) == 0


@pytest.mark.parametrize("option", ["--lr=1e-3", "--steps=3", "--seed=1", "--budget=fast", "--forecast"])
def test_an_option_of_a_measurement_is_refused(
    option: str, store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five_steps(store)
    status, out, err = said(path, capsys, option)
    assert (status, out) == (2, "")
    assert f"{option.partition('=')[0]} with the store of a run" in err


# Formats.


def test_every_format_has_verdict_wrong_value_and_remedy(
    store: RunStore, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_steps(store, 120, losses={31: math.inf})
    store.note("notes", ["2 of 9 hooks <i>did not fire</i>"])
    store.add(
        alarms=[alarm(20), alarm(31, "NS801", Severity.ERROR)],
        events=[Event(31, 0, 31.0, "first-wrong-value", {"sentence": WRONG})],
    )
    store.end()
    page, document = tmp_path / "run.html", tmp_path / "run.json"
    assert said(path, capsys, "-o", str(page))[2] == f"{path}: failed. The report is in {page}\n"
    assert said(path, capsys, "-o", str(document))[0] == 1
    html = page.read_text(encoding="utf-8")
    assert "<h1>failed</h1>" in html
    assert html.count("<circle") == 1  # the loss of step 20; that of step 31 is infinite
    assert "Lower the &lt;b&gt;rate&lt;/b&gt;." in html
    assert "hooks &lt;i&gt;did not fire" in html
    assert "blocks.1.mlp overflowed" in html
    assert "<script" not in html
    found = json.loads(document.read_text(encoding="utf-8"))
    validate(found)
    assert found["first_wrong_value"]["data"]["sentence"] == WRONG
    assert [each["remedy"] for each in found["findings"]] == ["Lower the <b>rate</b>."] * 2
    assert found["loss"]["values"][30] == "inf"
    markdown = said(path, capsys, "--format", "markdown")[1]
    assert markdown.startswith("### normscope: failed\n")
    assert len(markdown.splitlines()) <= 60
    assert "\\<b\\>" in markdown
    assert "**first wrong value** at step 31" in markdown


def test_rescues_are_listed(store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_steps(store, 120)
    store.add(events=[Event(40, 0, 1.0, "rescue", {"sentence": "The step was skipped."})])
    store.end()
    assert [event.step for event in check_run(path).rescues] == [40]
    assert "step 40  The step was skipped." in said(path, capsys)[1]


@pytest.mark.parametrize(
    ("step", "data", "verdict"),
    [
        (31, {"action": "skip"}, "at risk"),
        (33, {"action": "back", "to": 25}, "at risk"),
        (33, {"action": "skip"}, "failed"),
        (31, {"action": "clip"}, "failed"),
        (31, {"action": "gave up"}, "failed"),
    ],
)
def test_a_wrong_value_whose_step_a_rescue_passed_over_does_not_fail_the_run(
    step: int, data: dict[str, Any], verdict: str, store: RunStore, path: Path
) -> None:
    add_steps(store, 120)
    rescued = Event(step, 0, 1.0, "rescue", data)
    wrong = Event(31, 0, 1.0, "first-wrong-value", {"sentence": WRONG})
    store.add(alarms=[alarm(31, "NS801", Severity.ERROR)], events=[rescued, wrong])
    store.end()
    report = check_run(path)
    assert report.verdict == verdict
    assert report.severities == ({"error"} if verdict == "failed" else {"warning"})
    store.add(alarms=[alarm(90, "NS801", Severity.ERROR)])
    assert check_run(path).verdict == "failed"


def resumed(path: Path, first: int, last: int = 140) -> None:
    with RunStore(path, resume=True) as store:
        store.declare("step", STEP)
        moment = time.time()
        store.add([Row(step, 0, moment, "step", figures(step)) for step in range(first, last + 1)])
        store.end()


@pytest.mark.parametrize(("first", "verdict"), [(25, "healthy"), (31, "healthy"), (32, "failed")])
def test_what_a_resumed_run_did_again_does_not_fail_it(
    first: int, verdict: str, store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_steps(store, 40)
    wrong = Event(31, 0, 1.0, "first-wrong-value", {"sentence": WRONG})
    store.add(alarms=[alarm(31, "NS801", Severity.ERROR)], events=[wrong])
    store.end("RuntimeError: it is NaN")
    resumed(path, first)
    report = check_run(path)
    assert report.verdict == verdict
    (found,) = report.findings
    assert found.passed == ("done again" if verdict == "healthy" else "")
    if verdict == "healthy":
        assert "step 31, done again since" in said(path, capsys)[1]
    validate(report.to_dict())


def test_rows_that_one_rank_did_again_are_not_compared_with_old_ones(path: Path) -> None:
    """Rank 1 was not resumed far enough: its rows from step 30 on are of other weights."""
    two_ranks(path, apart=20, last=40)
    with RunStore(path, rank=0, resume=True) as store:
        store.declare("step", STEP)
        store.declare("sites", SITES)
        moment = time.time()
        store.add([Row(step, 0, moment, "step", figures(step)) for step in range(10, 41)])
        store.add([Row(step, 0, moment, "sites", np.array([10.0, 20.0])) for step in range(10, 41)])
    with RunStore(path, rank=1, resume=True) as store:
        pass
    assert check_run(path).findings == ()


def test_a_long_run_has_a_short_markdown_and_a_curve_that_keeps_its_spike(
    store: RunStore, path: Path
) -> None:
    from normscope.monitor.after.page import condensed

    add_steps(store, 900, losses={455: 50.0})
    store.end()
    loss = check_run(path).scene.loss
    assert loss is not None
    steps, values = condensed(loss.steps, loss.values[:, 0])
    assert len(steps) == 300
    assert values[steps.index(455.0)] == 50.0
    assert len(check_run(path).to_markdown().splitlines()) <= 60


def test_a_notebook_shows_verdict_and_codes(store: RunStore, path: Path) -> None:
    add_steps(store, 120)
    store.add(alarms=[alarm(20)])
    store.end()
    report = check_run(path)
    assert isinstance(report, RunReport)
    assert repr(report) == f"<RunReport of {path}: at risk; NS804>"


# Files that are no runs.


def empty(path: Path) -> None:
    path.touch()


def words(path: Path) -> None:
    path.write_text("a text\n" * 100, encoding="utf-8")


def a_map(path: Path) -> None:
    Store(path).close()


def another_database(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE t (x)")


def cut(path: Path) -> None:
    with RunStore(path) as store:
        add_steps(store, 300)
    path.write_bytes(path.read_bytes()[:9000])


def overwritten(path: Path) -> None:
    with RunStore(path) as store:
        add_steps(store, 300)
    content = bytearray(path.read_bytes())
    content[4096 * 6 : 4096 * 9] = b"\x5a" * (4096 * 3)
    path.write_bytes(content)


def broken_json(path: Path) -> None:
    with RunStore(path) as store:
        five_steps(store)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE layouts SET columns = '[['")


def without_runs(path: Path) -> None:
    with RunStore(path):
        pass
    with sqlite3.connect(path) as other:
        other.execute("DELETE FROM ranks")


def only_a_log(path: Path) -> None:
    store = RunStore(path)
    add_steps(store, 5)
    log = Path(f"{path}-wal")
    content = log.read_bytes()
    store.close()
    path.unlink()
    log.write_bytes(content)


def near_name(path: Path) -> None:
    RunStore(path.with_name("runs.db")).close()


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (empty, "(an empty file)"),
        (words, "(no SQLite file)"),
        (Path.mkdir, "(a folder)"),
        (a_map, "(the results of normscope map)"),
        (another_database, "(another SQLite file)"),
        (cut, "malformed"),
        (overwritten, "(damaged: "),
        (broken_json, "(damaged: Expecting value"),
        (without_runs, "(it holds no run)"),
        (only_a_log, "(missing; only its log run.db-wal is there)"),
        (near_name, 'the nearest name is "runs.db"'),
    ],
)
def test_a_file_that_is_no_run_is_refused_in_one_line(
    make: Callable[[Path], None], given: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(path)
    status, out, err = said(path, capsys)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f'normscope: store "{path}"')
    assert given in err


def test_a_log_in_a_folder_without_the_right_to_write(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RunStore(path)  # its log stays while it is open
    add_steps(store, 5)

    def refuses(self: Database, location: str, path: Path) -> sqlite3.Connection:
        error = sqlite3.OperationalError("unable to open database file")
        error.sqlite_errorname = "SQLITE_CANTOPEN"
        raise error

    monkeypatch.setattr(Database, "_opened", refuses)
    status, _, err = said(path, capsys)
    assert status == 2
    assert "(its folder cannot be written)" in err
    assert "copy run.db and run.db-wal to another folder" in err
    store.close()


def test_a_store_is_known_by_its_content(
    store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five_steps(store)
    store.close()
    other = path.rename(path.with_name("model"))
    assert "the 100 that slow alarms need" in said(other, capsys)[1]
    assert run(["check", f"{path}x"]) == 2
    assert "model" in capsys.readouterr().err  # other words are a MODEL, as before


def test_the_scene_and_the_findings_are_of_one_moment(
    store: RunStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_steps(store, 120)
    look = Watcher.look

    def written(watcher: Watcher, *given: RunReader) -> Scene:
        add_steps(store, 130, first=121)
        store.add(alarms=[alarm(125)])
        scene = look(watcher, *given)
        add_steps(store, 140, first=131)
        store.add(alarms=[alarm(135)])
        return scene

    monkeypatch.setattr(Watcher, "look", written)
    report = check_run(path)
    assert report.scene.last_step == report.figures.last_step
    assert [each.step for each in report.findings] == [each.step for each in report.scene.alarms]


def test_reading_a_run_changes_no_byte_of_it(store: RunStore, path: Path) -> None:
    five_steps(store)
    store.close()
    before = path.read_bytes()
    check_run(path)
    assert path.read_bytes() == before


def test_completion_offers_alarms_and_stores(
    store: RunStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    words(path.with_name("other.db"))
    assert complete_model("r") == ["run.db"]
    assert "NS804" in complete_codes("NS80")
    assert complete_codes("NS101,loss-s") == ["NS101,loss-spike"]
