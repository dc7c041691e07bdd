"""`python -m benchmarks.later train FILE [WORD]`, `… score FILE` and `… monitor FILE OUTPUT`."""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch

from benchmarks.later import alarms, monitored, scores, tables
from benchmarks.later.failures import Failure
from benchmarks.later.ladders import LADDERS
from benchmarks.later.watched import train
from benchmarks.process import records_of
from normscope.train import in_flushed_thread


def train_all(file: Path, word: str) -> None:
    """Train the ladders that the file does not hold yet, and append their runs to it."""
    torch.set_num_threads(1)
    known = {run["ladder"] for run in records_of(file)}
    for ladder in LADDERS:
        if ladder.name in known or word not in ladder.name:
            continue
        started = time.process_time()
        runs = in_flushed_thread(lambda _, ladder=ladder: train(ladder))  # type: ignore[misc]
        with file.open("a") as output:
            output.writelines(json.dumps(run, separators=(",", ":")) + "\n" for run in runs)
        seconds = (time.process_time() - started) / len(runs)
        print(f"{ladder.name}: {seconds:.1f} s of processor time a run", flush=True)


def score(file: Path) -> None:
    """Print what became of the runs, and the tables."""
    runs = records_of(file)
    fates = [
        {(run["ladder"], run["seed"]): _words(failure) for run, failure in scores.judged(runs, strict=strict)}
        for strict in (False, True)
    ]
    for run in (run for run in runs if run["kind"] != "reference"):
        known = (each.get((run["ladder"], run["seed"]), "not healthy at step 300") for each in fates)
        print(f"{run['ladder']}, {run['kind']}, {run['lr']:g}: {'; strict: '.join(known)}")
    print()
    print(tables.tables(runs))
    for part, strict in itertools.product(("set-on", "held-out"), (False, True)):
        print(f"\nAlarms, {part}{', strict' * strict}")
        print(alarms.table([run for run in runs if run["part"] == part], strict=strict))


def _words(failure: Failure | None) -> str:
    if failure is None:
        return "healthy"
    return f"{'collapse' if failure.lasts else 'spike'} at step {failure.step}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("train", "score", "monitor"))
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "word", nargs="?", default="", help="part of the names of the ladders to train, or the file of alarms"
    )
    options = parser.parse_args()
    if options.command == "train":
        train_all(options.file, options.word)
    elif options.command == "monitor":
        monitored.monitor_all(options.file, Path(options.word))
        runs, rows = records_of(options.file), records_of(Path(options.word))
        print(monitored.table(runs, rows), monitored.table(runs, rows, strict=False), sep="\n\n")
    else:
        score(options.file)


if __name__ == "__main__":
    main()
