"""`normscope bench spectra`: cost of a Jacobian's singular values, with normscope and with alternatives.

The map is GPT-2-small's stack (Hugging Face, random weights, float32, math attention) on one sequence of 128
tokens, from the embedding's output to the last block's. A forward-equivalent is a plain forward of that
stack, timed before and after each run. Times are processor times, which other processes do not affect;
wall-clock times are also given. The methods take turns, each round has another start, and figures are medians
over the rounds. "With hindsight" means stopped by the true error, which a user does not know.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.process import Row, circumstances, in_fresh_process, median_ms, row
from benchmarks.spectra.deep import batched, inverse, log_sigma
from benchmarks.spectra.rivals import (
    NCV,
    TOL,
    TOLERANCE,
    Found,
    curvlinops_operator,
    jacrev_svd,
    lobpcg,
    lobpcg_steps,
    our_operator,
    ours,
    ours_with_hindsight,
    power_iteration,
    svds,
)
from benchmarks.spectra.stack import MODEL, TOKENS, Map, between, gpt2_stack
from normscope.linalg import JacobianOperator, TopSingular, top_singular
from normscope.linalg.golub_kahan import CONFIDENCE

OURS = "ours, 90 % sure"
_RIVAL = "curvlinops, svds(k=1, tol=0.01)"
NUM_TOP = 20
ROUNDS = 3
FORWARDS_EACH_TIME = 3
DENSE_TOKENS = 2
"""Tokens for which `jacrev` is affordable: at 128 the Jacobian of the stack takes 36 GiB."""


def bench_spectra() -> list[Row]:
    """Rows with figures and targets, each part from a new process."""
    return [
        *sigma_rows(in_fresh_process(sigma)),
        *dense_rows(in_fresh_process(dense)),
        *log_sigma_rows(in_fresh_process(log_sigma)),
        *batched_rows(in_fresh_process(batched)),
        *inverse_rows(in_fresh_process(inverse)),
    ]


def sigma(rounds: int = ROUNDS, model: str = MODEL, tokens: int = TOKENS) -> dict[str, Any]:
    """σ_max of the stack by all methods in turns, each between plain forwards and from a new start."""
    with gpt2_stack(model, tokens) as (f, x):
        # Reference: the largest values from a long run, ten times more accurate than the others' tolerance.
        num_top = min(NUM_TOP, x.numel())
        truth = top_singular(JacobianOperator(f, x), num_top, tol=TOLERANCE / 10, max_products=400)
        reference = float(truth.values[0])
        spent = [
            {"name": name, **_timed(rival, f, x, reference)}
            for seed in range(rounds)
            for name, rival in _rivals(f, x, seed, reference).items()
        ]
        return {"rows": spent, "top": _top(f, x, truth), **circumstances()}


def _rivals(f: Map, x: Tensor, seed: int, reference: float) -> dict[str, Callable[[], Found]]:
    steps, value = lobpcg_steps(f, x, seed, reference)
    return {
        OURS: lambda: ours(f, x, seed, 0.9),
        "ours, 99.9 % sure, its default": lambda: ours(f, x, seed, CONFIDENCE),
        "ours with hindsight": lambda: ours_with_hindsight(f, x, seed, reference),
        "curvlinops, svds(k=1), its defaults": lambda: svds(curvlinops_operator(f, x), seed, None, 0.0),
        _RIVAL: lambda: svds(curvlinops_operator(f, x), seed, None, TOLERANCE),
        "curvlinops, svds with hindsight": lambda: svds(curvlinops_operator(f, x), seed, NCV, TOL),
        "our products, svds with hindsight": lambda: svds(our_operator(f, x), seed, NCV, TOL),
        "our products, LOBPCG with hindsight": lambda: lobpcg(f, x, seed, steps, value),
        "our products, power iteration with hindsight": lambda: power_iteration(f, x, seed, reference),
    }


def _timed(rival: Callable[[], Found], f: Map, x: Tensor, reference: float) -> dict[str, Any]:
    try:
        (value, products), spent = between(rival, f, x, FORWARDS_EACH_TIME)
    except ModuleNotFoundError as error:
        return {"missing": str(error)}
    return {**spent, "products": products, "error": abs(value / reference - 1)}


def _top(f: Map, x: Tensor, truth: TopSingular) -> dict[str, Any]:
    """The 20 largest values to 1 %."""
    found = top_singular(JacobianOperator(f, x), len(truth.values), tol=TOLERANCE, seed=1)
    return {
        "products": found.products,
        "status": str(found.status),
        "error": float(np.abs(found.values / truth.values - 1).max()),
        "truth_error": truth.error,
    }


def dense(model: str = MODEL, tokens: int = DENSE_TOKENS, rounds: int = ROUNDS) -> dict[str, Any]:
    """`jacrev` and an SVD against normscope, on a sequence that is short enough for them."""
    with gpt2_stack(model, tokens) as (f, x):
        reference, spent = jacrev_svd(f, x).value, []
        for seed in range(rounds):
            run = partial(ours, f, x, seed, CONFIDENCE)
            spent.append({"name": "ours", **_timed(run, f, x, reference)})
            spent.append({"name": "jacrev", **_timed(partial(jacrev_svd, f, x), f, x, reference)})
        return {"rows": spent, "n": x.numel(), "tokens": tokens}


def sigma_rows(measured: dict[str, Any]) -> list[Row]:
    """Rows for σ_max by all methods, normscope against curvlinops, and the 20 largest values."""
    missing = [run["missing"] for run in measured["rows"] if "missing" in run]
    runs = [run for run in measured["rows"] if "missing" not in run]
    names = list(dict.fromkeys(run["name"] for run in runs))
    rows = [_rival_row(name, runs, measured) for name in names]
    if missing:
        rows.append(row("curvlinops", "not measured", "", missing[0]))
    else:
        rows.append(_ratio_row(runs, _RIVAL, "≥ 8"))
        rows += [
            _ratio_row(runs, name, "–") for name in names if name.startswith("curvlinops") and name != _RIVAL
        ]
    top = measured["top"]
    how = f"{top['status']}, true error {top['error']:.1e}, known to {top['truth_error']:.1e}"
    return [*rows, row("20 largest to 1 %: products", str(top["products"]), "≤ 100", how)]


def _rival_row(name: str, runs: list[Row], measured: dict[str, Any]) -> Row:
    mine = [run for run in runs if run["name"] == name]
    forwards = [run["cpu_s"] / run["forward_cpu_s"] for run in mine]
    by_clock = statistics.median(run["seconds"] / run["forward_s"] for run in mine)
    products = sorted({run["products"] for run in mine})
    range_of_products = f"{products[0]} to {products[-1]}" if len(products) > 1 else f"{products[0]}"
    how = (
        f"{min(forwards):.1f} to {max(forwards):.1f} over {len(mine)} starts; {range_of_products} products; "
        f"{_median_cpu(mine):.2f} s, forward {median_ms([run['forward_cpu_s'] for run in mine])}; "
        f"by the clock {by_clock:.1f}; true error ≤ {max(run['error'] for run in mine):.0e}; "
        f"{measured['threads']} threads, {measured['allocator']}"
    )
    what = f"σ_max to 1 %, {name}: forward-equivalents"
    return row(what, f"{statistics.median(forwards):.1f}", "≤ 20" if name == OURS else "–", how)


def _ratio_row(runs: list[Row], rival: str, target: str) -> Row:
    """A rival's time divided by normscope's, round by round."""
    mine, theirs = ([run["cpu_s"] for run in runs if run["name"] == name] for name in (OURS, rival))
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    how = f"{min(ratios):.1f} to {max(ratios):.1f} over {len(ratios)} rounds"
    return row(
        f"σ_max to 1 %, {rival}: time relative to {OURS}", f"{statistics.median(ratios):.1f}", target, how
    )


def dense_rows(measured: dict[str, Any]) -> list[Row]:
    """The row for the whole Jacobian against normscope."""
    mine, theirs = (
        _median_cpu([run for run in measured["rows"] if run["name"] == name]) for name in ("ours", "jacrev")
    )
    how = (
        f"T = {measured['tokens']}, n = {measured['n']}: {theirs:.2f} s against {mine:.2f} s; at T = 128 the "
        "Jacobian takes 36 GiB: not measured"
    )
    return [row("torch.func.jacrev and SVD, time relative to ours", f"{theirs / mine:.1f}", "–", how)]


def log_sigma_rows(measured: dict[str, Any]) -> list[Row]:
    """Rows for the errors of log σ of a thousand factors."""
    return [
        row(
            f"log σ of 1000 {name}: largest error in nats",
            f"{found['error']:.0e}",
            "≤ 1e-9",
            f"{found['status']}, stated {found['stated']:.0e}; log σ from {found['range'][0]:.0f} to "
            f"{found['range'][1]:.0f}; the plain float64 product errs by {found['plain']:.0e}",
        )
        for name, found in measured.items()
    ]


def batched_rows(measured: dict[str, Any]) -> list[Row]:
    """Rows for products in a batch against products one by one."""
    rows = []
    for product in ("Jv", "Jᵀu"):
        alone, together = (measured["seconds"][f"{product} {way}"] for way in ("one by one", "in a batch"))
        how = (
            f"{1e3 * alone:.1f} ms a vector against {1e3 * together:.1f} ms, {measured['vectors']} vectors, "
            f"T = {measured['tokens']}; they differ by {measured['gap']:.0e}"
        )
        what = f"1000 layers, d = 64: {product} one by one, time relative to a batch's"
        rows.append(row(what, f"{alone / together:.1f}", "≥ 4", how))
    return rows


def inverse_rows(measured: dict[str, Any]) -> list[Row]:
    """Rows for σ_min by solves with the layers, and by a long process on J."""
    rows = []
    for name, found in (("layer-wise inverse", measured["layers"]), ("Golub–Kahan", measured["plain"])):
        how = (
            f"κ = {measured['condition']:.1e}, n = {measured['n']}, float64; {found['status']}, stated error "
            f"{found['stated']:.1g}, true {found['error']:.1g}"
        )
        rows.append(row(f"σ_min to 5 %, {name}: products", f"{found['products']:.0f}", "–", how))
    return rows


def _median_cpu(runs: list[Row]) -> float:
    return statistics.median(run["cpu_s"] for run in runs)
