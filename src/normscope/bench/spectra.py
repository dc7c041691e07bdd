"""`normscope bench spectra`: what singular values of a Jacobian cost, with us and without.

The map is GPT-2-small's stack (Hugging Face, random weights, float32, math attention) on one sequence of 128
tokens, from the embedding's output to the last block's. A forward-equivalent is a plain forward of that
stack, timed before and after each run; times are the processor's, so that others on the machine do not count,
and the clock's stand beside them. The runs are in turns, a start each round, and the figures are medians
over the rounds. "With hindsight" means: stopped by the true error, which no user knows.
"""

import statistics
from typing import Any

from normscope.bench.process import in_fresh_process

Row = dict[str, Any]
_PARTS = "normscope.bench.spectra_parts"
OURS = "ours, 90 % sure"
_RIVAL = "curvlinops, svds(k=1, tol=0.01)"


def bench_spectra() -> list[Row]:
    """Rows of figure and target, each part from a fresh process."""
    rows = []
    for part, make_rows in (
        ("sigma", sigma_rows),
        ("dense", dense_rows),
        ("log-sigma", log_sigma_rows),
        ("batched", batched_rows),
        ("inverse", inverse_rows),
    ):
        rows += make_rows(in_fresh_process(_PARTS, part))
    return rows


def sigma_rows(measured: dict[str, Any]) -> list[Row]:
    """σ_max by everyone, ours against curvlinops, and the top 20."""
    missing = [row["missing"] for row in measured["rows"] if "missing" in row]
    runs = [row for row in measured["rows"] if "missing" not in row]
    names = list(dict.fromkeys(row["name"] for row in runs))
    rows = [_rival_row(name, runs, measured) for name in names]
    if missing:
        rows.append(_row("curvlinops", "not measured", "", missing[0]))
    else:
        rows.append(_ratio_row(runs, _RIVAL, "≥ 8"))
        rows += [
            _ratio_row(runs, name, "–") for name in names if name.startswith("curvlinops") and name != _RIVAL
        ]
    top = measured["top"]
    how = f"{top['status']}, true error {top['error']:.1e}, known to {top['truth_error']:.1e}"
    return [*rows, _row("20 largest to 1 %: products", str(top["products"]), "≤ 100", how)]


def _rival_row(name: str, runs: list[Row], measured: dict[str, Any]) -> Row:
    mine = [row for row in runs if row["name"] == name]
    forwards = [row["cpu_s"] / row["forward_cpu_s"] for row in mine]
    by_clock = statistics.median(row["seconds"] / row["forward_s"] for row in mine)
    products = sorted({row["products"] for row in mine})
    how = (
        f"{min(forwards):.1f} to {max(forwards):.1f} over {len(mine)} starts; {_range(products)} products; "
        f"{_median(mine, 'cpu_s'):.2f} s, forward {1e3 * _median(mine, 'forward_cpu_s'):.0f} ms; "
        f"by the clock {by_clock:.1f}; "
        f"true error ≤ {max(row['error'] for row in mine):.0e}; "
        f"{measured['threads']} threads, {measured['allocator']}"
    )
    target = "≤ 20" if name == OURS else "–"
    return _row(
        f"σ_max to 1 %, {name}: forward-equivalents", f"{statistics.median(forwards):.1f}", target, how
    )


def _ratio_row(runs: list[Row], rival: str, target: str) -> Row:
    """Their time in ours, round by round."""
    ours, theirs = ([row["cpu_s"] for row in runs if row["name"] == name] for name in (OURS, rival))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    how = f"{min(ratios):.1f} to {max(ratios):.1f} over {len(ratios)} rounds"
    return _row(f"σ_max to 1 %, {rival}: in times {OURS}", f"{statistics.median(ratios):.1f}", target, how)


def dense_rows(measured: dict[str, Any]) -> list[Row]:
    """The whole Jacobian against ours, where it can be had."""
    ours, theirs = (
        _median([row for row in measured["rows"] if row["name"] == name], "cpu_s")
        for name in ("ours", "jacrev")
    )
    how = (
        f"T = {measured['tokens']}, n = {measured['n']}: {theirs:.2f} s against {ours:.2f} s; at T = 128 the "
        "Jacobian takes 36 GiB: not measured"
    )
    return [_row("torch.func.jacrev and SVD, in times ours", f"{theirs / ours:.1f}", "–", how)]


def log_sigma_rows(measured: dict[str, Any]) -> list[Row]:
    """Errors of log σ of a thousand factors."""
    return [
        _row(
            f"log σ of 1000 {name}: largest error in nats",
            f"{found['error']:.0e}",
            "≤ 1e-9",
            f"{found['status']}, stated {found['stated']:.0e}; log σ from {found['range'][0]:.0f} to "
            f"{found['range'][1]:.0f}; the plain float64 product errs by {found['plain']:.0e}",
        )
        for name, found in measured.items()
    ]


def batched_rows(measured: dict[str, Any]) -> list[Row]:
    """Products in a batch against products one by one."""
    each = measured["seconds"]
    return [
        _row(
            f"1000 layers, d = 64: {product} one by one, in times a batch's",
            f"{each[f'{product} one by one'] / each[f'{product} in a batch']:.1f}",
            "≥ 4",
            f"{1e3 * each[f'{product} one by one']:.1f} ms a vector against "
            f"{1e3 * each[f'{product} in a batch']:.1f} ms, {measured['vectors']} vectors, "
            f"T = {measured['tokens']}; they differ by {measured['gap']:.0e}",
        )
        for product in ("Jv", "Jᵀu")
    ]


def inverse_rows(measured: dict[str, Any]) -> list[Row]:
    """σ_min by solves with the layers, and by a long process on J."""
    rows = []
    for name, found in (("layer-wise inverse", measured["layers"]), ("Golub–Kahan", measured["plain"])):
        how = (
            f"κ = {measured['condition']:.1e}, n = {measured['n']}, float64; {found['status']}, stated error "
            f"{found['stated']:.1g}, true {found['error']:.1g}"
        )
        rows.append(_row(f"σ_min to 5 %, {name}: products", f"{found['products']:.0f}", "–", how))
    return rows


def _median(runs: list[Row], figure: str) -> float:
    return statistics.median(run[figure] for run in runs)


def _range(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _row(what: str, figure: str, target: str, how: str) -> Row:
    return {"what": what, "figure": figure, "target": target, "how": how}
