"""Train the scripts at each learning rate and three seeds, and keep the results.

    python -m benchmarks.loops.truth FILE [--only WORD]

One line of JSON is one run; an interrupted run of this command is continued. `truth.jsonl` beside this file
has what was trained. The last line of a script has its losses, and the counts of the targets of its last 20
steps, or the loss of their best constant. A run trains if the mean of its last 20 losses is under the loss
without the input, on the batches of the same steps, by a tenth of its unit: 0.1 nats, or a tenth of the loss
of the best constant.
"""

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.entropy import plain
from benchmarks.loops.scripts import FOLDER, SCRIPTS, command, run
from benchmarks.process import EVERY, records_of
from benchmarks.regimes.case import RATES, SHARE
from benchmarks.regimes.truth import REPLICAS


def trained(script: Path, lr: float, seed: int) -> dict[str, Any]:
    """The record of one run; the replica is the seed.

    Raises:
        RuntimeError: the script failed; the message holds its stderr.
    """
    words = command(script, lr, seed)
    done, seconds = run(words)
    if done.returncode != 0:
        raise RuntimeError(f"{words} failed:\n{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    means = [statistics.fmean(said["losses"][i : i + EVERY]) for i in range(0, len(said["losses"]), EVERY)]
    curve = [round(mean, 4) if math.isfinite(mean) else None for mean in means]
    baseline = round(said["constant"] if "constant" in said else plain(np.array(said["counts"])), 4)
    unit = baseline if "constant" in said else 1.0
    return {
        "case": script.stem,
        "replica": seed,
        "lr": lr,
        "baseline": baseline,
        "own_baseline": baseline,
        "unit": unit,
        "last": curve[-1],
        "trains": trains(curve[-1], baseline, unit),
        "curve": curve,
        "seconds": round(seconds, 2),
    }


def trains(last: float | None, baseline: float, unit: float) -> bool:
    """Whether a run with this mean of the last losses trains; None is a loss that is not finite."""
    return last is not None and last <= baseline - SHARE * unit


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="part of the names of scripts")
    options = parser.parse_args()
    known = {(row["case"], row["lr"], row["replica"]) for row in records_of(options.file)}
    named = [name for name in SCRIPTS if options.only in name]
    for seed, name, lr in itertools.product(range(REPLICAS), named, RATES):  # every script once, then again
        if (name, lr, seed) in known:
            continue
        found = trained(FOLDER / f"{name}.py", lr, seed)
        with options.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(name, seed, f"{lr:g}", found["last"], found["trains"], found["seconds"], flush=True)


if __name__ == "__main__":
    main()
