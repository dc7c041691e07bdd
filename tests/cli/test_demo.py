"""The demo: figures against single trials, lines, picture, page, and Ctrl-C."""

import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from normscope.cli.demo import tell
from normscope.cli.demo_view import Lines, picture
from normscope.cli.plot import Axes, Line, plot
from normscope.demo import run as demo
from normscope.demo.page import render_page
from normscope.demo.run import Course, Story
from normscope.demo.settings import CONDITIONS, Settings
from normscope.demo.worker import looks_at, shelves, work
from normscope.errors import UsageError
from normscope.subjects import load
from normscope.train import Trial, trains

TINY = Settings(depth=2, width=8, batch_size=2, seq_len=16, steps=12, look=4, seeds=(0, 1), warmup=4)


def finished(losses: dict[int, float], settings: Settings = TINY) -> Story:
    """A finished story, with the given loss for each condition."""
    story = Story.of(settings)
    story.unigram_entropy = 3.0
    for (index, seed), course in story.courses.items():
        course.losses = [losses[index] + 0.01 * seed] * settings.steps
        course.looks = [(step, 10.0 ** -(index + step)) for step in looks_at(settings)]
    return story


def test_the_worker_tells_what_lone_trials_tell() -> None:
    """For every condition and seed, losses of a single `Trial`, and token diversity of the head's input."""
    story = Story.of(TINY)
    for line in work(range(len(CONDITIONS)), TINY):
        story.hear(json.loads(json.dumps(line)))
    for (index, seed), course in story.courses.items():
        condition = CONDITIONS[index]
        subject = load(condition.model(TINY), seed=seed, batch_size=2, seq_len=16)
        config = condition.config(TINY, seed)
        trial = Trial(subject.model, subject.batches(), lambda m, b, s=subject: s.loss(b, m), config)
        for _ in range(TINY.steps):
            trial.advance()
        assert course.losses == pytest.approx(trial.losses, rel=1e-3)
        hidden: list[torch.Tensor] = []
        subject.model.head.register_forward_pre_hook(lambda m, i, h=hidden: h.append(i[0]))  # type: ignore[union-attr, operator]
        subject.model.eval()
        with torch.no_grad():
            subject.forward()
        states = hidden[0].double()
        beyond = states - states.mean(1, keepdim=True)
        apart = beyond - beyond.mean(0)  # 2 sequences: the factor B/(B − 1) is 2
        energy = [float(part.square().sum() / states.square().sum()) for part in (beyond, apart)]
        expected = min(energy[0], 2 * 2 * energy[1])
        assert course.looks[-1] == (TINY.steps, pytest.approx(expected, rel=1e-2))
        assert [step for step, _ in course.looks] == looks_at(TINY)
    assert story.unigram_entropy == subject.unigram_entropy


def test_the_first_condition_is_what_the_others_change_one_thing_of() -> None:
    first = CONDITIONS[0]
    for condition in CONDITIONS[1:]:
        changes = [
            condition.options != first.options,
            condition.warms_up != first.warms_up,
            condition.clips != first.clips,
        ]
        assert sum(changes) == 1


def test_a_command_is_the_same_run() -> None:
    """The command that the page shows, read as the command line reads it."""
    from normscope.train import RunConfig

    for condition in CONDITIONS:
        words = condition.command(TINY, 1).split()
        assert words[:2] == ["normscope", "train"]
        options = {key.removeprefix("--"): value for key, value in zip(words[3::2], words[4::2], strict=True)}
        typed = {key: float(v) if "." in v or "e" in v else int(v) for key, v in options.items()}
        run = RunConfig.from_dict({"model": words[2], **typed})
        assert run.trial == condition.config(TINY, 1)
        assert (run.model, run.batch_size, run.seq_len, run.validation) == (condition.model(TINY), 2, 16, 0)


def test_runs_of_one_model_are_one_stack() -> None:
    cells = shelves(range(len(CONDITIONS)), TINY)
    assert sorted(cell for shelf in cells for cell in shelf) == sorted(Story.of(TINY).courses)
    for shelf in cells:
        assert len({CONDITIONS[index].model(TINY) for index, _ in shelf}) == 1
    assert len(cells) == len({condition.model(TINY) for condition in CONDITIONS})


def test_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "WORKERS", 1)  # each imports PyTorch
    page = tmp_path / "folder" / "demo.html"
    assert tell(TINY, page) == 0
    out = capsys.readouterr().out
    for condition in CONDITIONS:
        assert re.search(
            rf"^{condition.name} +step +12  loss \d\.\d\d \d\.\d\d  diversity", out, re.MULTILINE
        )
        assert condition.words(TINY) in out
    assert "\x1b" not in out
    assert page.read_text().startswith("<!doctype html>")


def test_the_verdicts_are_those_of_trains() -> None:
    story = finished({0: 3.0, 1: 2.95, 2: 2.9, 3: 2.895, 4: 2.0})
    for index in range(len(CONDITIONS)):
        expected = [trains(course.losses, 3.0) for course in story.of_condition(index)]
        assert story.verdicts(index) == expected
    assert [sum(story.verdicts(index) or []) for index in range(5)] == [0, 0, 1, 1, 2]
    story.courses[4, 1].losses.pop()
    assert story.verdicts(4) is None


def test_the_moral_names_what_rescues_every_seed_and_what_none() -> None:
    words = demo.moral(finished({0: 3.0, 1: 3.0, 2: 2.0, 3: 2.9, 4: 2.0}))
    assert "trains with 0 of 2 seeds" in words
    every, none = words.split("Every seed trains with ")[1].split(" No seed trains with ")
    assert every == f"{CONDITIONS[2].words(TINY)}, or with {CONDITIONS[4].words(TINY)}."
    assert none == f"{CONDITIONS[1].words(TINY)}."


def test_the_page_needs_nothing_and_shows_all() -> None:
    page = render_page(finished({0: 3.0, 1: 3.0, 2: 2.0, 3: 2.9, 4: 2.0}))
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert page.count('<path d="M') == 2 * len(CONDITIONS) * len(TINY.seeds)
    for condition in CONDITIONS:
        assert condition.words(TINY) in page
        assert condition.command(TINY, 0) in re.sub(r"<[^>]+>", "", page)
    assert page.count("trains 0 of 2") == 2
    assert page.count("trains 2 of 2") == 2


@pytest.mark.parametrize("losses", [{}, {0: float("nan")}, {0: float("inf")}])
def test_the_page_and_the_picture_of_what_there_is_so_far(losses: dict[int, float]) -> None:
    story = Story.of(TINY)
    for index, loss in losses.items():
        story.courses[index, 0] = Course([loss] * 4, [(0, 1.0), (4, 0.0)])
    assert "not finished yet" in render_page(story)
    console = Console(file=io.StringIO(), width=100)
    console.print(picture(story, 100))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_picture_fits_the_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(picture(finished({0: 3.0, 1: 3.0, 2: 2.0, 3: 2.9, 4: 2.0}), width))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any("unigram" in line for line in lines)


def dots_of(rows: list, margin: int) -> set[tuple[int, int]]:
    """The dots that the characters of a plot stand for, (x, y) from above."""
    places = {0x01: (0, 0), 0x02: (0, 1), 0x04: (0, 2), 0x08: (1, 0), 0x10: (1, 1), 0x20: (1, 2)}
    places |= {0x40: (0, 3), 0x80: (1, 3)}
    found = set()
    for row, text in enumerate(rows):
        for column, character in enumerate(text.plain[margin:]):
            bits = ord(character) - 0x2800
            found |= {(2 * column + x, 4 * row + y) for bit, (x, y) in places.items() if bits & bit}
    return found


def test_a_plot_by_dots() -> None:
    """A diagonal and a horizontal line, against dots set by hand."""
    rows = plot([Line([(0, 0), (1, 1)], "red")], Axes(0, 1, 0, 1), width=2 + 4, height=2)
    assert dots_of(rows, 2) == {(k, 7 - k) for k in range(8)}
    level = plot([], Axes(0, 1, 0, 1), width=6 + 1, height=2, ticks=[(1.0, "x", "white")])
    assert dots_of(level, 3) == {(0, 0), (4, 0)}
    assert level[0].plain.startswith("x │")
    broken = plot([Line([(0, 0), (0.5, math.nan), (1, 0)], "red")], Axes(0, 1, 0, 1), width=6, height=1)
    assert dots_of(broken, 2) == {(0, 3), (7, 3)}


def test_lines_say_each_stretch_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines, story = Lines(), finished(dict.fromkeys(range(5), 2.0))
    lines(story)
    lines(story)
    assert len(capsys.readouterr().out.splitlines()) == len(CONDITIONS)


def test_runs_whose_loss_is_not_finite_come_to_their_end() -> None:
    """Each step is printed once, and the verdict is shown."""
    settings = dataclasses.replace(TINY, lr=1e30, seeds=(0,))
    story = Story.of(settings)
    for line in work([0], settings):
        story.hear(json.loads(json.dumps(line)))
    losses = story.courses[0, 0].losses
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert len(losses) == settings.steps
    assert 0 < len(finite) < settings.look
    assert losses[: len(finite)] == finite
    assert story.verdicts(0) == [False]
    assert "trains 0 of 1" in render_page(story)


@pytest.mark.parametrize("path", ["", "file/demo.html"])
def test_a_page_that_cannot_be_written_is_known_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo, "run", None)
    with pytest.raises(UsageError, match="--output"):
        tell(TINY, tmp_path / path)


def test_a_worker_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(RuntimeError, match="out of luck"):
        demo.run(TINY, lambda story: None)


def test_ctrl_c_shows_what_there_is(tmp_path: Path) -> None:
    """SIGINT during the runs: status 130, table and page of the results so far, no process left."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom normscope.demo.settings import Settings\n"
        "from normscope.cli.demo import tell\n"
        "size = {'depth': 1, 'width': 8, 'batch_size': 2, 'seq_len': 16}\n"
        "settings = Settings(**size, steps=100_000, look=100, seeds=(0,))\n"
        "sys.exit(tell(settings, Path('demo.html')))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        first = running.stdout.readline()
        children = children_of(running.pid)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert "step 100" in first
    assert running.returncode == 130, err
    assert "interrupted; these are the results so far" in err
    assert "Traceback" not in err
    assert "not finished yet" in out
    assert "interrupted" in (tmp_path / "demo.html").read_text()
    assert len(children) == demo.WORKERS
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found
