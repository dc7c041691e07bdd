"""Look for false alarms of the wiring findings (NS7xx) on models that are wired correctly.

    python -m benchmarks.wiring > docs/wiring-thresholds.md       (about ten minutes on one core)
    python -m benchmarks.wiring --only gpt2,post --seed 7

Every scheme of normscope as decoder, the catalogue's other models, the demo's models, and the tiny
configurations of Hugging Face types in tests/anatomy/hf_models.py, all with random weights and no training
step.
"""

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from normscope.anatomy import read_anatomy
from normscope.demo.examples import post_ln, pre_ln
from normscope.errors import UsageError
from normscope.nn import SCHEMES
from normscope.probes import Measurements, measure_gradient, measure_wiring
from normscope.rules import Case, Finding, judge
from normscope.subjects import Subject, load, make_subject

SIZES = "depth=4,width=32,heads=4"
LENGTH = 32


def ours() -> Iterator[tuple[str, Callable[[int], Subject]]]:
    """Every scheme as decoder, and each other kind of model under Pre-LN and Post-LN."""
    specs = [f"nn:decoder,{SIZES},scheme={name}" for name in SCHEMES]
    specs += [
        f"nn:{kind},{SIZES},scheme={name}"
        for kind in ("encoder", "encoder-decoder", "vision")
        for name in ("pre", "post")
    ]
    for spec in specs:
        yield spec.removeprefix("nn:"), loader(spec)
    for name, build in (("demo, Post-LN", post_ln), ("demo, Pre-LN", pre_ln)):
        yield name, partial(seeded_module, build, name)


def published() -> Iterator[tuple[str, Callable[[int], Subject]]]:
    """The Hugging Face types, by name."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "anatomy"))
    models = importlib.import_module("hf_models").MODELS  # the tests' tiny configurations
    for model in models:
        known = AutoConfig.for_model(model.model_type).to_dict()
        options = "".join(f",{k}={json.dumps(v)}" for k, v in model.options.items() if k in known)
        yield f"hf:{model.name}", loader(f"hf:{model.model_type}{options}")


def loader(spec: str) -> Callable[[int], Subject]:
    """A function from a seed to the subject of a spec."""
    return lambda seed: load(spec, seed=seed, seq_len=LENGTH)


def seeded_module(build: Callable[[], torch.nn.Module], name: str, seed: int) -> Subject:
    """The subject of a module that is built with a seed."""
    torch.manual_seed(seed)
    return make_subject(build(), seed=seed, spec=name)


def measured(subject: Subject) -> tuple[Measurements, list[Finding]]:
    """The figures that the rules read, and what NS7xx finds."""
    anatomy = read_anatomy(subject)
    table = Measurements([*measure_gradient(subject, anatomy), *measure_wiring(subject, anatomy)])
    found = judge(Case(anatomy, table).anatomy, table, None)
    return table, [finding for finding in found if finding.code.startswith("NS7")]


COLUMNS = {
    "later tokens (701)": "wiring/later-tokens",
    "own targets (701)": "wiring/own-targets",
    "other samples (702)": "wiring/other-samples",
    "first loss, nats (708)": "wiring/first-loss",
    "ln V, nats (708)": "wiring/guess",
    "odd weights (709)": "wiring/odd-weights",
    "targets: next input (712)": "wiring/targets-next",
    "targets: same input (712)": "wiring/targets-same",
}


def cell(table: Measurements, quantity: str) -> str:
    """The largest value of a quantity; a dash where none was measured."""
    values = table.of(quantity).values()
    return f"{max(values):.3g}" if values else "–"


HEAD = """\
# Wiring findings on healthy models

The thresholds of NS701 to NS713 come from theory and were fixed before any model was measured. This page
counts their false alarms on models that are wired correctly. Setting: random weights, seed {seed}, {length}
tokens, tiny configurations, no training step, one thread of a CPU. No GPU was measured.

Written by `python -m benchmarks.wiring > docs/wiring-thresholds.md`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="parts of model names, with commas: gpt2,post")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--brief", action="store_true", help="print only findings and failures")
    arguments = parser.parse_args()
    only = [word for word in arguments.only.split(",") if word]
    rows, counts, tried, left_out = [], {"note": 0, "warning": 0, "error": 0}, 0, []
    for name, make in [*ours(), *published()]:
        if only and not any(word in name for word in only):
            continue
        try:
            table, found = measured(make(arguments.seed))
        except UsageError as error:
            left_out.append(f"{name}: {' '.join(str(error).split())[:160]}")
            continue
        except Exception:
            traceback.print_exc()
            left_out.append(f"{name}: fails")
            continue
        tried += 1
        for finding in found:
            counts[finding.severity.value] += 1
        reasons = [m for m in table if m.quantity.startswith("wiring/") and not m.measured]
        if arguments.brief:
            for finding in found:
                print(name, finding.code, finding.severity, finding.message, finding.sites[:3], flush=True)
            for row in reasons:
                if "refuses" in row.how or "fail" in row.how:
                    print("   ", name, row.quantity, row.how, flush=True)
        codes = ", ".join(f"{f.code} {f.severity}" for f in found) or "none"
        cells = " | ".join(cell(table, quantity) for quantity in COLUMNS.values())
        rows.append(f"| {name} | {cells} | {codes} |")
    if arguments.brief:
        print(tried, counts, *left_out, sep="\n")
        return
    print(HEAD.format(seed=arguments.seed, length=LENGTH))
    alarms = ", ".join(f"{counts[each]} {each}s" for each in ("error", "warning", "note"))
    print(f"\n**{tried} models: {alarms}.**\n")
    print("| model |", " | ".join(COLUMNS), "| findings |")
    print("|---|", "---|" * (len(COLUMNS) + 1), sep="")
    print(*rows, sep="\n")
    for line in left_out:
        print(f"\nNot measured: {line}")


if __name__ == "__main__":
    main()
