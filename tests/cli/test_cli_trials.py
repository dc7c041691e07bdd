"""`check --forecast`, `--rates` and `--try-remedies` on the command line."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from normscope.cli.main import run
from normscope.forecast import rates_around

SMALL = ["nn:decoder,scheme=post,depth=1,width=16,heads=2", "--batch-size", "2", "--seq-len", "16"]
QUICK = [*SMALL, "--steps", "1", "--budget", "fast", "--fail-on", "never"]


@pytest.mark.parametrize("lr", [1e-7, 1e-5, 1e-4, 3e-4, 0.00123456, 1e-2, 2e-2, 3e-2, 0.5])
def test_the_ladder_stands_around_the_rate_of_the_run(lr: float) -> None:
    rates = rates_around(lr)
    assert lr in rates
    assert rates == sorted(set(rates))
    assert len(rates) == 9
    assert all(min(1e-5, lr) <= rate <= max(3e-2, 2.2 * lr) for rate in rates)
    assert rates[-1] > lr
    steps = [above / below for below, above in itertools.pairwise(rates)]
    assert all(math.isclose(step, 10 ** (1 / 3), rel_tol=0.01) for step in steps)


def test_the_ladder_around_a_usual_rate_has_it_in_the_middle() -> None:
    assert rates_around(3e-4) == [1.39e-5, 3e-5, 6.46e-5, 1.39e-4, 3e-4, 6.46e-4, 1.39e-3, 3e-3, 6.46e-3]
    assert rates_around(1e-3)[4] == 1e-3
    assert rates_around(3e-2)[-2:] == [3e-2, 6.46e-2], "one above the run's own rate"


@pytest.mark.parametrize(
    ("rates", "words"),
    [("1e-3:1e-2", "FIRST:LAST:COUNT"), ("0", "positive"), ("fast", "--rates"), (",", "--rates")],
)
def test_bad_rates_are_one_line(rates: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *QUICK, "--rates", rates]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_trials_without_steps_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--try-remedies", "--forecast"):
        assert run(["check", *SMALL, "--steps", "0", option]) == 2
        error = f"normscope: {option} with --steps 0: expected real steps to try; leave --steps out.\n"
        assert capsys.readouterr().err == error


def test_rates_mean_a_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *QUICK, "--rates", "1e-3,1e-4", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [rung["lr"] for rung in report["ladder"]["rungs"]] == [1e-4, 1e-3]
    assert report["remedies"] is None


def test_a_run_that_does_not_fail_has_no_remedies_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *QUICK, "--try-remedies", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["remedies"]["attempts"] == []
    assert report["ladder"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--refine", "36"], "more than the 36"),
        (["--refine", "80", "--steps", "90"], "more than the 90"),
        (["--refine", "140", "--steps", "0"], "--forecast with --steps 0"),
        (["--refine", "30", "--", "python", "train.py"], "more than the 36"),
    ],
)
def test_what_cannot_be_refined_is_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--" in options else QUICK
    assert run(["check", *model, *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_refined_rates_mean_a_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *QUICK, "--rates", "1e-3,1e-4", "--refine", "40", "--format", "json"]) == 0
    rungs = json.loads(capsys.readouterr().out)["ladder"]["rungs"]
    assert 40 in [rung["steps"] for rung in rungs]


DRAWS = """
import torch
from normscope.nn import build

def drawn():
    while True:
        yield torch.randint(200, (2, 16))

def factory():
    return build("decoder", scheme="pre", depth=1, width=16, heads=2), drawn(), None
"""


def test_batches_that_a_factory_draws_from_the_global_generator_are_those_of_the_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "draws.py"
    model.write_text(DRAWS)
    quick = ["--steps", "3", "--budget", "fast", "--fail-on", "never"]
    words = ["check", f"{model}:factory", *quick, "--format", "json"]
    losses = []
    for seed in ("0", "0", "1"):
        torch.seed()
        assert run([*words, "--seed", seed]) == 0
        curve = json.loads(capsys.readouterr().out)["forecast"]["curve"]
        losses.append([look["train_loss"] for look in curve])
    assert losses[0] == losses[1] != losses[2]
