"""`normscope check -- COMMAND`: the check of a training script as it is."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from normscope.capture.folder import Settings
from normscope.capture.launch import Outcome, captured, say
from normscope.errors import CaptureError
from normscope.interrupts import Ended


def check_script(words: Sequence[str], options: Mapping[str, Any], *, quiet: bool) -> Outcome:
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
