"""Forecast the ladders of the regimes, and keep every measurement.

    python -m benchmarks.regimes.forecasts FILE [--regime NAME …] [--part PART]
                                           [--only WORD] [--whole] [--steps N] [--refine N]

One line of JSON is one cell, a ladder at a learning rate; an interrupted run of this command is continued.
The forecasts are those of `normscope check --forecast` at the seed of replica 0. The rule is set on the part
that is seen; the parts that are held out and fresh are forecast once, when the rule is fixed. With `--whole`
no trial stops early, and no rate is left to larger ones. `--steps` and `--refine` are those of the command.
"""

import argparse
import contextlib
import importlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.process import records_of
from benchmarks.regimes.case import PARTS, RATES, Case
from benchmarks.regimes.cases import CASES, REGIMES
from normscope.anatomy import read_anatomy
from normscope.forecast import Forecast, forecast_ladder, with_baseline
from normscope.train import Recipe

WANTED = 1e-3
"""Learning rate whose warm-up is forecast, on every ladder."""
NOT_FINITE = ("nan", "inf", "-inf")
"""Words of a report in JSON for figures that are not finite."""


def name_of(case: Case) -> str:
    """Name of a ladder, unique among all regimes."""
    return f"{case.regime}: {case.name}"


def forecasts(case: Case, steps: int = Recipe.steps, refine: int = 0) -> list[dict[str, Any]]:
    """The forecast of a ladder, one record for each learning rate."""
    subject = case.subject(case.seed)
    config = Recipe(
        optimizer=case.optimizer, lr=WANTED, seed=case.seed, precision=case.precision, steps=steps
    )
    started = time.process_time()
    subject, notes = with_baseline(subject)
    said = forecast_ladder(subject, read_anatomy(subject), config, RATES, refine=refine, whole=bool(refine))
    seconds = (time.process_time() - started) / len(RATES)
    return [
        {
            "case": name_of(case),
            "part": case.part,
            "notes": list(notes),
            "tokens": rung.tokens,
            "hidden": rung.hidden,
            "seconds": round(seconds, 3),
            **_plain(rung),
        }
        for rung in said.rungs
    ]


@contextlib.contextmanager
def whole_trials() -> Iterator[None]:
    """Context without early stops: each rate of a ladder has a whole trial, as before there were stops."""
    ladder, watch = (importlib.import_module(f"normscope.forecast.{name}") for name in ("ladder", "watch"))
    with (
        mock.patch.object(ladder, "LOW", 0.0),
        mock.patch.object(watch, "EARLIEST", math.inf),
        mock.patch.object(watch, "is_settled", return_value=False),
    ):
        yield


def _plain(rung: Forecast) -> dict[str, Any]:
    """A forecast as JSON can hold it: numbers that are not finite are null, others have six digits."""
    found: dict[str, Any] = finite(rung.to_dict())
    return found


def finite(value: Any) -> Any:
    """A part of a report as a record holds it: figures have six digits, or are null if not finite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return None if value in NOT_FINITE else value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--regime", choices=REGIMES, action="append", default=[])
    parser.add_argument("--part", choices=PARTS, default="seen")
    parser.add_argument("--only", default="", help="part of the names of ladders")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--refine", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="without early stops")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {row["case"] for row in records_of(options.file)}
    for case in CASES:
        wanted = case.regime in (options.regime or REGIMES) and options.only in case.name
        if not wanted or case.part != options.part or name_of(case) in known:
            continue
        with whole_trials() if options.whole else contextlib.nullcontext():
            found = forecasts(case, options.steps, options.refine)
        with options.file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        print(name_of(case), found[0]["seconds"], [row["outcome"] for row in found], flush=True)


if __name__ == "__main__":
    main()
