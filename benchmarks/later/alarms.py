"""Simple rules that watch a run: how early each sees a late failure, on stored figures of each 20 steps.

The rules were fixed before they were tried. They are cruder than those of `normscope.monitor`, which needs
the norms of every step: an alarm stands at the end of 20 steps, and counts from step 300 on.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.later.failures import HEALTHY_AT
from benchmarks.later.scores import judged
from benchmarks.process import EVERY

Run = dict[str, Any]
FIRST = HEALTHY_AT // EVERY


def jump(ratio: float) -> Callable[[Run, int], bool]:
    """A rule: the largest gradient norm of 20 steps is `ratio` times the median of the 20 before."""

    def alarms(run: Run, point: int) -> bool:
        return _at(run["gradient-max"], point) >= ratio * _at(run["gradient"], point - 1)

    return alarms


def grown(ratio: float) -> Callable[[Run, int], bool]:
    """A rule: the median gradient norm of 20 steps is `ratio` times the lowest from step 100 on."""

    def alarms(run: Run, point: int) -> bool:
        medians = [_at(run["gradient"], k) for k in range(100 // EVERY, point + 1)]
        return medians[-1] >= ratio * min(medians)

    return alarms


def risen(nats: float) -> Callable[[Run, int], bool]:
    """A rule: the mean loss of 20 steps is `nats` above the lowest so far."""

    def alarms(run: Run, point: int) -> bool:
        losses = [_at(run["curve"], k) for k in range(point + 1)]
        return losses[-1] >= min(losses) + nats

    return alarms


RULES: dict[str, Callable[[Run, int], bool]] = {
    "a gradient norm over 4 times the median (ratio of NS805)": jump(4),
    "a gradient norm over 10 times the median": jump(10),
    "median gradient norm over 2 times its lowest": grown(2),
    "median gradient norm over 4 times its lowest": grown(4),
    "loss 0.15 nats over its lowest": risen(0.15),
}


def _at(values: Sequence[float | None], point: int) -> float:
    value = values[point]
    return math.inf if value is None else value


@dataclass(frozen=True)
class Seen:
    """Alarms of a rule on some runs.

    Attributes:
        leads: steps from the alarm to each failure before which it came, in order of the runs.
        failures: number of failures.
        false, others: runs without a failure that have an alarm, and all.
    """

    leads: tuple[int, ...]
    failures: int
    false: int
    others: int


def seen(rule: Callable[[Run, int], bool], runs: Sequence[Run], *, strict: bool = False) -> Seen:
    """Alarms of a rule on the runs that are healthy at step 300."""
    leads: list[int] = []
    failures = false = others = 0
    for run, failure in judged(runs, strict=strict):
        points = range(FIRST, min(len(run["curve"]), len(run["gradient"])))
        alarm = next(((point + 1) * EVERY for point in points if rule(run, point)), None)
        if failure is None:
            others, false = others + 1, false + (alarm is not None)
            continue
        failures += 1
        if alarm is not None and alarm <= failure.step:
            leads.append(failure.step - alarm)
    return Seen(tuple(leads), failures, false, others)


def table(runs: Sequence[Run], *, strict: bool = False) -> str:
    """Markdown: a line for each rule."""
    lines = ["| rule | failures after the alarm | median lead | false alarms |", "|---|---:|---:|---:|"]
    for name, rule in RULES.items():
        found = seen(rule, runs, strict=strict)
        lead = f"{statistics.median(found.leads):.0f}" if found.leads else "–"
        lines.append(
            f"| {name} | {len(found.leads)} of {found.failures} | {lead} | {found.false} of {found.others} |"
        )
    return "\n".join(lines)
