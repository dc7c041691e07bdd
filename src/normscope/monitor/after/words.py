"""Lines about a run that all outputs share: its state, its figures, its findings by code."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from normscope.monitor.after.findings import AFTER, DONE_AGAIN, RESCUED, RunFinding
from normscope.monitor.after.report import RunReport, is_interrupted
from normscope.monitor.row import Event
from normscope.report.sites import compress
from normscope.rules import figure

MOST_STEPS = 6
"""Further steps of a finding that are listed; of more, their number."""
MOST_RANKS = 8


@dataclass(frozen=True)
class Family:
    """Findings of one code and severity: the first in full, the others by their steps."""

    first: RunFinding
    others: tuple[RunFinding, ...]

    @property
    def more(self) -> str:
        """Sentence on the others; "" without any."""
        if not self.others:
            return ""
        steps = [str(each.step) for each in self.others[:MOST_STEPS]]
        rest = len(self.others) - len(steps)
        listed = f"{', '.join(steps)} and {rest} times more" if rest else _and(steps)
        return f"Again at step{'s' if len(self.others) > 1 else ''} {listed}."

    @property
    def place(self) -> str:
        """Step, ranks and origin: "step 31, rank 2"."""
        return place(self.first)


def families(findings: Sequence[RunFinding]) -> list[Family]:
    """The findings by code and severity, in the order of their first ones."""
    groups: dict[tuple[str, str, str], list[RunFinding]] = {}
    for each in findings:
        groups.setdefault((str(each.finding.severity), each.finding.code, each.passed), []).append(each)
    return [Family(group[0], tuple(group[1:])) for group in groups.values()]


def place(found: RunFinding) -> str:
    """Step and ranks of a finding, and whether the monitor of the run did not raise it."""
    words = where(found.step, found.ranks if found.ranks != (0,) else ())
    passed = {RESCUED: ", passed over by a rescue", DONE_AGAIN: ", done again since"}.get(found.passed, "")
    return words + passed + (", found afterwards" if found.by == AFTER else "")


def where(step: int, ranks: Sequence[int] = ()) -> str:
    """A step and some ranks in words."""
    if not ranks:
        return f"step {step}"
    listed = ", ".join(map(str, ranks[:MOST_RANKS])) + (", …" if len(ranks) > MOST_RANKS else "")
    return f"step {step}, rank{'s' if len(ranks) > 1 else ''} {listed}"


def state_line(report: RunReport) -> str:
    """State of the run: "ended after step 400 of 400, 12 min after its start"."""
    scene, last = report.scene, report.scene.last_step
    planned = scene.notes.get("steps")
    step = "before its first step" if last is None else f"step {last}"
    step += f" of {planned}" if isinstance(planned, int) and last is not None else ""
    after = "" if last is None else "after "
    at = "" if last is None else "at "
    words = {
        "ended": f"ended {after}{step}",
        "failed": f"{'was interrupted' if is_interrupted(scene) else 'failed'} {after}{step}",
        "gone": f"died without an end, {after}{step}"
        + f": {scene.reason}" * (scene.reason not in report.why),
        "running": f"still running, {at}{step}",
        "silent": f"still running or lost, {at}{step}; no write for {scene.silence:.0f} s",
    }[scene.state]
    several = f"; {len(scene.ranks)} ranks" if len(scene.ranks) > 1 else ""
    resumed = max((each.attempt for each in scene.ranks), default=0)
    again = f"; resumed {resumed} time{'s' if resumed > 1 else ''}" if resumed else ""
    began = min(each.began for each in scene.ranks)
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
    return f"{words}{several}{again}; began {date}"


def figure_lines(report: RunReport) -> Iterator[tuple[str, str]]:
    """Rows of the table of the run: name and figures."""
    found, entropy = report.figures, report.scene.notes.get("entropy")
    if found.num_steps:
        missing = f", {found.num_missing} without figures" if found.num_missing else ""
        skipped = f", {found.skipped} skipped" if found.skipped else ""
        yield "steps", f"{found.first_step} to {found.last_step}{missing}{skipped}"
    if found.first_loss is not None and found.last_loss is not None:
        words = f"{_value(found.first_loss)} at the start, {_value(found.last_loss)} at the end"
        if found.best_loss is not None:
            words += f", best {figure(found.best_loss)} at step {found.best_step}"
        if isinstance(entropy, int | float):
            share = report.scene.notes.get("smoothing")
            how = f" with the loss's label smoothing of {figure(float(share))}" if share else ""
            words += f"; entropy of the targets {figure(float(entropy))}{how}"
        elif unknown := report.scene.notes.get("entropy-unknown"):
            words += f"; entropy of the targets unknown ({unknown}), so NS809 was not judged"
        yield "loss", words
    if found.seconds is not None and found.step_seconds is not None:
        yield "time", f"{_duration(found.seconds)} in steps, median {figure(found.step_seconds)} s a step"
    if found.tokens:
        speed = "" if found.tokens_per_second is None else f", {figure(found.tokens_per_second)} a second"
        yield "tokens", f"{found.tokens:,.0f}{speed}"


def looks_line(report: RunReport) -> str:
    """Number of looks, and how many of them `look_lines` leaves out."""
    left_out = len(report.looks) - len(_looks_that_differ(report))
    alike = "1 was" if left_out == 1 else f"{left_out} were"
    return f"{len(report.looks)}" + f", of which {alike} like the one before" * (left_out > 0)


def look_lines(report: RunReport) -> Iterator[tuple[str, str]]:
    """Step and result of each look that differs from the one before; the findings of the last one in full."""
    looks = report.looks
    for event in _looks_that_differ(report):
        said = f"{event.sentence} ({event.data.get('why')})"
        yield event_line(event, len(report.scene.ranks) > 1), said
    for finding in looks[-1].data.get("findings", ()) if looks else ():
        sites = compress(finding["sites"])
        place = f" at {sites}" if sites else ""
        yield f"{finding['severity']}", f"{finding['code']} {finding['name']}{place}: {finding['message']}"


def _looks_that_differ(report: RunReport) -> list[Event]:
    """The looks whose findings differ from those of the one before, and the last one."""
    found, before = [], ""
    for event in report.looks:
        said = event.sentence
        names = said.partition(", ")[2] or said
        if names != before or event is report.looks[-1]:
            found.append(event)
        before = names
    return found


def event_line(event: Event, several: bool) -> str:
    """Step and rank of an event."""
    return where(event.step, (event.rank,) if several else ())


def _value(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite" if math.isinf(value) else figure(value)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{figure(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
