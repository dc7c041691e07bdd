"""The tables of `scores`, as Markdown."""

import math
from collections.abc import Sequence

from benchmarks.later.scores import BASELINES, Line, Run, lines, samples
from benchmarks.later.watched import AT

WHAT: dict[str, dict[str, bool]] = {
    "late failures": {},
    "collapses": {"lasting": True},
    "late failures, strict": {"strict": True},
}
"""Names of the scored failures, and the options of `samples` for each."""
BEST = 8
"""Figures of a table, beside the baselines and the logistic models."""


def tables(runs: Sequence[Run]) -> str:
    """Markdown tables by step: all baselines and logistic models, and the best figures."""
    parts = []
    for what, options in WHAT.items():
        for step in AT:
            seton, held = (
                samples([run for run in runs if run["part"] == part], step, **options)
                for part in ("set-on", "held-out")
            )
            found = lines(seton, held, step) if seton and held else []
            shown = [
                line
                for rank, line in enumerate(found)
                if rank < BEST or line.name in BASELINES or "logistic" in line.name
            ]
            head = f"Step {step}, {what}: {sum(s.fails for s in held)} of {len(held)} runs held out"
            head += f", {sum(s.fails for s in seton)} of {len(seton)} set on"
            parts.append("\n".join([head, _HEAD, *map(_row, shown)]))
    return "\n\n".join(parts)


_HEAD = (
    "| figure | AUROC | 95 % | set on | minus the best baseline | failures found | false alarms | lead |\n"
    "|---|---:|---|---:|---|---:|---:|---:|"
)


def _row(line: Line) -> str:
    more = (
        f"{_shown(line.more, '+.2f')} ({_shown(line.more_low, '+.2f')} to {_shown(line.more_high, '+.2f')})"
    )
    return (
        f"| {line.name} | {_shown(line.auroc)} | {_shown(line.low)} to {_shown(line.high)} "
        f"| {_shown(line.seton)} | {more} | {line.found} of {line.failures} | {line.false} of {line.others} "
        f"| {_shown(line.lead, '.0f')} |"
    )


def _shown(value: float, form: str = ".2f") -> str:
    """A figure as text; a dash if it is not known."""
    return "–" if math.isnan(value) else format(value, form)
