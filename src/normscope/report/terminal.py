"""The report on a terminal: verdict first, then findings, then the stack block by block.

Whatever comes from the model (module names, reasons) goes through `Text`: "[red]" in a path stays text.
"""

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.text import Text

from normscope.anatomy import Block, Stack
from normscope.probes import Measurements
from normscope.report.console import (
    COLOURS,
    MARGIN,
    NOTHING,
    as_text,
    indented,
    labelled,
    room_beside,
    show,
)
from normscope.report.figure_table import FigureTable
from normscope.report.report import Report
from normscope.report.rescue import (
    ladder_table,
    ladder_words,
    mark_in_words,
    near_limit_in_words,
    other_trial_in_words,
    range_test_in_words,
    rate_to_use,
    rates_at_scale,
    remedies_legend,
    remedies_table,
    remedies_words,
)
from normscope.report.rounding import rounding_in_words, rounding_table
from normscope.report.sites import compress, shorten
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

MOST_ROWS = 16
"""Blocks of a stack that are shown in full; of a deeper one the first and the last few."""
_ENDS = 6
_FIGURES = {
    "rms": "stream/rms",
    "diversity": "stream/diversity",
    "gradient": "gradient/stream",
    "σ_max": "jacobian/sigma-max",
}
BLOCK_COLUMNS = ("block", "norms", "update/stream", *_FIGURES)
"""The names of the cells of `block_rows`."""


def print_report(report: Report, console: Console | None = None) -> None:
    """Print `report`; colour and width are the terminal's, plain text in a pipe."""
    show(lambda width: _parts(report, width), console)


def text_report(report: Report, width: int = 110) -> str:
    """The same as plain text of `width` columns, for a file."""
    return as_text(lambda width: _parts(report, width), width)


def print_markdown(text: str) -> None:
    """Print Markdown: rendered on a terminal, as it is in a pipe."""
    if sys.stdout.isatty():
        Console(file=sys.stdout).print(Markdown(text))
    else:
        sys.stdout.write(text)


def _parts(report: Report, width: int) -> Iterator[RenderableType]:
    head = headline(report.verdict, report.forecast, report.ladder)
    colour = COLOURS["undecided" if head.startswith("healthy,") else report.verdict]
    yield Text.assemble((head, colour), "  ", (report.model, "bold"))
    if report.cut_short:
        yield labelled("but", report.cut_short)
    if report.forecast is None or report.forecast.outcome in ("not measured", "undecided"):
        yield labelled("but", "no trial decided; the verdict rests on measurements before the first step")
    if report.ladder is not None and (rate := rate_to_use(report.ladder)):
        yield labelled("use", rate)
        if larger := rates_at_scale(report.ladder):
            yield labelled("larger", larger)
    yield labelled("model", "; ".join(map(stack_in_words, report.anatomy.stacks)) or "no blocks were read")
    yield labelled("input", report.input)
    if report.recipe is not None:
        yield labelled("recipe", recipe_in_words(report.recipe))
    for finding in report.findings:
        yield Text("")
        yield from _finding(finding, width)
    yield from _tried(report)
    for stack in report.anatomy.stacks:
        yield Text("")
        yield block_table(stack, report.measurements, width)
    yield Text("")
    for stack in report.anatomy.stacks:
        if words := gains_in_words(stack.name, report.measurements):
            yield labelled("gains", f"{stack.name}: {words}" if len(report.anatomy.stacks) > 1 else words)
    if words := next_step_in_words(report.measurements):
        yield labelled("step", words)
    yield from _rounded(report, width)
    if report.forecast is not None:
        said = any(report.forecast.reason in finding.message for finding in report.findings)
        reason = "" if said else f". {report.forecast.reason}"
        yield labelled("trial", forecast_in_words(report.forecast) + reason)
        if words := too_early_in_words(report.forecast, report.ladder):
            yield indented(Text(words))
    for note in report.other_notes:
        yield labelled("note", note)
    yield labelled("cost", cost_in_words(report.cost))
    if report.budget:
        yield labelled("budget", budget_in_words(report.budget))


def _rounded(report: Report, width: int) -> Iterator[RenderableType]:
    """The effect of rounding to the formats of `--quantise`."""
    table = rounding_table(report.measurements, width)
    if table is not None:
        yield from (Text(""), table, Text(""))
    for label, words in rounding_in_words(report.measurements):
        yield labelled(label, words)


def _tried(report: Report) -> Iterator[RenderableType]:
    """The trials besides the intended run: remedies, and other learning rates."""
    if report.remedies is not None:
        yield Text("")
        for label, words in remedies_words(report.remedies):
            yield labelled(label, words)
        if any(attempt.forecast is not None for attempt in report.remedies.attempts):
            yield Text("")
            yield remedies_table(report.remedies)
            yield Text(remedies_legend(report.remedies), style="dim")
    if report.ladder is not None:
        yield Text("")
        yield labelled("rates", ladder_words(report.ladder))
        if words := other_trial_in_words(report.forecast, report.ladder):
            yield labelled("but", words)
        if report.ladder.rungs:
            yield Text("")
            yield ladder_table(report.ladder)
            if words := mark_in_words(report.ladder):
                yield Text(words, style="dim")
            if words := near_limit_in_words(report.ladder):
                yield Text("")
                yield labelled("limit", words)
            if words := range_test_in_words(report.ladder):
                yield Text("")
                yield labelled("range", words)


def _finding(finding: Finding, width: int) -> Iterator[RenderableType]:
    severity = str(finding.severity)
    head = Text.assemble(
        (f"{severity:<{MARGIN}}", COLOURS[severity]), (f"{finding.code} {finding.name}", "bold")
    )
    sites = Text(compress(finding.sites), style="dim")
    if len(head) + 2 + len(sites) <= width:
        yield Text.assemble(head, "  ", sites) if sites else head
    else:
        yield head
        yield indented(sites)
    yield indented(Text(finding.message))
    if finding.remedy:
        yield indented(Text(f"→ {finding.remedy}", style="italic"))


def block_table(stack: Stack, measurements: Measurements, width: int) -> FigureTable:
    """A row for each block: norm placement, update-to-stream ratio of each branch, figures of the stream.

    A figure that is missing or was not measured shows as a dash.
    """
    rows = list(block_rows(stack, measurements))
    room = room_beside((BLOCK_COLUMNS, *rows), width, gap=3)
    name_width = min(48, room if room >= 12 else width)  # too narrow for columns: a name has a line
    head = Text(shorten(stack.name or "block", name_width))
    table = FigureTable(head, *BLOCK_COLUMNS[1:], figures=BLOCK_COLUMNS[2:])
    for site, *cells in rows:
        left_out = not any(cells)
        row = ["⋮"] * len(cells) if left_out else cells
        name = Text(f"⋮ {site}", style="dim") if left_out else Text(shorten(site, name_width))
        table.add_row(name, *row, style="dim" if left_out else "")
    return table


def block_rows(stack: Stack, measurements: Measurements) -> Iterator[tuple[str, ...]]:
    """Site and cells of each block that is shown; "37 more" and empty cells for those that are left out."""
    values = [measurements.of(quantity) for quantity in _FIGURES.values()]
    updates = measurements.of("branch/update-ratio")
    for block in folded(stack.blocks):
        if isinstance(block, int):
            yield (f"{block} more", *[""] * (len(BLOCK_COLUMNS) - 1))
            continue
        yield (
            block.site,
            "+".join(dict.fromkeys(branch.placement for branch in block.branches)) or NOTHING,
            " ".join(_cell(updates.get(branch.site), 2) for branch in block.branches[:3]) or NOTHING,
            *(_cell(found.get(block.site), 3) for found in values),
        )


def folded(blocks: Sequence[Block]) -> Iterator[Block | int]:
    """The blocks to show, and in the fold how many are not."""
    if len(blocks) <= MOST_ROWS:
        yield from blocks
        return
    yield from blocks[:_ENDS]
    yield len(blocks) - 2 * _ENDS
    yield from blocks[-_ENDS:]


def _cell(value: float | None, digits: int) -> str:
    return NOTHING if value is None else figure(value, digits)
