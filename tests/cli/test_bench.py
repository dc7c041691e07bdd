"""`normscope bench` finds the benchmarks beside the sources or in the current folder, else gives an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from normscope.cli import bench
from normscope.cli.main import run

BENCHES = """
BENCHES = {"a": None}


def bench(name):
    return [{"what": name, "figure": "1", "target": "", "how": __file__}]
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder; normscope is where a wheel puts it."""
    monkeypatch.setattr("normscope.__file__", str(tmp_path / "lib" / "site" / "normscope" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_they_are_beside_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench._benches().__file__ == str(Path(__file__).parents[2] / "benchmarks" / "benches.py")


def test_a_wheel_says_where_they_are(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (installed / "benchmarks").mkdir()
    (installed / "benchmarks" / "__init__.py").write_text("raise AssertionError('a folder of the user')")
    for words in (["bench"], ["bench", "check", "--format", "json"]):
        assert run(words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err == (
            "normscope: the installed package holds no benchmarks: expected the folder benchmarks/ of "
            "normscope's repository; clone the repository and run normscope bench in its root.\n"
        )


def test_they_are_found_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "benches.py").write_text(BENCHES)
    code = (
        "import normscope\nnormscope.__file__ = '/no/such/site/normscope/__init__.py'\n"
        "from normscope.cli.main import main\nmain(['bench', '--format', 'json'])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "benchmarks" / "benches.py") in done.stdout


def test_a_fresh_process_finds_them_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.process import in_fresh_process, wilson

    monkeypatch.chdir(tmp_path)
    assert in_fresh_process(wilson, 0, 0) == [0.0, 1.0]


def test_a_mean_is_of_20_losses_and_a_short_rest_has_none() -> None:
    from benchmarks.process import means

    assert means([1.0] * 20 + [4.0] * 20 + [9.0] * 19) == [1.0, 4.0]
    assert means([1.0] * 19) == []


def test_every_cell_of_the_remedies_has_a_kept_result() -> None:
    from benchmarks.remedies.bench import kept
    from benchmarks.remedies.cells import held_out, seen

    known = kept()
    assert not [cell.words for cell in (*held_out(), *seen()) if known.truth(cell, ()) is None]


def test_failing_runs_of_other_data_are_those_of_their_rule() -> None:
    from benchmarks.process import records_of
    from benchmarks.regimes import truth
    from benchmarks.remedies.regimes import FRESH, HELD_OUT, SEEN, by_the_rule

    trained = records_of(Path(truth.__file__).parent / "truth.jsonl")
    for parts, runs in ((["seen"], SEEN), (["held-out"], HELD_OUT), (["fresh", "last"], FRESH)):
        chosen = {run.words for part in parts for run in by_the_rule(trained, part)}
        assert {run.words for run in runs} == chosen


@pytest.mark.parametrize(
    ("trained", "chosen"),
    [
        ("TTTTeFFFF", [2e-3, 1e-2]),
        ("TTTTFFeFF", [1e-3]),
        ("FFTTTTTFF", [1e-2, 2e-2]),
        ("TTFTTTTFF", [1e-2, 2e-2]),
        ("TTTTTTTTF", [2e-2]),
        ("TTTTTTTTT", []),
        ("FFFFFFFFF", [1e-3, 5e-3]),
        ("eeeeeFFFF", [5e-3]),
    ],
)
def test_the_rule_takes_rates_above_the_largest_that_trains(trained: str, chosen: list[float]) -> None:
    """T trains in all three replicas, F in none, e in one."""
    from benchmarks.regimes.case import RATES
    from benchmarks.remedies.regimes import HELD_OUT, by_the_rule

    ladder, number = HELD_OUT[0].ladder, {"T": 3, "e": 1, "F": 0}
    runs = [
        {"case": ladder, "lr": rate, "trains": k < number[letter]}
        for rate, letter in zip(RATES, trained, strict=True)
        for k in range(3)
    ]
    assert [(run.ladder, run.lr) for run in by_the_rule(runs, "held-out")] == [(ladder, r) for r in chosen]
    assert list(by_the_rule(runs, "seen")) == []


def test_a_run_of_other_data_is_rescued_only_by_its_first_ranked_remedy() -> None:
    from benchmarks.remedies.regimes import HELD_OUT
    from benchmarks.remedies.regimes_kept import of_lines

    run = HELD_OUT[0]
    place = {"run": run.ladder, "lr": run.lr}
    attempts = [{"names": [name], "status": "rescues"} for name in ("clip", "pre-ln")]
    ranking = {"kind": "ranking", **place, "before": "slow", "attempts": attempts}
    truths = [
        {"kind": "truth", **place, "names": [name], "trains": name == "pre-ln"} for name in ("clip", "pre-ln")
    ]
    assert not of_lines([ranking, truths[1]]).is_judged(run)
    known = of_lines([ranking, *truths])
    assert known.is_judged(run)
    assert not known.is_rescued(run)
    assert known.rescuers(run) == [("pre-ln",)]
    assert not known.is_foreseen(run)
    better = ranking | {"before": "collapses", "attempts": attempts[::-1]}
    assert of_lines([*known.lines, better]).is_rescued(run)
    assert of_lines([better]).is_foreseen(run)


def test_no_figure_is_cut_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"model": "nn:decoder, 12 × 256", "measured": "509.0 MiB", "ratio": 1.0625}]
    rows.append({"model": "b", "more": 3})
    for columns in ("120", "40", "24"):
        monkeypatch.setenv("COLUMNS", columns)
        bench._print_rows("plan", rows)
        out = capsys.readouterr().out
        assert out.startswith("bench plan\n")
        for figure in ("509.0 MiB", "1.0625", "3"):
            assert figure in out
        assert max(map(len, out.splitlines())) <= int(columns)
