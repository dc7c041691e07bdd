"""A worker: tests the claims that stdin names, a line each (id and module); answers each with a line of JSON.

Started by `Hand` with settings as JSON: seeds, long, text, runs.
"""

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import torch

from normscope.claims.claim import CLAIMS
from normscope.claims.look import Look
from normscope.claims.put_to_test import put_to_test
from normscope.claims.runs import Runs


def look_of(settings: str) -> Look:
    """The look of `settings_of`."""
    given = json.loads(settings)
    return Look(
        seeds=tuple(given["seeds"]),
        long=given["long"],
        text=None if given["text"] is None else Path(given["text"]),
        runs=Runs(None if given["runs"] is None else Path(given["runs"])),
    )


def settings_of(look: Look) -> str:
    """The look, for a worker."""
    folder = look.runs.folder
    return json.dumps(
        {
            "seeds": list(look.seeds),
            "long": look.long,
            "text": None if look.text is None else str(look.text.resolve()),
            "runs": None if folder is None else str(folder.resolve()),
        }
    )


def main(settings: str) -> None:
    """Until stdin ends. What claims print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    torch.set_num_threads(1)
    look = look_of(settings)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what claims print, and the processes that they start
    for line in sys.stdin:
        id, module = line.split()
        import_module(module)  # fills CLAIMS
        tested = put_to_test(CLAIMS[id], look)
        print(json.dumps(tested.to_cache()), file=answers, flush=True)
