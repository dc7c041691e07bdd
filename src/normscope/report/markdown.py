"""The report as a few lines of Markdown, for a pull request or a job's summary.

Whatever comes from the model (module names, reasons) is escaped: it stays text on GitHub and on GitLab, makes
no link, mentions nobody, and cannot end a table's cell.
"""

import re
from collections.abc import Iterator

from normscope.anatomy import Stack
from normscope.report.report import Report
from normscope.report.rescue import ladder_sentences, rate_to_use, rates_at_scale, remedies_words
from normscope.report.sites import compress
from normscope.report.words import (
    budget_in_words,
    cost_in_words,
    forecast_in_words,
    gains_in_words,
    headline,
    next_step_in_words,
    stack_in_words,
    too_early_in_words,
)
from normscope.rules import Finding, figure
from normscope.train import recipe_in_words

MOST_FINDINGS = 12
MOST_STACKS = 4
LONGEST = 600
"""Characters of a text from which on it is cut."""
_SPECIAL = re.compile(r"([\\`*\[\]<>|~&$])|(?<![^\W_])(_)|(_)(?![^\W_])")
"""Characters that inline Markdown gives a meaning; an underscore within a word has none."""
_LINKED = re.compile(r"(?<=@)(?=\w)|(?<=#)(?=\d)|(?<=!)(?=\d)|(?<=:)(?=//)|(?<=www)(?=\.)", re.IGNORECASE)
"""Places where a mention, a number of an issue or a bare address is found after the escapes are read."""
_INVISIBLE = "\u200b"


def render_markdown(report: Report, command: str | None = None) -> str:
    """Verdict, findings, what was run, and how to run it again; 60 lines at most.

    Args:
        command: the shell command that made the report; without one the settings are listed alone.
    """
    return "\n".join(_lines(report, command)) + "\n"


def text(words: str) -> str:
    """`words` on one line as text that Markdown shows as it is; cut where it is very long."""
    line = " ".join(words.split())
    line = line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
    return _LINKED.sub(_INVISIBLE, _SPECIAL.sub(r"\\\g<0>", line))


def code(words: str) -> str:
    """`words` as a code span, for outside of tables; cut where it is very long."""
    line = " ".join(words.split())
    line = line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
    if not line:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _lines(report: Report, command: str | None) -> Iterator[str]:
    yield f"### normscope: {headline(report.verdict, report.forecast, report.ladder)}"
    yield ""
    yield code(report.model)
    if report.cut_short:
        yield ""
        yield f"Cut short: {text(report.cut_short)}."
    if report.forecast is None or report.forecast.outcome in ("not measured", "undecided"):
        yield ""
        yield "No trial decided; the verdict rests on measurements before the first step."
    yield ""
    yield from _findings(report)
    yield ""
    if report.ladder is not None and (rate := rate_to_use(report.ladder)):
        larger = rates_at_scale(report.ladder)
        yield f"Use {text(rate)}." + (f" A larger model: {text(larger)}." if larger else "")
        yield ""
    yield "| the run | |"
    yield "|---|---|"
    for name, words in _run(report):
        yield f"| {name} | {text(words)} |"
    if command is not None:
        yield ""
        yield "To run it again:"
        yield ""
        yield from block(command)
    if report.findings:
        yield ""
        yield "`normscope explain CODE` explains a finding and its threshold."


def _findings(report: Report) -> Iterator[str]:
    if not report.findings:
        yield "No findings."
    for finding in report.findings[:MOST_FINDINGS]:
        yield from _finding(finding)
    if (more := len(report.findings) - MOST_FINDINGS) > 0:
        yield f"- and {more} more"


def _finding(finding: Finding) -> Iterator[str]:
    sites = code(compress(finding.sites))
    place = f" at {sites}" if sites else ""
    yield f"- **{finding.severity}** {code(f'{finding.code} {finding.name}')}{place}: {text(finding.message)}"
    if finding.remedy:
        yield f"  → {text(finding.remedy)}"


def _run(report: Report) -> Iterator[tuple[str, str]]:
    """Rows of the table: at most 14, and one for each of the first stacks."""
    for stack in report.anatomy.stacks[:MOST_STACKS]:
        yield "stack", _stack(stack, report)
    if (more := len(report.anatomy.stacks) - MOST_STACKS) > 0:
        yield "stack", f"and {more} more"
    yield "input", "; ".join((report.input, *report.other_notes))
    if report.recipe is not None:
        yield "recipe", recipe_in_words(report.recipe)
    if words := next_step_in_words(report.measurements):
        yield "next step", words
    if report.forecast is not None:
        early = too_early_in_words(report.forecast, report.ladder)
        yield "trial", forecast_in_words(report.forecast) + (f". {early}" if early else "")
    if report.ladder is not None:
        yield "learning rates", "; ".join(ladder_sentences(report.forecast, report.ladder))
    if report.remedies is not None:
        yield from remedies_words(report.remedies)
    if report.anatomy.unread:
        yield "unread", "; ".join(report.anatomy.unread)
    yield "cost", cost_in_words(report.cost)
    if report.budget:
        yield "Jacobians", budget_in_words(report.budget)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    seed = [] if report.seed is None else [f"seed {report.seed}"]
    yield "made with", ", ".join([*seed, report.device, versions])


def _stack(stack: Stack, report: Report) -> str:
    """Blocks and norms of a stack, how its stream changes from the first block to the last, and its gains."""
    words = [stack_in_words(stack)]
    for name, quantity in (("diversity", "stream/diversity"), ("gradient", "gradient/stream")):
        found = report.measurements.of(quantity)
        values = [found[block.site] for block in stack.blocks if block.site in found]
        if len(values) > 1:
            words.append(f"{name} {figure(values[0], 3)} → {figure(values[-1], 3)} from first to last block")
    return "; ".join([*words, *filter(None, [gains_in_words(stack.name, report.measurements)])])


def block(command: str) -> Iterator[str]:
    """A fenced block of one line, with a fence that the line does not hold."""
    line = " ".join(command.split())
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    yield from (f"{fence}console", f"$ {line}", fence)
