"""The page of a training run: written, honest about its lines, escaped, and redrawn by --resume."""

import json
import math
import re
from pathlib import Path

import pytest

from normscope.cli.main import run as command
from normscope.report.train_page import (
    MOST_BATCHES,
    MOST_POINTS,
    entropies,
    loss_chart,
    render_train_page,
    resume_command,
    stretches,
)
from normscope.subjects.targets import batch_entropy
from normscope.train import Run, RunConfig, prepared
from normscope.train.folder import RunFolder
from normscope.train.summary import Summary

QUICK = {"model": "nn:decoder,depth=1,width=16,heads=2", "batch_size": 2, "seq_len": 16, "lr": 1e-2}


def finished(**more: object) -> Run:
    with prepared(RunConfig.from_dict(QUICK | {"steps": 6} | more), folder=None) as run:
        run.go()
    return run


@pytest.fixture(scope="module")
def run() -> Run:
    return finished(clip=1.0, accumulation=2)


def test_train_leaves_its_page_and_resume_draws_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--batch-size", "2", "--seq-len", "16", "-o", "run"]
    assert command(["train", QUICK["model"], *words, "--steps", "4", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == "run/run.html"
    first = (tmp_path / "run/run.html").read_text(encoding="utf-8")
    assert "<h1>Not yet trained</h1>" in first
    assert "4 of 4" in first
    assert command(["train", "run", "--resume", "--steps", "6"]) == 0
    assert "page        run/run.html" in capsys.readouterr().out
    assert "6 of 6, from the checkpoint of step 4" in (tmp_path / "run/run.html").read_text(encoding="utf-8")


def test_the_page_shows_what_was_recorded(run: Run) -> None:
    page = render_train_page(Summary(run), {"torch": "2"})
    assert re.findall("<figcaption><b>(.*?)</b>", page) == ["Loss", "Learning rate", "Gradient norm"]
    shown = re.findall("<title>(.*?)</title>", page, re.DOTALL)
    for step, loss in enumerate(run.trial.losses, 1):
        assert any(f"step {step}\ntraining  {loss:.6g}" in words for words in shown)
    for step, loss in run.validations:
        assert any(
            words.startswith(f"step {step}\n") and f"validation  {loss:.6g}" in words for words in shown
        )
    assert ">clip<" in page
    assert page.index("<h1>") < page.index('class="decides"') < page.index("<h2>The run</h2>")


def test_the_line_beside_the_training_loss_is_that_of_the_batches_trained_on(run: Run) -> None:
    batches = [batch for batch, _ in zip(run.subject.batches(), range(12), strict=False)]
    known = [batch_entropy(batch) for batch in batches]
    assert entropies(run) == known, "two batches a step"
    about = loss_chart(run).about
    assert f"of the training batches, {sum(known) / 12:.3g}." in about
    assert f"The verdict compares with that of the whole text, {run.subject.unigram_entropy:.3g}." in about
    run.subject.unigram_entropy, entropy = None, run.subject.unigram_entropy
    try:
        assert entropies(run) == []
        assert "unigram" not in loss_chart(run).drawing
        assert "<h1>Finished</h1>" in render_train_page(Summary(run), {"torch": "2"})
    finally:
        run.subject.unigram_entropy = entropy


def test_of_a_long_run_the_first_batches_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.report.train_page.MOST_BATCHES", 5)
    assert "of the first 5 training batches" in loss_chart(run).about
    assert MOST_BATCHES > 100


def test_a_long_curve_is_thinned_to_means() -> None:
    steps, means = stretches([float(step) for step in range(2 * MOST_POINTS - 1)])
    assert len(means) == MOST_POINTS
    assert (steps[:2], means[:2]) == ([2.0, 4.0], [0.5, 2.5])
    assert (steps[-1], means[-1]) == (2 * MOST_POINTS - 1, 2 * MOST_POINTS - 2)
    assert math.isnan(stretches([math.nan, 1.0])[1][0])


def test_a_run_that_diverged_says_so() -> None:
    run = finished(optimizer="sgd", lr=1e6, steps=30)
    page = render_train_page(Summary(run), {"torch": "2"})
    assert "<h1>Did not train</h1>" in page
    assert 'class="bad"' in page
    assert "Log axis. × marks a value that is not finite." in page


def test_the_command_that_continues_a_run_is_quoted_for_a_shell(tmp_path: Path) -> None:
    run = finished()
    assert resume_command(run) == ""
    run.folder = RunFolder(tmp_path / "my $run")
    assert resume_command(run) == f"normscope train '{tmp_path}/my $run' --resume"


def test_it_loads_nothing_escapes_all_and_has_a_dark_theme(run: Run) -> None:
    run.notes.append("<script>alert(1)</script>")
    page = render_train_page(Summary(run), {"torch": "2"})
    run.notes.pop()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "default-src 'none'" in page
    assert set(re.findall(r'(?:src|href)="(?!#)([^"]*)"', page)) == set()
    assert "prefers-color-scheme: dark" in page
