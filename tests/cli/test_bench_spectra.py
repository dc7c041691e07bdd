"""Figures of `bench spectra`, at a tiny size, against dense float64."""

import re
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typer.testing import CliRunner

from benchmarks.benches import BENCHES
from benchmarks.spectra import bench, deep, rivals
from benchmarks.spectra.bench import OURS
from benchmarks.spectra.cost import decoder_stack, exponent, point
from benchmarks.spectra.rivals import NCV, TOL, curvlinops_operator, our_operator, svds
from benchmarks.spectra.stack import Map, gpt2_stack
from normscope.cli.main import app
from normscope.linalg import JacobianOperator, sigma_max

# What curvlinops calls, torch.func.jvp, scripts its rules the first time.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

TINY, TOKENS = "hf:gpt2,n_layer=2,n_embd=16,n_head=2", 6
PAGE = Path(__file__).parents[2] / "docs" / "spectra.md"
RIVALS = {
    "ours": lambda f, x, seed, truth: rivals.ours(f, x, seed, 0.999),
    "ours with hindsight": rivals.ours_with_hindsight,
    "curvlinops": lambda f, x, seed, truth: svds(curvlinops_operator(f, x), seed, None, 1e-2),
    "curvlinops with hindsight": lambda f, x, seed, truth: svds(curvlinops_operator(f, x), seed, NCV, TOL),
    "svds": lambda f, x, seed, truth: svds(our_operator(f, x), seed, NCV, TOL),
    "power iteration": rivals.power_iteration,
    "jacrev": lambda f, x, seed, truth: rivals.jacrev_svd(f, x),
}


def dense(f: Map, x: Tensor) -> Tensor:
    """The whole Jacobian in float64, row by row."""
    return torch.autograd.functional.jacobian(f, x).reshape(-1, x.numel()).double()


@pytest.fixture(scope="module")
def stack() -> Any:
    with gpt2_stack(TINY, TOKENS) as (f, x):
        jacobian = dense(f, x)
        yield f, x, jacobian, torch.linalg.svdvals(jacobian)


@pytest.mark.parametrize("name", RIVALS)
def test_everyone_finds_sigma_max(name: str, stack: Any) -> None:
    if name.startswith("curvlinops"):
        pytest.importorskip("curvlinops", exc_type=ImportError)
    f, x, _, values = stack
    truth = float(values[0])
    for seed in range(2):
        found = RIVALS[name](f, x, seed, truth)
        assert abs(found.value / truth - 1) <= 1e-2
        assert 0 < found.products < 100


def test_curvlinops_has_the_same_jacobian(stack: Any) -> None:
    pytest.importorskip("curvlinops", exc_type=ImportError)
    f, x, jacobian, _ = stack
    operator = curvlinops_operator(f, x)
    v = torch.randn(x.numel())
    for found, expected in ((operator @ v.numpy(), jacobian), (operator.rmatvec(v.numpy()), jacobian.T)):
        torch.testing.assert_close(
            torch.from_numpy(found).double(), expected @ v.double(), rtol=1e-4, atol=1e-4
        )


def test_hindsight_stops_at_the_first_product_that_is_good_enough(stack: Any) -> None:
    f, x, _, values = stack
    truth = float(values[0])
    op = JacobianOperator(f, x)
    found = rivals.power_iteration(f, x, 0, truth)
    v = torch.randn(x.numel(), generator=torch.Generator().manual_seed(0))
    errors = []
    while not errors or errors[-1] > 1e-2:
        u = op.matvec(v / v.norm())
        errors.append(abs(float(u.norm()) / truth - 1))
        v = op.rmatvec(u)
    assert found.products == 2 * len(errors) - 1
    steps, value = rivals.lobpcg_steps(f, x, 0, truth)
    history = rivals._lobpcg(op.to_scipy(), 0, 20)
    assert value == pytest.approx(history[steps], rel=1e-6)
    assert abs(value / truth - 1) <= 1e-2 < abs(history[steps - 1] / truth - 1)
    found = rivals.lobpcg(f, x, 0, steps, value)
    assert (found.value, steps <= found.products // 2 <= steps + 3) == (value, True)


def test_sigma_times_everyone_and_tells_true_errors(stack: Any) -> None:
    f, x, _, values = stack
    measured = bench.sigma(1, TINY, TOKENS)
    rows = {row.get("name", "missing"): row for row in measured["rows"]}
    assert {OURS, "ours with hindsight", "our products, power iteration with hindsight"} <= rows.keys()
    assert all(row["cpu_s"] > row["forward_cpu_s"] > 0 for row in rows.values() if "name" in row)
    found = sigma_max(JacobianOperator(f, x), tol=1e-2, confidence=0.9)
    assert rows[OURS]["products"] == found.products
    assert rows[OURS]["error"] == pytest.approx(abs(found.value / float(values[0]) - 1), abs=1e-5)
    assert measured["top"]["status"] == "converged"
    assert measured["top"]["error"] <= 1e-2
    assert measured["top"]["truth_error"] <= 1e-3
    table = bench.sigma_rows(measured)
    assert [row["figure"] for row in table if row["what"].startswith("20 largest")]


def test_jacrev_is_timed_on_the_same_map() -> None:
    measured = bench.dense(TINY, TOKENS, 1)
    assert measured["n"] == 16 * TOKENS
    assert {row["name"] for row in measured["rows"]} == {"ours", "jacrev"}
    assert all(row["error"] <= 1e-2 for row in measured["rows"])
    (row,) = bench.dense_rows(measured)
    assert float(row["figure"]) > 0


def run(name: str, seconds: float, forward_s: float = 0.5) -> dict[str, Any]:
    times = {"cpu_s": seconds, "forward_cpu_s": forward_s, "seconds": 2 * seconds, "forward_s": forward_s}
    return {"name": name, "products": 10, "error": 1e-3, **times}


def test_figures_are_medians_over_the_rounds() -> None:
    names = (OURS, "curvlinops, svds(k=1, tol=0.01)", "curvlinops, svds with hindsight")
    rounds = [(1.0, 8.0, 2.0), (2.0, 18.0, 4.0), (1.0, 30.0, 9.0)]
    rows = [run(name, s) for each in rounds for name, s in zip(names, each, strict=True)]
    top = {"products": 99, "status": "converged", "error": 1e-3, "truth_error": 1e-4}
    measured = {"rows": rows, "top": top, "threads": 2, "allocator": "its own"}
    figures = {row["what"]: row["figure"] for row in bench.sigma_rows(measured)}
    assert figures[f"σ_max to 1 %, {OURS}: forward-equivalents"] == "2.0"
    assert figures[f"σ_max to 1 %, curvlinops, svds(k=1, tol=0.01): time relative to {OURS}"] == "9.0"
    assert figures[f"σ_max to 1 %, curvlinops, svds with hindsight: time relative to {OURS}"] == "2.0"
    assert figures["20 largest to 1 %: products"] == "99"
    absent = {**measured, "rows": [run(OURS, 1.0), {"missing": "No module named 'curvlinops'"}]}
    figures = {row["what"]: row["figure"] for row in bench.sigma_rows(absent)}
    assert figures["curvlinops"] == "not measured"


def test_multi_precision_is_the_product_of_the_factors_in_their_order() -> None:
    factors = torch.randn(3, 4, 4, dtype=torch.float64)
    product = factors[2] @ factors[1] @ factors[0]
    torch.testing.assert_close(
        deep.multiprecision(factors), torch.linalg.svdvals(product).log(), rtol=0, atol=1e-12
    )


def test_log_sigma_of_many_layers() -> None:
    measured = deep.log_sigma(width=3, depth=150)
    for found in measured.values():
        assert found["error"] <= found["stated"] <= 1e-9
        assert found["status"] == "converged"
    assert measured["Gaussian factors"]["plain"] > 10  # nats: what the plain product makes of it
    assert len(bench.log_sigma_rows(measured)) == 2


def test_layer_jacobians_are_those_of_the_stack() -> None:
    factors = deep.layer_jacobians(4, 3)
    layers = deep.layers(4, 3, torch.float64)
    x = torch.randn(4, dtype=torch.float64)  # the same draw as in layer_jacobians
    whole = dense(torch.nn.Sequential(*layers), x)
    torch.testing.assert_close(factors[2] @ factors[1] @ factors[0], whole)


def test_batches_are_timed_and_give_what_their_vectors_give() -> None:
    measured = deep.batched(width=8, depth=5, tokens=2, vectors=16, rounds=1)
    assert measured["gap"] <= 1e-5
    assert all(each > 0 for each in measured["seconds"].values())
    assert [row["target"] for row in bench.batched_rows(measured)] == ["≥ 4", "≥ 4"]


def test_both_ways_to_sigma_min_against_dense() -> None:
    measured = deep.inverse(width=8, tokens=3, depth=3, gain=0.5, budget=60)
    assert measured["n"] == 24
    for way in ("layers", "plain"):
        assert measured[way]["status"] in ("converged", "exact")
        assert measured[way]["error"] <= min(measured[way]["stated"], 5e-2)
    assert len(bench.inverse_rows(measured)) == 2


def test_growth_is_measured_on_the_map_it_names() -> None:
    found = point(width=64, depth=2, length=4, starts=1)
    assert found.n == 256
    f, x = decoder_stack(64, 2, 4)
    with sdpa_kernel(SDPBackend.MATH):
        truth = sigma_max(JacobianOperator(f, x), tol=1e-2, seed=0)
        assert truth.value == pytest.approx(float(torch.linalg.svdvals(dense(f, x))[0]), rel=1e-2)
    assert found.products == truth.products
    assert found.forwards > 1


def test_exponents_and_their_intervals() -> None:
    sizes = [2, 4, 8, 16]
    assert exponent(sizes, [3 * s**1.5 for s in sizes]) == pytest.approx((1.5, 0), abs=1e-9)
    slope, half = exponent(sizes, [2, 4 * 1.1, 8 / 1.1, 16])
    residual = log(1.1)  # by hand: of ±log 1.1 in the middle, over Σ(x − x̄)² = 5 log² 2
    assert slope == pytest.approx(1 - residual / (5 * log(2)))
    assert half == pytest.approx(4.3027 * residual * (0.9) ** 0.5 / (5**0.5 * log(2)), rel=1e-4)


def test_the_command_knows_it() -> None:
    assert "spectra" in BENCHES
    answer = CliRunner().invoke(app, ["bench", "spectrum"], obj=["bench", "spectrum"])
    assert "spectra" in str(answer.output) + str(answer.exception)


def test_the_page_has_a_place_for_each_table() -> None:
    assert re.findall(r"<!-- (bench|growth) -->\n\|", PAGE.read_text(encoding="utf-8")) == ["bench", "growth"]
