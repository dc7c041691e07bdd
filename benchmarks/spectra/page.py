"""The measurements in docs/spectra.md: its tables and its picture.

    pip install -c constraints.txt -e ".[docs]"
    python -m benchmarks.spectra.page            # bench, growth and picture: about 20 minutes on 2 cores
    python -m benchmarks.spectra.page bench      # only the first table
    python -m benchmarks.spectra.page growth     # the second and the picture

The results, with the date and the load of the machine, replace the text between the markers of
docs/spectra.md.
"""

import argparse
import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.spectra.bench import bench_spectra
from benchmarks.spectra.cost import BASE, SIZES, Point, exponent, points

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "spectra.md", DOCS / "images" / "spectra-cost.png"
BLUE = "#1f5fa8"
AXES = {"width": "width d", "depth": "blocks L", "length": "tokens T"}


def circumstances(load_before: float) -> str:
    """Date and machine of the run, on one line."""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()}-core {platform.machine()} CPU, "
        f"torch threads: {torch.get_num_threads()}, torch {torch.__version__.split('+')[0]} (CPU), "
        f"load {load_before:.1f} before the run."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put(name: str, text: str) -> None:
    """Replace the text between the page's markers of that name."""
    page = PAGE.read_text(encoding="utf-8")
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert marked.search(page), f"{PAGE} has no marker {name}"
    PAGE.write_text(marked.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page), encoding="utf-8")


def bench() -> None:
    """Write the first table."""
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = bench_spectra()
    text = table(["what", "figure", "target", "measured"], [[str(v) for v in row.values()] for row in rows])
    put("bench", f"{text}\n\n{circumstances(load)}")


def growth() -> None:
    """Write the second table and the picture."""
    load, found = os.getloadavg()[0], list(points())
    along = {axis: [point for name, point in found if name == axis] for axis in SIZES}
    rows = [_growth_row(axis, each) for axis, each in along.items()]
    head = ["along", "sizes", "seconds", "exponent", "in forwards", "products"]
    put("growth", f"{table(head, rows)}\n\n{circumstances(load)}")
    draw(along)


def _growth_row(axis: str, each: Sequence[Point]) -> list[str]:
    slope, half = exponent([getattr(p, axis) for p in each], [p.seconds for p in each])
    return [
        AXES[axis],
        ", ".join(str(getattr(p, axis)) for p in each),
        ", ".join(f"{p.seconds:.2g}" for p in each),
        f"{slope:.2f} ± {half:.2f}",
        ", ".join(f"{p.forwards:.0f}" for p in each),
        ", ".join(f"{p.products:.0f}" for p in each),
    ]


def draw(along: dict[str, list[Point]]) -> None:
    """Seconds and forwards along each axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
    for axis, (name, each) in zip(axes, along.items(), strict=True):
        sizes, spent = [getattr(p, name) for p in each], [p.seconds for p in each]
        slope, half = exponent(sizes, spent)
        factor = np.exp(np.mean(np.log(spent) - slope * np.log(sizes)))
        axis.loglog(sizes, spent, "o", color=BLUE)
        axis.loglog(sizes, factor * np.array(sizes, float) ** slope, color=BLUE, alpha=0.5)
        axis.set_xticks(sizes, [str(s) for s in sizes])
        axis.minorticks_off()
        others = ", ".join(f"{key} {value}" for key, value in BASE.items() if key != name)
        axis.set_title(f"exponent {slope:.2f} ± {half:.2f}\n{others}", fontsize=9)
        axis.set_xlabel(AXES[name])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("processor seconds, σ_max to 1 %")
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["all", "bench", "growth"], default="all")
    what = parser.parse_args().what
    if what in ("all", "bench"):
        bench()
    if what in ("all", "growth"):
        growth()


if __name__ == "__main__":
    main()
