"""Seconds of a forecast of nine learning rates on a GPU, its trials as a stack and in turns.

    python -m benchmarks.gpu.ladders

docs/forecast-evidence.md has the results.
"""

import contextlib
import importlib
import json
import time
from unittest import mock

import torch

import normscope
from benchmarks.regimes.case import RATES
from normscope.anatomy import read_anatomy
from normscope.forecast import forecast_ladder, with_baseline
from normscope.train import LoneTrials, Recipe

MODELS = ("nn:decoder,depth=6,width=48,heads=3,scheme=pre", "hf:gpt2,n_layer=6,n_embd=48,n_head=3")


def measure(spec: str, *, as_stack: bool) -> dict[str, object]:
    """Seconds and outcomes of a ladder."""
    subject, _ = with_baseline(normscope.load(spec, device="cuda"))
    kept = importlib.import_module("normscope.forecast.kept")
    in_turns = mock.patch.object(kept, "many_trials", LoneTrials)
    started = time.perf_counter()
    with contextlib.nullcontext() if as_stack else in_turns:
        said = forecast_ladder(subject, read_anatomy(subject), Recipe(lr=1e-3), RATES)
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - started, 2)
    outcomes = [rung.outcome for rung in said.rungs]
    return {"model": spec, "as_stack": as_stack, "seconds": seconds, "outcomes": outcomes}


def main() -> None:
    for spec in MODELS:
        for as_stack in (True, False, True, False):
            print(json.dumps(measure(spec, as_stack=as_stack)), flush=True)


if __name__ == "__main__":
    main()
