"""Page of a run from its store: verdict, loss with the alarms beside it, findings, figures."""

from typing import Any

import numpy as np
from markupsafe import Markup

from normscope.monitor.after.report import RunReport
from normscope.monitor.after.words import event_line, families, figure_lines, look_lines, state_line
from normscope.report.figures.charts import Curve, Picture, about_marks, chart, is_log
from normscope.report.figures.scales import figure
from normscope.report.html import sentence
from normscope.report.page import environment, style_sheet
from normscope.report.sites import compress

MOST_POINTS = 300
"""Points of a line; of a longer run each is the value of its stretch that is farthest from the median."""
_CLASSES = {"failed": "error", "at risk": "warning", "undecided": "untried", "healthy": "fine"}


def render_page(report: RunReport, command: str | None = None) -> str:
    """The page, one self-contained file without a script; every word in it is escaped.

    Args:
        report: the report.
        command: shell command that made it.
    """
    scene, several = report.scene, len(report.scene.ranks) > 1
    page = (
        environment("normscope.monitor.after")
        .get_template("run.html")
        .render(
            report=report,
            name=f"{scene.path.name} {report.model}".strip(),
            style=Markup(style_sheet("page.css")),
            tone=_CLASSES[report.verdict],
            lead=sentence(lead(report)),
            state=sentence(state_line(report)),
            loss=loss_chart(report),
            wrong=None if scene.wrong is None else (event_line(scene.wrong, several), scene.wrong.sentence),
            families=families(report.findings),
            compress=compress,
            looks=list(look_lines(report)),
            rescues=[(event_line(each, several), each.sentence) for each in report.rescues],
            events=[(event_line(each, several), each.kind, each.sentence) for each in report.events],
            figures=list(figure_lines(report)),
            rerun=command or "",
        )
    )
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def lead(report: RunReport) -> str:
    """The sentence that matters most: the first wrong value, the worst finding, or why the verdict is so."""
    worst = report.findings[0].finding if report.findings else None
    if report.verdict == "failed" and report.scene.wrong is not None:
        return report.scene.wrong.sentence
    is_reason = worst is not None and report.why.startswith(worst.code)
    return worst.message if worst is not None and is_reason else report.why


def loss_chart(report: RunReport) -> Picture | None:
    """Loss by step, beside the entropy of the targets; None without a loss."""
    loss = report.scene.loss
    if loss is None:
        return None
    kept = loss.present[:, 0]
    steps, values = condensed(loss.steps[kept], loss.values[kept, 0])
    curve = Curve("", "c-a", steps, values)
    entropy = report.scene.notes.get("entropy")
    level = (float(entropy), "entropy") if isinstance(entropy, int | float) else None
    about = "In nats. "
    if kept.sum() > MOST_POINTS:
        about += "Each point is the loss of its stretch of steps that is farthest from the median. "
    if level is not None:
        about += f"Dashed: entropy of the targets, {figure(level[0], 3)}. "
    alarms = _alarms(report, loss.steps[kept], loss.values[kept, 0])
    about += "Dots: findings. " if alarms.xs else ""
    log = is_log(values)
    about += ("Log axis. " if log else "") + about_marks([curve])
    drawing = chart(
        [curve, *([alarms] if alarms.xs else [])],
        label="Loss by step",
        x_label="step",
        log=log,
        level=level,
        dots=False,
    )
    return Picture("Loss", about.strip(), drawing)


def _alarms(report: RunReport, steps: Any, values: Any) -> Curve:
    """A dot at the loss of each step with findings; a gap between two of them keeps lines away."""
    found = {each.step: each.finding.code for each in reversed(report.findings)}
    at = {int(step): float(value) for step, value in zip(steps, values, strict=True) if int(step) in found}
    points = [(float(step), value) for step, value in at.items() if np.isfinite(value)][:MOST_POINTS]
    xs = [x for x, _ in points for _ in range(2)]
    ys = [y for _, value in points for y in (value, None)]
    return Curve("findings", "c-ink", xs, ys, label=False)


def condensed(steps: Any, values: Any) -> tuple[list[float], list[float]]:
    """At most `MOST_POINTS` of the values: of a stretch one that is not finite, or the most unusual one."""
    finite = values[np.isfinite(values)]
    usual = float(np.median(finite)) if len(finite) else 0.0
    far = np.where(np.isfinite(values), np.abs(values / 2 - usual / 2), np.inf)
    parts = np.array_split(np.arange(len(values)), max(1, min(MOST_POINTS, len(values))))
    chosen = [int(part[np.argmax(far[part])]) for part in parts if len(part)]
    return [float(steps[i]) for i in chosen], [float(values[i]) for i in chosen]
