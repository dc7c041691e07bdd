"""`normscope check -- COMMAND`: the check of a training script as it is."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from normscope.capture.folder import Settings
from normscope.capture.launch import Outcome, captured, say
from normscope.cli.check_options import SETTINGS_OF_SCRIPT, command_of, rates_given
from normscope.cli.report_output import Format, exit_status, show
from normscope.cli.script_words import SCRIPT
from normscope.errors import CaptureError
from normscope.interrupts import Ended
from normscope.probes.quantisation import formats_to_round


def check_script(context: typer.Context, format: Format) -> int:
    """Check the training script behind `--`; the exit status of the command."""
    given, words = context.params, context.meta[SCRIPT]
    rates = [] if given["rates"] is None else rates_given(given["rates"])
    forecast = given["forecast"] or bool(given["refine"])
    formats_to_round(given["quantise"])  # refused before the script starts
    settings = {name: given[name] for name in SETTINGS_OF_SCRIPT}
    settings |= {"forecast": forecast, "rates": tuple(rates)}
    outcome = _run(words, settings, quiet=given["quiet_script"])
    if outcome.report is not None:
        show(outcome.report, format, given["output"], command_of(context))
        if not outcome.is_interrupted and (outcome.is_whole or exit_status(outcome.report, given["fail_on"])):
            return exit_status(outcome.report, given["fail_on"])
    return 130 if outcome.is_interrupted else 2


def _run(words: Sequence[str], options: Mapping[str, Any], *, quiet: bool) -> Outcome:
    """Run the script and say on stderr what happens; its own stdout goes there too.

    Args:
        words: the script's command.
        options: fields of `Settings`, but for its command.
        quiet: whether the script's own output is hidden.
    """
    settings = Settings(command=shlex.join(words), **options)
    try:
        outcome = captured(words, settings, quiet=quiet)
    except Ended as end:
        say(f"ended by {end.signal}, and the script with it")
        raise
    except CaptureError as error:
        if settings.traceback:
            print(error.trace, file=sys.stderr, end="")
        raise
    if settings.traceback:
        print(outcome.trace, file=sys.stderr, end="")
    if outcome.reason:
        say(outcome.reason)
    return outcome
