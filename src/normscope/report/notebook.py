"""A report in a notebook cell: verdict, findings, and the blocks of each stack."""

from normscope.notebook import Html, badge, code, fragment, line, table, tag
from normscope.report.html import describe_stack, lead_sentence
from normscope.report.report import Report
from normscope.report.sites import compress
from normscope.report.terminal import BLOCK_COLUMNS, block_rows
from normscope.report.words import cost_in_words, forecast_in_words, headline
from normscope.rules import Finding

_TONES = {"will fail": "error", "at risk": "warning", "healthy": "fine"}


def report_html(report: Report) -> str:
    """The report without its page: `report.to_html(path)` writes that one."""
    words = headline(report.verdict, report.forecast, report.ladder)
    head = line(
        badge(words, "note" if words.startswith("healthy,") else _TONES.get(report.verdict, "note")),
        " ",
        code(report.model),
    )
    grave = any(str(finding.severity) != "note" for finding in report.findings)
    return fragment(
        head,
        *([line(f"Cut short: {report.cut_short}")] if report.cut_short else []),
        *([] if grave else [line(lead_sentence(report))]),
        *([table(map(_finding, report.findings))] if report.findings else []),
        *(
            table(
                block_rows(stack, report.measurements),
                BLOCK_COLUMNS,
                title=f"{stack.name or 'stack'}: {describe_stack(stack)}",
                figures=range(2, len(BLOCK_COLUMNS)),
            )
            for stack in report.anatomy.stacks
        ),
        *_foot(report),
    )


def _finding(finding: Finding) -> tuple[str, ...]:
    severity, sites = str(finding.severity), compress(finding.sites)
    words = [tag("b", f"{finding.code} {finding.name}")]
    words += [tag("span", f" {sites}", style="opacity:.7")] if sites else []
    words.append(tag("div", finding.message))
    words += [tag("div", f"→ {finding.remedy}", style="opacity:.8")] if finding.remedy else []
    return badge(severity, severity), Html("".join(words))


def _foot(report: Report) -> list[Html]:
    said = [f"input: {'; '.join((report.input, *report.other_notes))}", f"cost: {cost_in_words(report.cost)}"]
    if report.forecast is not None:
        said.insert(0, f"trial: {forecast_in_words(report.forecast)}")
    return [line(words, soft=True) for words in said]
