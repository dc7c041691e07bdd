"""Score the forecasts of the scripts against the runs that were trained.

    python -m benchmarks.loops.scores TRUTH FORECASTS

A cell is one script at one learning rate, and is judged as in `benchmarks.regimes.scores`: it is at the edge
where the seeds disagree. A rate that is named is right if it is near that of a seed, or between those of two
seeds: within a factor of 1.5 for the largest rate that trains, and of 2 for the best one.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import records_of
from benchmarks.regimes.best_rates import Named, best_of_replicas
from benchmarks.regimes.scores import Scored, figures, ladders
from normscope.forecast import BestRate


def named(ladder: Scored) -> Named:
    """The best rate that the command named, and those of the seeds."""
    return Named(ladder, BestRate(**ladder.cells[0].forecast["best"]), best_of_replicas(ladder))


def lines_of(script: Named) -> list[str]:
    """Lines of text on what was forecast of one script, and on what its runs did."""
    ladder, said = script.ladder, script.said
    lost = "" if script.excess is None else f", {100 * script.excess:.1f} % of the fall lost"
    return [
        f"{ladder.name}: {_cells([ladder])}",
        f"  largest {_rates([ladder.largest])}, seeds {_rates(ladder.largest_of_replicas)}: "
        f"{_word(ladder.largest_is_right)}",
        f"  best {_rates([said.rate])} ({_rates([said.low, said.high])}), seeds {_rates(script.best)}: "
        f"{_word(script.is_right)}{lost}",
    ]


def table(scripts: Sequence[Named]) -> str:
    """The figures of each script and of all, as text."""
    ladders = [script.ladder for script in scripts]
    counted = [script for script in scripts if script.trains]
    excesses = [script.excess for script in counted if script.excess is not None]
    lost = f"; {100 * statistics.median(excesses):.1f} % of the fall lost (median)" if excesses else ""
    return "\n".join(
        [
            *(line for script in scripts for line in lines_of(script)),
            f"all: {_cells(ladders)}",
            f"  largest right on {sum(each.largest_is_right for each in ladders)} of {len(ladders)} scripts",
            f"  best right on {sum(each.is_right for each in counted)} of {len(counted)}{lost}",
        ]
    )


def _cells(found: Sequence[Scored]) -> str:
    f = figures(found)
    low, high = f["interval"]
    return (
        f"sure cells right {f['sure and right']} of {f['sure']}; cells right {f['right']} of {f['cells']} "
        f"({100 * low:.0f} to {100 * high:.0f} %), {f['open']} open; "
        f"sure at the edge {f['sure at the edge']} of {f['edge cells']}, "
        f"by the probabilities {f['expected at the edge']:.1f}; {100 * f['cost']:.0f} % of the ladder's time"
    )


def _rates(rates: Sequence[float | None]) -> str:
    return " ".join(f"{rate:.2g}" if rate else "none" for rate in rates)


def _word(is_right: bool) -> str:
    return "right" if is_right else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("forecasts", type=Path)
    options = parser.parse_args()
    found, incomplete = ladders(records_of(options.truth), records_of(options.forecasts))
    print(table([named(ladder) for ladder in found]))
    print("\n".join(f"not all seeds were trained: {name}" for name in incomplete))


if __name__ == "__main__":
    main()
