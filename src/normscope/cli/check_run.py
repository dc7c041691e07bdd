"""`normscope check RUN.db`: the report on a run from its store."""

import typer

from normscope.cli.check_options import command_of, refuse_others
from normscope.cli.report_output import Format, Shown, status_of, write
from normscope.cli.run_view import print_run, text_run
from normscope.errors import UsageError
from normscope.monitor.after import check_run

OF_STORE = {"model", "select", "ignore", "format", "output", "fail_on", "traceback"}
"""Parameters that the check of a run's store takes; it measures nothing anew."""


def check_store(context: typer.Context, format: Format) -> int:
    """Check the run whose store was given as MODEL; the exit status of the command."""
    given = context.params
    refuse_others(
        context, OF_STORE, "the store of a run", "a run that was measured while it went on", "leave it out"
    )
    if context.args:
        extra = f'"{" ".join(context.args)}" after the store "{given["model"]}"'
        raise UsageError(extra, "one store", "check each one by itself")
    report = check_run(given["model"], select=given["select"], ignore=given["ignore"])
    verdict = f"{report.scene.path}: {report.verdict}."
    shown = Shown(report, lambda: print_run(report), lambda: text_run(report), verdict)
    write(shown, format, given["output"], command_of(context))
    return status_of(report.severities, given["fail_on"])
