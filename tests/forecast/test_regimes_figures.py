"""The figures of the forecast in README and docs are those of the kept forecasts and runs."""

import functools
from pathlib import Path
from typing import Any

import pytest

from benchmarks.process import records_of
from benchmarks.regimes.best_rates import named
from benchmarks.regimes.judged import judge, of_parts
from benchmarks.regimes.scores import figures, ladders
from benchmarks.regimes.truth import REPLICAS

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks/regimes"
SETS = {"final": "final", "confirm": "confirming", "confirm-2": "second", "confirm-3": "third"}

DATA = {
    "tokens": "subword tokens (256 to 8192)",
    "experts and state spaces": "mixtures of experts and state spaces",
    "masked": "masked language models",
    "series": "series",
    "pairs": "pairs",
    "vision": "images",
    "bfloat16": "bfloat16",
}


@functools.cache
def counted(parts: tuple[str, ...], regime: str = "") -> dict[str, Any]:
    """The figures of the ladders of some parts, and of their rates to use."""
    forecasts = judge(of_parts(records_of(KEPT / "forecasts.jsonl"), parts))
    found, _ = ladders(records_of(KEPT / "truth.jsonl"), forecasts, REPLICAS)
    found = [each for each in found if regime in ("", each.regime)]
    rates = [each for each in map(named, found) if each.trains]
    near = sum(each.is_right for each in rates)
    return figures(found) | {"near": near, "named": len(rates)}


@pytest.mark.parametrize("part", SETS)
def test_the_row_of_a_set_is_what_the_scores_are(part: str) -> None:
    f = counted((part,))
    row = (
        f"| {SETS[part]} | {f['ladders']} | {f['largest rates']} | {f['near']} of {f['named']} "
        f"| {f['right']} of {f['cells']} | {f['sure and right']} of {f['sure']} "
        f"| {f['edge cells']}, {f['sure at the edge']} ({f['expected at the edge']:.1f}) |"
    )
    assert row in (ROOT / "docs/forecast-evidence.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("regime", DATA)
def test_the_row_of_a_kind_of_data_is_what_the_scores_are(regime: str) -> None:
    f = counted(tuple(SETS), regime)
    still_open = f", {f['open']} open" if f["open"] else ""
    row = (
        f" | {f['ladders']} | {f['largest rates']} | {f['near']} of {f['named']} "
        f"| {f['right']} of {f['cells']}{still_open} | {f['sure and right']} of {f['sure']} "
        f"| {f['edge cells']}, {f['sure at the edge']} |"
    )
    assert f"| {DATA[regime]}{row}" in (ROOT / "docs/forecast-evidence.md").read_text(encoding="utf-8")
    row = f"{f['largest rates']} of {f['ladders']} | {f['near']} of {f['named']} |"
    summary = (ROOT / "docs/forecast.md").read_text(encoding="utf-8").split("## By kind of data")[1]
    (line,) = (line for line in summary.splitlines() if line.startswith(f"| {DATA[regime].split(' (')[0]}"))
    assert line.endswith(row)


def test_the_readme_has_the_figures_of_all_sets() -> None:
    f = counted(tuple(SETS))
    said = (
        f"largest learning rate within ×1.5 on {f['largest rates']} of {f['ladders']} ladders fixed "
        f"beforehand, rate to use within ×2 on {f['near']} of {f['named']}, sure cells right "
        f"{f['sure and right']}/{f['sure']}"
    )
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")
