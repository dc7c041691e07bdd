"""Forecast the scripts by the command line, and keep every measurement.

    python -m benchmarks.loops.forecasts FILE [--only WORD]

One line of JSON is one cell, a script at a learning rate; an interrupted run of this command is continued.
Each line also has the largest rate and the best one that `normscope check --forecast` names for its script.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.loops.scripts import FOLDER, SCRIPTS, command, run
from benchmarks.process import records_of
from benchmarks.regimes.case import RATES
from benchmarks.regimes.forecasts import WANTED, finite
from normscope.forecast.record import is_same_rate

_OPTIONS = ["--rates", ",".join(f"{rate:g}" for rate in RATES), "--format", "json", "--quiet-script"]
_NONE = {"rate": None, "low": None, "high": None, "warmup": 0}


def forecasts(script: Path) -> list[dict[str, Any]]:
    """The forecast of a script at the learning rates, one record for each.

    Where the command makes none, each rate is "not measured", with the command's last line as the reason.
    """
    python, *words = command(script, WANTED, seed=0)
    done, seconds = run([python, "-m", "normscope", "check", "--forecast", *_OPTIONS, "--", python, *words])
    ladder = json.loads(done.stdout)["ladder"] if done.stdout.startswith("{") else None
    if ladder is None:
        ladder = _no_ladder((done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1])
    return [
        {
            "case": script.stem,
            "seconds": round(seconds / len(RATES), 3),
            "largest_rate": ladder["largest_rate"],
            "best": ladder["best"],
            **finite(rung),
            "lr": rate,
        }
        for rate in RATES
        for rung in ladder["rungs"]
        if is_same_rate(rung["lr"], rate)
    ]


def _no_ladder(reason: str) -> dict[str, Any]:
    said: dict[str, Any] = {"outcome": "not measured", "reason": reason, "score": None, "certainty": None}
    settings = {"optimizer": "", "warmup": 0, "steps": 0, "unigram_entropy": None, "curve": []}
    rungs = [said | settings | {"lr": rate} for rate in RATES]
    return {"largest_rate": None, "best": _NONE | {"reason": reason}, "rungs": rungs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="part of the names of scripts")
    options = parser.parse_args()
    known = {row["case"] for row in records_of(options.file)}
    for name in (name for name in SCRIPTS if options.only in name and name not in known):
        found = forecasts(FOLDER / f"{name}.py")
        with options.file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        print(name, found[0]["seconds"], [row["outcome"] for row in found], flush=True)


if __name__ == "__main__":
    main()
