"""Fit how the best learning rate changes with width and depth, and test it on what was not fitted.

    python -m benchmarks.rates.scale_fit TRUTH [--maps PAGE] [--divergence TRUTH]

The best rate of a model at a seed is the vertex of the parabola through the lowest loss and its neighbours,
in the logarithm of the rate; beside a run that failed, it is the rate of the lowest loss. A model and seed
whose lowest loss is at an end of its rates is left out. An exponent is a slope of least squares with a
constant for each family and seed. The spread holds 9 of 10 ratios of the best rates of two sizes. The depths
of the five placements are those of the table in docs/maps.md; the grid of divergence
(`benchmarks.predictors`) tests them.
"""

import argparse
import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import ROOT, records_of
from normscope.forecast.best_rate import lowest
from normscope.forecast.scaling import DEPTH, MUP_WIDTH, WIDTH, Law

T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}
MAP_RATES = tuple(1e-4 * 300 ** (i / 6) for i in range(7))
DIVERGED = ("pre,init=gpt2", "pre,norm=rmsnorm,init=gpt2", "deepnorm")
"""Models of the grid of divergence whose depth has a law."""
OWN_CELLS = 5
"""Cells of a map's row that a seed needs; the two smallest rates, where runs are slow, may be seed 0's."""
_ROW = re.compile(r"^\| ([a-z-]+) \| (\d+) \|((?:[^|\n]+\|){7})[^|\n]+\|$", re.MULTILINE)
LEARNT = -0.1
"""Nats above the unigram entropy under which a run trains."""

MOST = 8
"""Largest ratio of two sizes that are compared."""

Best = Mapping[tuple[str, int, int], float]
"""Family, seed and size → log₂ of the best rate."""
Found = Mapping[tuple[str, int, int], float | None]
"""The same, None where the best rate is not known."""


@dataclass(frozen=True)
class Pair:
    """Two sizes of one family and seed: log₂ of the ratio of the sizes, and of that of the best rates."""

    family: str
    seed: int
    octaves: float
    change: float


def best_of(runs: Iterable[tuple[float, float | None]]) -> float | None:
    """log₂ of the best rate of (rate, loss); None where the lowest loss is at an end, or all runs failed.

    A run that failed, whose loss is None, is a neighbour whose loss is too high.
    """
    points = sorted((math.log2(rate), math.inf if loss is None else loss) for rate, loss in runs)
    rates, losses = [x for x, _ in points], [y for _, y in points]
    place = losses.index(min(losses)) if points else 0
    if place in (0, len(points) - 1) or not math.isfinite(losses[place]):
        return None
    return lowest(rates, losses) if all(map(math.isfinite, losses[place - 1 : place + 2])) else rates[place]


def known(found: Found) -> Best:
    """The best rates that are known."""
    return {key: rate for key, rate in found.items() if rate is not None}


def pairs(best: Best) -> list[Pair]:
    """All pairs of sizes up to `MOST` times apart."""
    found = []
    for (family, seed, small), (other, also, large) in itertools.permutations(best, 2):
        if (family, seed) == (other, also) and small < large <= MOST * small:
            change = best[other, also, large] - best[family, seed, small]
            found.append(Pair(family, seed, math.log2(large / small), change))
    return found


def exponent(best: Best) -> tuple[float, float]:
    """The exponent by least squares, a constant for each family and seed, and half of its 95 % interval."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for (family, seed, size), rate in best.items():
        groups[family, seed].append((math.log2(size), rate))
    points = [point for group in groups.values() for point in _centred(group)]
    square = sum(x * x for x, _ in points)
    slope = sum(x * y for x, y in points) / square
    free = len(points) - len(groups) - 1
    if free < 1:
        return slope, math.nan
    error = math.sqrt(sum((y - slope * x) ** 2 for x, y in points) / free / square)
    return slope, T_95.get(free, 2.2 if free < 16 else 2.0) * error


def _centred(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    x, y = (statistics.fmean(each) for each in zip(*points, strict=True))
    return [(a - x, b - y) for a, b in points]


def spread(found: Sequence[Pair], slope: float) -> float:
    """The factor within which 9 of 10 ratios are of the law."""
    off = sorted(abs(pair.change - slope * pair.octaves) for pair in found)
    return float(2.0 ** off[min(len(off) - 1, math.ceil(0.9 * len(off)) - 1)])


def of_runs(rows: Sequence[dict[str, Any]], parametrisation: str, part: str) -> Found:
    """The best rates of a part by width."""
    groups: dict[tuple[str, int, int], list[tuple[float, float | None]]] = defaultdict(list)
    for row in rows:
        if (row["part"], row["parametrisation"]) == (part, parametrisation):
            groups[row["family"], row["seed"], row["width"]].append((row["lr"], row["last"]))
    return {key: best_of(group) for key, group in groups.items()}


def of_map(page: str, schemes: Sequence[str]) -> Found:
    """The best rates by depth of the first section of docs/maps.md, without depths at which none trains."""
    found: dict[tuple[str, int, int], float | None] = {}
    for scheme, depth, cells in _ROW.findall(page.split("### ")[0]):
        texts = [cell.replace("−", "-").replace("*", "").split() for cell in cells.split("|")[:7]]
        for seed in range(2):
            if sum(seed < len(text) for text in texts) < OWN_CELLS:
                continue
            losses = [float(text[seed if seed < len(text) else 0]) for text in texts]
            runs = list(zip(MAP_RATES, losses, strict=True))
            if scheme in schemes and any(loss <= LEARNT for _, loss in runs):
                found[scheme, seed, int(depth)] = best_of(runs)
    return found


def of_divergence(rows: Sequence[dict[str, Any]]) -> Found:
    """The best rates of `DIVERGED` by depth, on text, in benchmarks/predictors/divergence_truth.jsonl."""
    groups: dict[tuple[str, int, int], list[tuple[float, float | None]]] = defaultdict(list)
    for row in rows:
        family, depth, text = row["case"].removeprefix("divergence: ").rsplit(" ", 2)
        if text == "text" and family in DIVERGED:
            groups[family, row["replica"], int(depth)].append((row["lr"], row["last"]))
    return {key: best_of(group) for key, group in groups.items()}


def line(name: str, rates: Found, law: Law | None) -> str:
    """The figures of one exponent, and how often the package's law is right within a factor of two."""
    best = known(rates)
    left_out = f"{len(rates) - len(best)} of {len(rates)} sizes × seeds left out"
    if not (found := pairs(best)):
        return f"{name}: no pair of sizes; {left_out}"
    slope, half = exponent(best)
    families = len({(pair.family, pair.seed) for pair in found})
    words = f"{name}: exponent {slope:+.2f} ± {half:.2f} ({len(found)} pairs, {families} families × seeds), "
    words += f"spread ×{spread(found, slope):.2f}"
    if law is not None:
        near = sum(abs(pair.change - law.exponent * pair.octaves) <= 1 for pair in found)
        words += f"; law {law.exponent:+.2f}: {near} of {len(found)} within ×2, "
        words += f"spread ×{spread(found, law.exponent):.2f}"
    return f"{words}; {left_out}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("--maps", type=Path, default=ROOT / "docs" / "maps.md")
    kept = ROOT / "benchmarks" / "predictors" / "divergence_truth.jsonl"
    parser.add_argument("--divergence", type=Path, default=kept)
    options = parser.parse_args()
    rows, page = records_of(options.truth), options.maps.read_text()
    for part in ("seen", "held-out"):
        print(line(f"width, standard, {part}", of_runs(rows, "standard", part), WIDTH["pre"]))
        print(line(f"width, μP, {part}", of_runs(rows, "mup", part), MUP_WIDTH["pre"]))
    for scheme in ("pre", "deepnorm", "post", "peri", "res-post"):
        print(line(f"depth, {scheme}", of_map(page, [scheme]), DEPTH.get(scheme)))
    diverged = of_divergence(records_of(options.divergence))
    print(line("depth, held-out", diverged, DEPTH["pre"]))
    for part, parametrisation in itertools.product(("seen", "held-out"), ("standard", "mup")):
        for (family, seed, width), best in sorted(known(of_runs(rows, parametrisation, part)).items()):
            print(f"  {family} {width} seed {seed}: {2**best:.2g}")


if __name__ == "__main__":
    main()
