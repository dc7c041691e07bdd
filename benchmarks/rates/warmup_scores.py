"""Score the warm-ups that were named against the runs that were trained.

    python -m benchmarks.rates.warmup_scores TRUTH FORECASTS

The true shortest warm-up is the shortest with which every replica trains. A name is right within a factor of
two of it; "does not help" is right where no warm-up trains in any replica. A case is at the edge, and neither
right nor wrong, where some warm-up trains in one replica and none in all.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import records_of, wilson

NEAR = 2.0
HELPS_NOT = -1
"""Stands for no warm-up that trains."""


@dataclass(frozen=True)
class Scored:
    """A case, its true shortest warm-up (None at the edge), and what was said."""

    name: str
    part: str
    true: int | None
    said: int | None
    lowest_bare: float
    lowest_ramped: float
    trial_steps: int
    rung_steps: int

    @property
    def is_right(self) -> bool | None:
        """Whether the name is right; None for a case at the edge."""
        if self.true is None:
            return None
        if self.said is None or self.true <= 0 or self.said == 0:
            return (HELPS_NOT if self.said is None else self.said) == self.true
        return self.true / NEAR <= self.said <= self.true * NEAR


def shortest(runs: Sequence[dict[str, Any]], wanted: float) -> int | None:
    """The shortest warm-up with which all replicas of `wanted` train; `HELPS_NOT`, or None at the edge."""
    by_warmup: dict[int, list[bool]] = {}
    for run in runs:
        if run["lr"] == wanted:
            by_warmup.setdefault(run["warmup"], []).append(run["trains"])
    sure = [warmup for warmup, trained in by_warmup.items() if all(trained)]
    if sure:
        return min(sure)
    return None if any(any(trained) for trained in by_warmup.values()) else HELPS_NOT


def scored(truth: Sequence[dict[str, Any]], said: dict[str, Any]) -> Scored:
    """One case against its runs."""
    runs = [run for run in truth if run["case"] == said["case"]]
    ends = [(run["warmup"], run["last"]) for run in runs if run["last"] is not None]
    return Scored(
        said["case"],
        said["part"],
        shortest(runs, said["wanted"]),
        said["warmup"],
        min((last for warmup, last in ends if warmup == 0), default=float("inf")),
        min((last for warmup, last in ends if warmup > 0), default=float("inf")),
        sum(ramp["steps"] for ramp in said["ramps"]),
        sum(rung["steps"] for rung in said["rungs"]),
    )


def table(found: Sequence[Scored]) -> str:
    """A line for each case, and the share that is right."""
    lines = []
    for each in found:
        verdict = {True: "right", False: "WRONG", None: "at the edge"}[each.is_right]
        true = {None: "at the edge", HELPS_NOT: "none helps"}.get(each.true, f"{each.true} steps")
        name = "does not help" if each.said is None else f"{each.said} steps"
        losses = f"lowest loss {each.lowest_bare:.2f} without, {each.lowest_ramped:.2f} with one"
        cost = f"{each.trial_steps} steps beside the ladder's {each.rung_steps}"
        lines.append(f"{each.part} {each.name}: said {name}, true {true}: {verdict}; {losses}; {cost}")
    for part in sorted({each.part for each in found}):
        counted = [each for each in found if each.part == part and each.is_right is not None]
        right = sum(bool(each.is_right) for each in counted)
        low, high = wilson(right, len(counted))
        lines.append(f"{part}: {right} of {len(counted)} right ({100 * low:.0f} to {100 * high:.0f} %)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("forecasts", type=Path)
    options = parser.parse_args()
    truth = records_of(options.truth)
    trained = {run["case"] for run in truth}
    print(table([scored(truth, said) for said in records_of(options.forecasts) if said["case"] in trained]))


if __name__ == "__main__":
    main()
