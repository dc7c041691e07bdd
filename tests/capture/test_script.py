"""`check -- COMMAND`: real scripts in real processes; the verdict is that of their own steps."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import normscope
from normscope import Run
from normscope.subjects.subject import LOSS_INPUTS

SCRIPTS = Path(__file__).parent / "scripts"


@cache  # two tests read one run of `plain.py`
def checked(*words: str, cwd: Path = SCRIPTS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normscope", "check", "--format", "json", "--budget", "fast", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},  # one write for each line
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(("words", "verdict"), [([], "will fail"), (["--pre"], "healthy")])
def test_a_script_is_judged_by_its_own_steps(words: list[str], verdict: str) -> None:
    done = checked("--", "python", "plain.py", *words)
    report = json.loads(done.stdout)
    assert report["verdict"] == verdict, done.stderr
    assert done.returncode == (verdict == "will fail")
    forecast = report["forecast"]
    assert forecast["steps"] == 20
    assert forecast["optimizer"] == "Adam"
    assert forecast["lr"] == 1e-3
    printed = [float(line.split()[2]) for line in done.stderr.splitlines() if line.startswith("step ")]
    seen = {step["step"]: step["train_loss"] for step in forecast["curve"] if step["step"]}
    assert len(printed) == 19, "the script ends at the 20th step"
    for step in (5, 10):
        assert seen[step] == pytest.approx(printed[step - 1], rel=1e-6)
    assert len(report["anatomy"]["blocks"]) == 12
    assert "Traceback" not in done.stderr


def test_a_run_of_the_same_objects_has_the_same_figures() -> None:
    """The script's loop up to its first step, as a Run: its copies take the steps that the script takes."""
    source = (SCRIPTS / "plain.py").read_text()
    built: dict[str, Any] = {"__name__": "plain"}
    exec(source[: source.index("for step in")], built)

    def batches() -> Iterator[dict[str, Any]]:
        data, length = built["data"], built["LENGTH"]
        while True:
            starts = torch.randint(0, len(data) - length - 1, (8,), generator=generator)
            rows = torch.stack([data[i : i + length + 1] for i in starts])
            yield {"ids": rows[:, :-1], LOSS_INPUTS: (rows[:, 1:],)}

    def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch[LOSS_INPUTS][0].flatten())

    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())  # the script goes on with this one
    run = Run(model=built["model"], batches=batches(), loss=loss, optimizer=built["optimizer"])
    factory = normscope.check(run, budget="fast").to_dict()
    script = json.loads(checked("--", "python", "plain.py").stdout)
    assert factory["verdict"] == script["verdict"]
    for one, other in zip(factory["forecast"]["curve"], script["forecast"]["curve"], strict=True):
        for name in ("step", "train_loss", "loss", "coherence", "alignment", "update_ratio"):
            expected = other[name] if other[name] is None else pytest.approx(other[name], rel=1e-3, abs=1e-4)
            assert one[name] == expected, (one["step"], name)
        assert one["diversity"] == pytest.approx(other["diversity"], rel=0.02)
    ours, theirs = (
        {(m["quantity"], m["site"]): m["value"] for m in each["measurements"]} for each in (factory, script)
    )
    assert ours.keys() == theirs.keys()
    entropies = [each["forecast"]["unigram_entropy"] for each in (factory, script)]
    assert entropies[0] == pytest.approx(entropies[1], abs=0.1)
    start = [key for key in ours if not key[0].startswith("forecast/") and isinstance(ours[key], float)]
    assert len(start) > 100
    for key in start:
        assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-9), key
