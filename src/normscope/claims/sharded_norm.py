"""A norm whose features are spread over devices: what has to be sent, and whether it can travel meanwhile."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from normscope.claims.experiments import ROUND_OFF, spread
from normscope.claims.form import Case, Evidence, Figure, Setup, claim
from normscope.claims.measure import NotMeasured

WORLDS = (2, 3, 4)
PROGRAM = "normscope.claims.shards"
ANOTHER = 1e-3
"""Relative error from which on it is another function."""


@claim("C23")
def sharded_norm(setup: Setup) -> Evidence:
    """Processes that hold a share of the features each, against the whole norm on one."""
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in run_ranks(setup.seeds):
        by[row["how"]].append(row)
    triples = zip(by["sums"], by["merging"], by["local"], strict=True)
    cases = [case for three in triples for case in _compared(*three)] + list(map(_overlap, by["overlapped"]))
    local, merged = ([row["error"] for row in by[how]] for how in ("local", "merging"))
    meanwhile, chunks = (by["overlapped"][0][name] for name in ("under_way", "chunks"))
    return Evidence(
        cases,
        Figure.largest("largest relative error with one collective", cases),
        notes=[
            f"With statistics of each device alone it is off by {spread(local, '.3g')}.",
            f"Merged means and variances are within {max(merged):.1e}, whatever the mean.",
            f"Overlapped by rows: {meanwhile} of {chunks} products began with sums still under way. The "
            "statistics need the product that they are to overlap with: it has to be cut, and each piece "
            "sends its own.",
        ],
        unmeasured=["time gained by overlapping: processes on one machine share its cores"],
    )


def run_ranks(seeds: Any) -> list[dict[str, Any]]:
    """Results of the ranks, see `shards`, in processes of their own."""
    if not (dist.is_available() and dist.is_gloo_available()) or sys.platform == "win32":
        raise NotMeasured("needs torch.distributed with gloo, and processes that fork")
    settings = json.dumps({"seeds": list(seeds), "worlds": WORLDS})
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, settings], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"the ranks ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def _compared(sums: dict[str, Any], merging: dict[str, Any], local: dict[str, Any]) -> Iterator[Case]:
    """One run with the better of both collectives, beside the same without."""
    assert len({(row["seed"], row["world"], row["input"]) for row in (sums, merging, local)}) == 1
    best = min(sums, merging, key=lambda row: row["error"])
    enough = best["error"] <= ROUND_OFF and best["forward"] == 1 and local["error"] >= ANOTHER
    yield _case(best, best["error"], enough)
    yield _case(sums, sums["error"], sums["error"] <= ROUND_OFF, "sums")
    yield _case(sums, sums["backward"], sums["backward"] == 0, "backward")


def _overlap(row: dict[str, Any]) -> Case:
    return _case(row, row["under_way"], row["error"] <= ROUND_OFF and row["under_way"] > 0, "overlap")


def _case(row: dict[str, Any], value: float, holds: bool, part: str = "") -> Case:
    where = f"{row['world']} devices, {row['input']}"
    return Case(row["seed"], where, float(value), holds, part)
