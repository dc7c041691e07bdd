"""Make the ladders on which the forecast's rule was tuned, and the truth on which it is tested.

    python -m benchmarks.forecast.grid truth                                  # the held-out grid, kept
    python -m benchmarks.forecast.grid tuning --text FILE --output tuning.jsonl
    python -m benchmarks.forecast.grid table tuning.jsonl

`truth` trains the cells of cells.py that are not kept yet. `tuning` forecasts and trains the ladders
on which the rule was tuned; their accuracy is not evidence. Both continue an interrupted run.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.forecast import cells as forecast_cells
from benchmarks.forecast.cells import LADDERS, RATES, SEEN, Ladder, train
from normscope.anatomy import read_anatomy
from normscope.forecast import forecast_ladder
from normscope.train import Recipe

LOW = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
HIGH = (4e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2)
ALL = (1e-4, *HIGH)


def _ours(scheme: str, depth: int, width: int = 32, heads: int = 2, init: str | None = None) -> str:
    spec = f"nn:decoder,scheme={scheme},depth={depth},width={width},heads={heads}"
    return spec if init is None else f"{spec},init={init}"


TUNING: tuple[tuple[str, str, int, bool, tuple[float, ...]], ...] = (
    (_ours("post", 12, 64, 4), "adam", 1, False, LOW),
    (_ours("pre", 8, 64, 4), "adamw", 2, False, LOW),
    (_ours("deepnorm", 16, 32, 4), "adamw", 3, True, LOW),
    (_ours("post", 6, 32, 4), "adamw", 4, True, LOW),
    (_ours("peri,entry_norm=false", 8), "adam", 5, False, LOW),
    (_ours("post", 12, init="normal"), "adamw", 6, False, LOW),
    (
        _ours("deepnorm", 8, 64, 4),
        "adam",
        7,
        False,
        (3e-5, 1e-4, 3e-4, 7e-4, 1.5e-3, 3e-3, 6e-3, 1.5e-2, 3e-2),
    ),
    (_ours("pre-no-final", 6, init="torch"), "adamw", 11, False, ALL),
    (_ours("post", 8, init="torch"), "adam", 9, True, ALL),
    (_ours("deepnorm", 12), "adamw", 12, False, ALL),
    (_ours("pre", 6, init="xavier"), "adam", 8, True, ALL),
    (_ours("post", 5, 64, 4), "adam", 18, False, HIGH),
    (_ours("residual-no-norm", 6), "adamw", 14, True, HIGH),
    (_ours("sub-ln", 8), "adamw", 16, True, HIGH),
    (_ours("keel", 6), "adamw", 21, False, HIGH),
    (_ours("rezero", 6), "adamw", 10, False, HIGH),
    (_ours("ngpt", 4), "adamw", 19, False, HIGH),
    (_ours("post", 8, init="normal"), "adam", 23, True, ALL),
    (_ours("pre", 12), "adamw", 22, False, HIGH),
    (_ours("mix-ln", 8), "adam", 15, False, HIGH),
    (_ours("hyper-connections", 4), "adamw", 20, True, HIGH),
)
"""Model, optimiser, seed, whether on the other text (tinyshakespeare), rates."""


def truth() -> None:
    """Train the cells that are not kept, ladder by ladder."""
    cells = forecast_cells.kept()
    for ladder in LADDERS:
        todo = [rate for rate in RATES if forecast_cells.name(ladder, rate) not in cells]
        for cell in train(ladder, todo) if todo else ():
            cells[forecast_cells.name(ladder, cell.lr)] = forecast_cells.row(cell)
        forecast_cells.keep(cells)
        print(ladder.model, [cells[forecast_cells.name(ladder, rate)]["gap"] for rate in RATES], flush=True)


def tuned(text: Path) -> Iterator[tuple[Ladder, tuple[float, ...]]]:
    """The ladders on which the rule was tuned, with their learning rates."""
    for model, optimizer, seed, other, rates in TUNING:
        yield Ladder(model, optimizer, seed, text=(lambda: text) if other else None), rates
    for ladder in SEEN:
        yield ladder, RATES


def tuning(text: Path, output: Path) -> None:
    """Forecast and train the ladders on which the rule was tuned."""
    known = (
        {json.loads(line)["model"] for line in output.read_text().splitlines()} if output.exists() else set()
    )
    for ladder, rates in tuned(text):
        if ladder.model in known:
            continue
        subject = ladder.subject()
        config = Recipe(optimizer=ladder.optimizer, seed=ladder.seed, lr=rates[0])
        said = forecast_ladder(subject, read_anatomy(subject), config, rates)
        cells = train(ladder, rates)
        row = {
            "model": ladder.model,
            "said": [{"lr": r.lr, "outcome": r.outcome, "score": r.score} for r in said.rungs],
            "truth": [forecast_cells.row(cell) for cell in cells],
        }
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(table([row]), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Counts of forecast outcomes against training results, as text."""
    pairs = [
        (s["outcome"], t["trains"]) for row in rows for s, t in zip(row["said"], row["truth"], strict=True)
    ]
    right = sum((outcome == "trains") == trained for outcome, trained in pairs)
    counts = Counter(pairs)
    lines = [f"{rows[0]['model'] if len(rows) == 1 else 'all'}: {right} of {len(pairs)} right"]
    for outcome in sorted({outcome for outcome, _ in counts}):
        lines.append(f"  {outcome}: {counts[outcome, True]} trained, {counts[outcome, False]} did not")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("truth")
    runs = commands.add_parser("tuning")
    runs.add_argument("--text", type=Path, required=True)
    runs.add_argument("--output", type=Path, required=True)
    commands.add_parser("table").add_argument("runs", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "truth":
        truth()
    elif options.command == "tuning":
        tuning(options.text, options.output)
    else:
        print(table([json.loads(line) for line in options.runs.read_text().splitlines()]))


if __name__ == "__main__":
    main()
