"""The held-out runs once more, each alone and under `normscope.Monitor`: its alarms, and their lead.

A run is trained to the failure that the strict variant says, or to step 1000 at most; one without, to step
600. Trained alone it is the run of the stack up to rounding, so that a failure may come at another step.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.later import scores
from benchmarks.later.failures import Failure
from benchmarks.later.ladders import LADDERS, Ladder, Setting
from benchmarks.later.watched import recipe
from benchmarks.process import records_of
from benchmarks.regimes.data import next_token
from normscope.monitor import Monitor
from normscope.rules import Finding, Severity
from normscope.train import build_optimizers, in_flushed_thread, rate_factor
from normscope.train.optim import set_rate

STEPS, WITHOUT = 1000, 600
FIRST = 100
"""Alarms count from this step on."""


def alarms_of(ladder: Ladder, setting: Setting, steps: int) -> list[tuple[int, str, str]]:
    """Step, code and severity of the alarms of a run."""
    config, model = recipe(ladder, setting), ladder.model(setting.seed)
    (optimizer,) = build_optimizers(model, config)
    found: list[tuple[int, str, str]] = []
    step = 0

    def note(finding: Finding) -> None:
        found.append((step, finding.code, str(finding.severity)))

    batches = ladder.batches(setting)
    entropy = None if setting.repeat else ladder.entropy()
    with Monitor(model, optimizer, entropy=entropy, on_alarm=note) as monitor:
        for step in range(1, steps + 1):
            set_rate([optimizer], rate_factor(config, step - 1))
            ids = next(batches)
            loss = next_token(model(ids).logits, ids)
            optimizer.zero_grad()
            loss.backward()
            if config.clip is not None:
                monitor.see_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    return found


def fates(runs: Sequence[scores.Run], *, strict: bool = True) -> dict[tuple[str, int], Failure | None]:
    """Failures of the held-out runs that are healthy at step 300, by ladder and seed."""
    held = [run for run in runs if run["part"] == "held-out"]
    return {(run["ladder"], run["seed"]): failure for run, failure in scores.judged(held, strict=strict)}


def monitor_all(file: Path, output: Path) -> None:
    """Train the runs that the output does not hold yet, and append their alarms to it."""
    torch.set_num_threads(1)
    known = {(row["ladder"], row["seed"]) for row in records_of(output)}
    ends = fates(records_of(file))
    settings = {(ladder.name, each.seed): (ladder, each) for ladder in LADDERS for each in ladder.settings}
    for key in sorted(ends, key=lambda key: ends[key] is None):
        failure = ends[key]
        if key in known:
            continue
        steps = WITHOUT if failure is None else min(failure.step, STEPS)
        found = in_flushed_thread(lambda _, key=key, steps=steps: alarms_of(*settings[key], steps))  # type: ignore[misc]
        row = {"ladder": key[0], "seed": key[1], "steps": steps, "alarms": found}
        with output.open("a") as opened:
            opened.write(json.dumps(row) + "\n")
        print(row, flush=True)


def table(runs: Sequence[scores.Run], rows: Sequence[dict[str, Any]], *, strict: bool = True) -> str:
    """Markdown: for each code, the failures that it precedes, the median lead, and the false alarms.

    A failure after the last watched step is left out, because no later alarm could have preceded it.
    """
    ends = fates(runs, strict=strict)
    watched = [row | {"failure": ends[key]} for row in rows if (key := (row["ladder"], row["seed"])) in ends]
    mine = [row for row in watched if row["failure"] is None or row["failure"].step <= row["steps"]]
    failing = sum(row["failure"] is not None for row in mine)
    leads: dict[str, list[int]] = {}
    false: dict[str, int] = {}
    for row in mine:
        firsts: dict[str, int] = {}
        for step, code, severity in row["alarms"]:
            if step >= FIRST and severity != Severity.NOTE:
                for name in (code, "any"):
                    firsts.setdefault(name, step)
        failure = row["failure"]
        for code, step in firsts.items():
            if failure is None:
                false[code] = false.get(code, 0) + 1
            elif step <= failure.step:
                leads.setdefault(code, []).append(failure.step - step)
    lines = ["| alarm | failures after it | median lead | false alarms |", "|---|---:|---:|---:|"]
    for code in sorted({*leads, *false}):
        own = leads.get(code, [])
        lead = f"{statistics.median(own):.0f}" if own else "–"
        counts = f"{len(own)} of {failing} | {lead} | {false.get(code, 0)} of {len(mine) - failing}"
        lines.append(f"| {code} | {counts} |")
    return "\n".join([*lines, f"not watched until their failure: {len(watched) - len(mine)} runs"])
