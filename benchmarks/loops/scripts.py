"""The training scripts, and how they are run: in a process of one thread."""

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import ROOT

FOLDER = Path(__file__).parent
SCRIPTS = (
    "source_gpt",
    "docstrings_qwen",
    "digits_rows",
    "sorting",
    "names_roberta",
    "sines_deepnorm",
    "bytes_post",
    "sums_sandwich",
)
"""Names of the scripts, which are files of this folder."""


def command(script: Path, lr: float, seed: int) -> list[str]:
    """The command that runs a script at a learning rate and a seed."""
    return [sys.executable, str(script), "--lr", f"{lr:g}", "--seed", str(seed)]


def run(words: Sequence[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command to its end; its result, and its processor time in seconds."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = _processor_time()
    done = subprocess.run(
        words, env=os.environ | one_thread | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    return done, _processor_time() - before


def _processor_time() -> float:
    """Processor time of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
