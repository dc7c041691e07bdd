"""`check -- COMMAND`: real scripts in real processes; the verdict is that of their own steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


def checked(*words: str, cwd: Path = SCRIPTS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normscope", "check", "--format", "json", "--budget", "fast", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
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
