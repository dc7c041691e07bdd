"""Score the warm-ups that were named against the runs that were trained.

    python -m benchmarks.rates.warmup_scores TRUTH FORECASTS

The true shortest warm-up is the shortest with which every replica trains. A name is right within a factor of
two of it; "does not help" is right where no warm-up trains in any replica. A case is at the edge, and neither
right nor wrong, where some warm-up trains in one replica and none in all. Neither is a forecast without an
answer: no warm-up was tried, or none is known to help.
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
_WORDS = "does not help"
"""Words of a forecast with which it says so."""


@dataclass(frozen=True)
class Scored:
    """A case, its true shortest warm-up (None at the edge), and the forecast's (None without an answer)."""

    name: str
    part: str
    replicas: int
    true: int | None
    said: int | None
    lowest_bare: float
    lowest_ramped: float
    trial_steps: int
    rung_steps: int

    @property
    def is_right(self) -> bool | None:
        """Whether the name is right; None for a case at the edge, and for a forecast without an answer."""
        if self.true is None or self.said is None:
            return None
        if min(self.true, self.said) <= 0:
            return self.said == self.true
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
        len({run["replica"] for run in runs}),
        shortest(runs, said["wanted"]),
        HELPS_NOT if said["words"].startswith(_WORDS) else said["warmup"],
        min((last for warmup, last in ends if warmup == 0), default=float("inf")),
        min((last for warmup, last in ends if warmup > 0), default=float("inf")),
        sum(ramp["steps"] for ramp in said["ramps"]),
        sum(rung["steps"] for rung in said["rungs"]),
    )


def table(found: Sequence[Scored]) -> str:
    """A line for each case, and the share of the answers that is right."""
    lines = []
    for each in found:
        verdict = {True: "right", False: "WRONG", None: "at the edge"}[each.is_right]
        if each.said is None:
            verdict = "no answer"
        true = {None: "at the edge", HELPS_NOT: "none helps"}.get(each.true, f"{each.true} steps")
        name = {None: "nothing", HELPS_NOT: _WORDS}.get(each.said, f"{each.said} steps")
        true += f" in {each.replicas} replicas" if each.replicas > 1 else " in 1 replica"
        losses = f"lowest loss {each.lowest_bare:.2f} without, {each.lowest_ramped:.2f} with one"
        cost = f"{each.trial_steps} steps beside the ladder's {each.rung_steps}"
        lines.append(f"{each.part} {each.name}: said {name}, true {true}: {verdict}; {losses}; {cost}")
    for part in sorted({each.part for each in found}):
        mine = [each for each in found if each.part == part]
        counted = [each for each in mine if each.is_right is not None]
        right, open_ = sum(bool(each.is_right) for each in counted), sum(each.said is None for each in mine)
        low, high = wilson(right, len(counted))
        share = f"{right} of {len(counted)} right ({100 * low:.0f} to {100 * high:.0f} %)"
        lines.append(f"{part}: {share}; {open_} without an answer")
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
