"""Processor time of a stack of replicas beside that of lone runs, on some of the ladders.

    python -m benchmarks.regimes.stack_cost [WORD …] [--replicas NUMBER]

Each figure is the median over three rounds in which both take turns, 20 steps each, one thread.
"""

import argparse
import statistics

import torch

from benchmarks.regimes.case import RATES
from benchmarks.regimes.cases import CASES
from benchmarks.regimes.cost import seconds
from benchmarks.regimes.forecasts import name_of

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", default=[""], help="parts of the names of ladders")
    parser.add_argument("--replicas", type=int, default=len(RATES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        name = name_of(case)
        if not any(word in name for word in options.words):
            continue
        size = sum(parameter.numel() for parameter in case.subject(case.seed).model.parameters())
        taken = [(seconds(case, 1), seconds(case, options.replicas)) for _ in range(ROUNDS)]
        lone, stacked = (statistics.median(each) for each in zip(*taken, strict=True))
        shown = f"{1e3 * lone:.1f} ms a step alone, {1e3 * stacked:.1f} ms in a stack"
        print(f"{name}: {size} parameters, {shown}, ratio {stacked / lone:.2f}", flush=True)


if __name__ == "__main__":
    main()
