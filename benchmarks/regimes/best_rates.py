"""Score the learning rate to use against the runs that were trained.

    python -m benchmarks.regimes.best_rates TRUTH FORECASTS [--replicas N] [--part PART …]

The best rate of a replica is that of its lowest loss at the end. A rate that is named is right within a
factor of two of the best rates of the replicas, or between them. The excess is the replicas' mean loss at the
named rate, interpolated in its logarithm, above their lowest, as a share of the fall from the loss without
the input; ladders of which no run trains have none.

What is printed beside it is how well a whole trained ladder does: the best rate of replica 0 is compared with
that of replica 1, which has another seed, and so is the named rate, which comes from the weights and batches
of replica 0.
"""

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.process import records_of, wilson
from benchmarks.regimes.case import PARTS, STEPS
from benchmarks.regimes.judged import forecast_of, of_parts
from benchmarks.regimes.scores import Scored, ladders
from benchmarks.regimes.truth import REPLICAS
from normscope.forecast import BestRate, Forecast
from normscope.forecast.best_rate import best_rate
from normscope.forecast.thresholds import LONG

NEAR = 2.0


@dataclass(frozen=True)
class Named:
    """A ladder, the rate that the forecast names, and the best rates of its replicas."""

    ladder: Scored
    said: BestRate
    best: tuple[float, ...]

    @property
    def trains(self) -> bool:
        """Whether some rate trains in all replicas."""
        return any(cell.truth == "trained" for cell in self.ladder.cells)

    @property
    def is_right(self) -> bool:
        """Whether the named rate is near those of the replicas."""
        return self.said.rate is not None and min(self.best) / NEAR <= self.said.rate <= max(self.best) * NEAR

    @property
    def is_near_other_seed(self) -> bool:
        """Whether the named rate is near the best one of replica 1 alone."""
        return self.said.rate is not None and _are_near(self.said.rate, self.best[1])

    @property
    def are_seeds_near(self) -> bool:
        """Whether the best rate of replica 0 is near that of replica 1."""
        return _are_near(self.best[0], self.best[1])

    @property
    def excess(self) -> float | None:
        """Share of the fall that is lost at the named rate; None without one."""
        means = {
            cell.forecast["lr"]: statistics.fmean(run["last"] for run in cell.runs)
            for cell in self.ladder.cells
            if all(run["last"] is not None for run in cell.runs)
        }
        if self.said.rate is None:
            return None
        return share_lost(self.said.rate, means, self.ladder.cells[0].runs[0]["baseline"])


def _are_near(one: float, other: float) -> bool:
    return 1 / NEAR <= one / other <= NEAR


def share_lost(rate: float, losses: Mapping[float, float], baseline: float) -> float | None:
    """Share of the fall from `baseline` to the lowest loss that is lost at a rate; None outside the rates.

    Args:
        losses: learning rate → last loss, in ascending order. Between two rates it is interpolated in their
            logarithms.
    """
    place, rates = math.log(rate), [math.log(each) for each in losses]
    if not rates[0] - 1e-9 <= place <= rates[-1] + 1e-9:
        return None
    loss = float(np.interp(place, rates, list(losses.values())))
    lowest = min(losses.values())
    return (loss - lowest) / (baseline - lowest)


def named(ladder: Scored) -> Named:
    """The rate that the rule names from a ladder's stored measurements."""
    rungs = [forecast_of(cell.forecast) for cell in ladder.cells]
    said = best_rate(rungs, _refined(rungs))
    return Named(ladder, said, best_of_replicas(ladder))


def best_of_replicas(ladder: Scored) -> tuple[float, ...]:
    """The learning rate of the lowest loss at the end, by replica."""
    best = []
    for number in range(len(ladder.cells[0].runs)):
        ended = [cell for cell in ladder.cells if cell.runs[number]["last"] is not None]
        best.append(min(ended, key=lambda cell: cell.runs[number]["last"]).forecast["lr"])
    return tuple(best)


def _refined(rungs: Sequence[Forecast]) -> int:
    """Steps of the longer trials of the best rates; 0 without any."""
    return max((rung.steps for rung in rungs if LONG < rung.steps < STEPS), default=0)


def table(found: Sequence[Named]) -> str:
    """The figures by regime and in all, and the ladders that are not right."""
    lines = []
    by_regime: Mapping[str, list[Named]] = defaultdict(list)
    for each in found:
        by_regime[each.ladder.regime].append(each)
    for name, group in [*by_regime.items(), ("all", list(found))]:
        counted = [each for each in group if each.trains]
        right = sum(each.is_right for each in counted)
        excesses = [each.excess for each in counted if each.excess is not None]
        low, high = wilson(right, len(counted))
        lost = f"{100 * statistics.median(excesses):.1f} % of the fall lost (median)" if excesses else ""
        lines.append(
            f"{name}: within ×{NEAR:g} on {right} of {len(counted)} ladders "
            f"({100 * low:.0f} to {100 * high:.0f} %); {lost}; "
            f"at most 5 % on {sum(e <= 0.05 for e in excesses)}"
        )
        several = [each for each in counted if len(each.best) > 1]
        lines.append(
            f"  of replica 1 alone on {sum(each.is_near_other_seed for each in several)} of {len(several)}, "
            f"and the best rate of replica 0 on {sum(each.are_seeds_near for each in several)}"
        )
    for each in found:
        if each.trains and not each.is_right:
            rates = " ".join(f"{rate:g}" for rate in each.best)
            rate = "none" if each.said.rate is None else f"{each.said.rate:.2g}"
            lines.append(f"  {each.ladder.name}: {rate} ({each.said.reason}), best {rates}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("forecasts", type=Path)
    parser.add_argument("--replicas", type=int, default=REPLICAS, help="fewest trained runs of a cell")
    parser.add_argument("--part", choices=PARTS, action="append", default=[])
    options = parser.parse_args()
    truth, forecasts = records_of(options.truth), of_parts(records_of(options.forecasts), options.part)
    found, incomplete = ladders(truth, forecasts, options.replicas)
    print(table([named(ladder) for ladder in found]))
    print("\n".join(f"not all replicas were trained: {name}" for name in incomplete))


if __name__ == "__main__":
    main()
