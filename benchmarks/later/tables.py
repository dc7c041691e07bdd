"""The tables of `scores`, as Markdown."""

from collections.abc import Sequence

from benchmarks.later.scores import BASELINES, Line, Run, lines, samples
from benchmarks.later.watched import AT

WHAT: dict[str, dict[str, bool]] = {
    "late failures": {},
    "collapses": {"lasting": True},
    "late failures, strict": {"strict": True},
}
"""Names of the scored failures, and the options of `samples` for each."""


def tables(runs: Sequence[Run], best: int = 8) -> str:
    """Markdown tables by step: all baselines and logistic models, and the best figures."""
    parts = []
    for what, options in WHAT.items():
        for step in AT:
            seton, held = (
                samples([run for run in runs if run["part"] == part], step, **options)
                for part in ("set-on", "held-out")
            )
            found = lines(seton, held, step)
            shown = [
                line
                for rank, line in enumerate(found)
                if rank < best or line.name in BASELINES or "logistic" in line.name
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
    return (
        f"| {line.name} | {line.auroc:.2f} | {line.low:.2f} to {line.high:.2f} | {line.seton:.2f} "
        f"| {line.more:+.2f} ({line.more_low:+.2f} to {line.more_high:+.2f}) "
        f"| {line.found} of {line.failures} | {line.false} of {line.others} | {line.lead:.0f} |"
    )
