"""The parts of `bench spectra`, each a process: `python -m normscope.bench.spectra_parts NAME`."""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from normscope.bench import spectra_deep, spectra_rivals
from normscope.bench.process import circumstances
from normscope.bench.spectra_rivals import NCV, TOL, TOLERANCE, Found, Rival, lobpcg, lobpcg_steps
from normscope.bench.spectra_stack import MODEL, TOKENS, Map, between, gpt2_stack
from normscope.linalg import JacobianOperator, TopSingular, top_singular
from normscope.linalg.golub_kahan import CONFIDENCE

NUM_TOP = 20
ROUNDS = 3
FORWARDS_EACH_TIME = 3
DENSE_TOKENS = 2
"""Tokens that `jacrev` is affordable for: at 128 the Jacobian of the stack takes 36 GiB."""


def sigma(rounds: int = ROUNDS, model: str = MODEL, tokens: int = TOKENS) -> dict[str, Any]:
    """σ_max of the stack by all, in turns, each between plain forwards and from another start each round."""
    with gpt2_stack(model, tokens) as (f, x):
        truth = _truth(f, x)
        reference = float(truth.values[0])
        spent: list[dict[str, Any]] = []
        for seed in range(rounds):
            for name, rival in _rivals(f, x, seed, reference).items():
                spent.append({"name": name, **_timed(rival, f, x, seed, reference)})
        return {
            "rows": spent,
            "reference_products": truth.products,
            "top": _top(f, x, truth),
            **circumstances(),
        }


def _rivals(f: Map, x: Tensor, seed: int, reference: float) -> dict[str, Rival]:
    return {
        "ours, 90 % sure": spectra_rivals.ours(0.9),
        "ours, 99.9 % sure as it comes": spectra_rivals.ours(CONFIDENCE),
        "ours with hindsight": spectra_rivals.ours_with_hindsight,
        "curvlinops, svds(k=1) as it comes": spectra_rivals.curvlinops_svds(None, 0.0),
        "curvlinops, svds(k=1, tol=0.01)": spectra_rivals.curvlinops_svds(None, TOLERANCE),
        "curvlinops, svds with hindsight": spectra_rivals.curvlinops_svds(NCV, TOL),
        "our products, svds with hindsight": spectra_rivals.our_svds(NCV, TOL),
        "our products, LOBPCG with hindsight": lobpcg(*lobpcg_steps(f, x, seed, reference)),
        "our products, power iteration with hindsight": spectra_rivals.power_iteration,
    }


def _timed(rival: Rival, f: Map, x: Tensor, seed: int, reference: float) -> dict[str, Any]:
    found: list[Found] = []
    try:
        spent = between(lambda: found.append(rival(f, x, seed, reference)), f, x, FORWARDS_EACH_TIME)
    except ModuleNotFoundError as error:
        return {"missing": str(error)}
    return {**spent, "products": found[0].products, "error": abs(found[0].value / reference - 1)}


def _truth(f: Map, x: Tensor) -> TopSingular:
    """The largest values from a long run, ten times better than what is asked of the others."""
    return top_singular(JacobianOperator(f, x), min(NUM_TOP, x.numel()), tol=TOLERANCE / 10, max_products=400)


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
    """`jacrev` and an SVD against ours, where the sequence is short enough for it."""
    with gpt2_stack(model, tokens) as (f, x):
        reference = spectra_rivals.jacrev_svd(f, x, 0, 0.0).value
        rivals = {"ours": spectra_rivals.ours(CONFIDENCE), "jacrev": spectra_rivals.jacrev_svd}
        spent = [
            {"name": name, **_timed(rival, f, x, seed, reference)}
            for seed in range(rounds)
            for name, rival in rivals.items()
        ]
        return {"rows": spent, "n": x.numel(), "tokens": tokens}


PARTS: dict[str, Callable[[], Any]] = {
    "sigma": sigma,
    "dense": dense,
    "log-sigma": spectra_deep.log_sigma,
    "batched": spectra_deep.batched,
    "inverse": spectra_deep.inverse,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
