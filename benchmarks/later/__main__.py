"""`python -m benchmarks.later train FILE [WORD]` and `python -m benchmarks.later score FILE`."""

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.later import alarms, tables
from benchmarks.later.failures import failure_of, is_healthy
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
    for ladder in LADDERS:
        print(ladder.name)
        for run in (run for run in runs if run["ladder"] == ladder.name):
            print(f"  {run['kind']}, {run['lr']:g}: {_fate(run)}")
    print()
    print(tables.tables(runs))
    scored = [run for run in runs if run["kind"] != "reference"]
    for part in ("set-on", "held-out"):
        print(f"\nAlarms, {part}\n{alarms.table([run for run in scored if run['part'] == part])}")


def _fate(run: alarms.Run) -> str:
    curve = [float("inf") if loss is None else loss for loss in run["curve"]]
    if not is_healthy(curve, run["entropy"]):
        return "not healthy at step 300"
    failure = failure_of(curve, run["entropy"])
    if failure is None:
        return "healthy"
    return f"{'collapse' if failure.lasts else 'spike'} at step {failure.step}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("train", "score"))
    parser.add_argument("file", type=Path)
    parser.add_argument("word", nargs="?", default="", help="part of the names of the ladders to train")
    options = parser.parse_args()
    if options.command == "train":
        train_all(options.file, options.word)
    else:
        score(options.file)


if __name__ == "__main__":
    main()
