"""Score every predictor on the ladders of a truth file, and print the table.

    python -m benchmarks.predictors FILE [--part set-on|held-out|last|all] [--only WORD] [--predictor NAME …]

FILE is a truth file of the regimes or of `divergence` (.jsonl), or benchmarks/forecast/truth.json. Scores
are kept beside it, one line of JSON for each ladder and predictor, so that an interrupted command is
continued; `--table` only prints. Ladders that are held out are only scored if they are asked for.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.predictors.catalogue import CHEAP, PREDICTORS
from benchmarks.predictors.cells import Ladder, read
from benchmarks.predictors.divergence import CRITERIA, PARTS
from benchmarks.predictors.of_normscope import REFINED, RISK
from benchmarks.predictors.scoring import difference, line, scored_cells, table
from benchmarks.predictors.setting import Cost, NotMeasuredError, Prediction, Setting
from benchmarks.process import records_of


def measured(ladder: str, name: str, setting: Setting) -> dict[str, Any]:
    """The row of one predictor on one ladder; an error of the model's is its reason."""
    started = time.process_time()
    row: dict[str, Any] = {"case": ladder, "predictor": name, "rates": setting.rates}
    try:
        found = PREDICTORS[name](setting)
    except (NotMeasuredError, RuntimeError, ValueError, FloatingPointError) as error:
        return row | {"not measured": f"{type(error).__name__}: {error}"[:300]}
    seconds = round(time.process_time() - started, 2)
    return row | {"seconds": seconds, "predictions": [_as_json(prediction) for prediction in found]}


def _as_json(prediction: Prediction) -> dict[str, Any]:
    if not all(map(math.isfinite, prediction.scores)):
        raise FloatingPointError(f"{prediction.name}: a score is not finite")
    return vars(prediction) | {"cost": vars(prediction.cost)}


def _prediction(row: dict[str, Any]) -> Prediction:
    return Prediction(**row | {"scores": tuple(row["scores"]), "cost": Cost(**row["cost"])})


def compared(ladders: list[Ladder], rows: list[dict[str, Any]]) -> str:
    """The table, and the reasons for what was not measured."""
    by_name = {ladder.name: ladder for ladder in ladders}
    pairs: dict[str, list[tuple[Ladder, Prediction]]] = defaultdict(list)
    missing: dict[str, list[str]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        ladder = by_name.get(row["case"])
        if ladder is None or row["rates"] != [cell.lr for cell in ladder.cells]:
            continue
        if "not measured" in row:
            missing[row["predictor"]].append(f"{row['case']}: {row['not measured']}")
            continue
        seconds[row["predictor"]].append(row["seconds"])
        for prediction in map(_prediction, row["predictions"]):
            pairs[prediction.name].append((ladder, prediction))
    parts = [table([line(name, found) for name, found in pairs.items()])]
    parts += differences(pairs)
    parts += [f"{name}: {sum(s) / len(s):.2f} s a ladder (processor time)" for name, s in seconds.items()]
    parts += [f"not measured, {name}: {len(why)} ladders; {why[0]}" for name, why in missing.items()]
    return "\n".join(parts)


def differences(pairs: Mapping[str, Sequence[tuple[Ladder, Prediction]]]) -> list[str]:
    """Each of normscope's risks of divergence minus each range test, a line for each pair."""
    lines = []
    for name in pairs:
        for ours in (RISK, REFINED):
            if name.startswith("range test") and ours in pairs:
                found = difference(scored_cells(pairs[ours]), scored_cells(pairs[name]))
                value, low, high = (f"{figure:+.3f}" for figure in found)
                lines.append(f"{ours} minus {name}: {value} (paired, 95 % interval {low} to {high})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="truth file")
    parser.add_argument("--scores", type=Path, help="file of the scores; by default beside the truth")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="set-on")
    parser.add_argument("--only", default="", help="part of the names of ladders")
    parser.add_argument("--predictor", choices=PREDICTORS, action="append", default=[])
    parser.add_argument("--cheap", action="store_true", help="only predictors without a training step")
    parser.add_argument("--criterion", choices=CRITERIA, default="start", help="of the grid of divergence")
    parser.add_argument("--table", action="store_true", help="compute nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ladders = [
        ladder
        for ladder in read(options.file, options.criterion)
        if options.only in ladder.name and options.part in ("all", ladder.part)
    ]
    path = options.scores or options.file.with_suffix(".scores.jsonl")
    cheap = [each.__name__ for each in CHEAP]
    names = options.predictor or (cheap if options.cheap else list(PREDICTORS))
    known = {(row["case"], row["predictor"], tuple(row["rates"])) for row in records_of(path)}
    for ladder in () if options.table else ladders:
        rates = tuple(cell.lr for cell in ladder.cells)
        todo = [name for name in names if (ladder.name, name, rates) not in known]
        setting = ladder.make() if todo else None
        for name in todo:
            assert setting is not None
            row = measured(ladder.name, name, setting)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(ladder.name, name, row.get("seconds", row.get("not measured")), flush=True)
    print(compared(ladders, records_of(path)))


if __name__ == "__main__":
    main()
