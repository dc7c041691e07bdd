"""Tests of budgets: the limit holds, all costs are recorded, and every figure agrees with the dense map."""

import math
import re

import numpy as np
import pytest
import torch
from test_probe_jacobian import Model, gpt, ids, subject_of, value
from test_probe_jacobian import dense as dense_jacobian
from torch import Tensor

from normscope.anatomy import Anatomy, measuring, read_anatomy
from normscope.errors import UsageError
from normscope.linalg import TangentError, dense, singular_values
from normscope.nn import SCHEMES, build
from normscope.pipeline import CheckInterrupted, check
from normscope.probes import Budget, Measurements, Spending, measure_jacobian
from normscope.probes.jacobian import deep
from normscope.probes.jacobian.held_graph import hold
from normscope.probes.jacobian.layers import layers_of
from normscope.probes.jacobian.one_sequence import one_sequence
from normscope.probes.jacobian.spectrum import QUANTILES, RANK_TOLERANCE, spectrum_rows
from normscope.probes.jacobian.workspace import Workspace
from normscope.subjects import Subject

PLACEMENTS = ("pre", "post", "res-post", "peri")


def measured(subject: Subject, anatomy: Anatomy, budget: Budget) -> tuple[Measurements, Spending]:
    spending = Spending(budget)
    return Measurements(measure_jacobian(subject, anatomy, spending)), spending


def checked(model: torch.nn.Module, batch: Tensor, budget: Budget) -> tuple[Measurements, Spending]:
    subject = subject_of(model, batch)
    return measured(subject, read_anatomy(subject), budget)


def spectra(model: torch.nn.Module, batch: Tensor) -> dict[str, np.ndarray]:
    """Site of every block and stack → all singular values of its Jacobian."""
    subject = subject_of(model, batch)
    anatomy = read_anatomy(subject)
    with measuring(model):
        feed = one_sequence(model, batch, anatomy)
        graph = hold(model, anatomy, feed)
        maps = {block.site: (block.entry, block.exit) for block in anatomy.blocks}
        maps |= {s.name: (s.blocks[0].entry, s.blocks[-1].exit) for s in anatomy.stacks}
        return {site: singular_values(dense(graph.operator(*ends))) for site, ends in maps.items()}


@pytest.mark.parametrize("budget", list(Budget))
@pytest.mark.parametrize(("d", "tokens", "num_blocks"), [(8, 5, 2), (12, 6, 5)])
def test_no_more_is_spent_than_the_budget_and_all_of_it_is_accounted_for(
    budget: Budget, d: int, tokens: int, num_blocks: int
) -> None:
    model = Model(d, lambda: gpt(d, "pre").blocks[0], num_blocks).double()
    rows, spending = checked(model, ids(tokens), budget)
    account = spending.to_dict()
    assert 0 < spending.forwards <= budget.forwards
    assert account["forwards"] == pytest.approx(
        sum(p["forwards"] for p in account["parts"].values()), abs=0.1
    )
    assert all(part["seconds"] > 0 for part in account["parts"].values())
    said = {row.how.removeprefix("not measured: ") for row in rows if not row.measured}
    for reason in account["left_out"].values():
        assert reason in said or budget is not Budget.DEEP


def test_a_larger_budget_measures_all_that_a_smaller_one_does_and_more() -> None:
    model = gpt(8, "pre")
    found = []
    for budget in Budget:
        rows, _ = checked(model, ids(5), budget)
        found.append({(row.quantity, row.site) for row in rows if row.measured})
    assert found[0] < found[1] < found[2]


def test_what_is_left_out_says_which_budget_has_it() -> None:
    rows, spending = checked(gpt(8, "pre"), ids(5), Budget.FAST)
    for quantity, budget in (("condition", "deep"), ("token-rank", "deep"), ("sigma-max", "standard")):
        row = rows.find(f"jacobian/{quantity}", "blocks.0")
        assert row is not None
        assert row.how == f"not measured: --budget fast leaves it out: needs --budget {budget}"
    assert {"whole spectra", "one token", "blocks"} <= set(spending.left_out)


def test_a_fast_budget_has_what_rules_read() -> None:
    rows, spending = checked(gpt(8, "pre"), ids(5), Budget.FAST)
    measured = {row.quantity for row in rows if row.measured}
    assert measured == {"derivative/relative-error", "jacobian/contraction", "jacobian/dimension"}
    assert spending.forwards < 20


def test_a_part_that_costs_more_than_what_is_left_is_left_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "forwards", property(lambda self: 40))
    rows, spending = checked(gpt(8, "pre"), ids(5), Budget.STANDARD)
    assert spending.forwards <= 40
    assert any(row.measured for row in rows)
    assert any("are left" in row.how for row in rows if not row.measured)


@pytest.fixture(scope="module", params=PLACEMENTS)
def iterative(request: pytest.FixtureRequest) -> tuple[str, Measurements, dict[str, np.ndarray]]:
    """Placement, the rows of a deep budget without dense spectra, and the dense spectra."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep, "DENSE_LIMIT", 0)
        torch.manual_seed(0)
        model, batch = gpt(12, request.param), ids(9)
        rows, _ = checked(model, batch, Budget.DEEP)
    return request.param, rows, spectra(model, batch)


Iterative = tuple[str, Measurements, dict[str, np.ndarray]]


def test_a_deep_budget_finds_the_small_end_of_large_maps(iterative: Iterative) -> None:
    """Iterative here, at a size where the dense spectrum can be computed."""
    placement, rows, expected = iterative
    n = 12 * 9
    null = {"post": 2 * 9}.get(placement, 0)
    for site, values in expected.items():
        nonzero = float(values[n - null - 1])
        assert value(rows, "sigma-min-nonzero", site) == pytest.approx(nonzero, rel=6e-2), site
        assert value(rows, "sigma-min", site) == pytest.approx(0.0 if null else nonzero, rel=6e-2), site
        condition = rows.find("jacobian/condition", site)
        assert condition is not None
        stated = float(re.search(r"relative error ≤ ([\d.e-]+): σ_max and σ_min", condition.how)[1])
        true = values[0] / nonzero  # the error of a stack's σ_max is stated at 80 %: one draw may miss it
        assert condition.value <= true * (1 + 1e-4) <= condition.value * (1 + 2 * stated), site
        assert value(rows, "rank", site) == int((values > RANK_TOLERANCE * values[0]).sum()), site


def test_a_deep_budget_finds_the_shape_of_large_spectra(iterative: Iterative) -> None:
    placement, rows, spectra_of = iterative
    for site, values in spectra_of.items():
        shares = values / values.sum()
        entropy = -float((shares * np.log(np.maximum(shares, 1e-300))).sum())
        assert value(rows, "effective-rank", site) == pytest.approx(math.exp(entropy), rel=0.15)
        assert value(rows, "stable-rank", site) == pytest.approx((values**2).sum() / values[0] ** 2, rel=0.3)
        found = rows.find("jacobian/log-sigma", site)
        assert found is not None
        null = 2 / 12 if placement == "post" else 0.0
        middle = [i for i, share in enumerate(QUANTILES) if null + 0.25 * (1 - null) <= share <= 0.9]
        expected = np.log10(np.quantile(values, QUANTILES, method="lower"))
        assert np.abs(np.array(found.value)[middle] - expected[middle]).max() < 0.15
        assert [value == -math.inf for value in found.value] == [share < null for share in QUANTILES]
    top = rows.find("jacobian/top-singular-values", "decoder")
    assert top is not None
    np.testing.assert_allclose(top.value, spectra_of["decoder"][: deep.NUM_TOP], rtol=1.1e-2)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_small_spectrum_is_taken_whole(placement: str) -> None:
    model, batch = gpt(8, placement), ids(5)
    rows, _ = checked(model, batch, Budget.DEEP)
    for site, values in spectra(model, batch).items():
        rank = int((values > RANK_TOLERANCE * values[0]).sum())
        assert value(rows, "sigma-max", site) == pytest.approx(values[0], rel=5e-2)
        assert value(rows, "rank", site) == rank
        assert value(rows, "sigma-min-nonzero", site) == pytest.approx(values[rank - 1])
        assert value(rows, "condition", site) == pytest.approx(values[0] / values[rank - 1])
        assert value(rows, "sigma-min", site) == pytest.approx(values[-1], abs=1e-12)
        found = rows.find("jacobian/log-sigma", site)
        assert found is not None
        assert found.value[-1] == pytest.approx(math.log10(values[0]))
        assert found.value[QUANTILES.index(0.5)] <= math.log10(np.median(values)) + 1e-9


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - {"plain", "attnres", "block-attnres"}))
def test_bounds_hold_in_every_scheme(scheme: str) -> None:
    """Branches are small: otherwise Weyl's bound would be zero and hold trivially."""
    model = build("decoder", scheme=scheme, depth=2, width=8, heads=2, vocab=11, context=8).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "blocks" in name:
                parameter.mul_(0.3)
    batch = ids(4)[:1]
    rows, _ = checked(model, batch, Budget.STANDARD)
    values = spectra(model, batch)
    bounds = rows.of("jacobian/lower-bound")
    for site, bound in bounds.items():
        assert bound <= values[site][-1] * (1 + 1e-6), site
    above = rows.of("jacobian/log-upper-bound")
    for site, bound in above.items():
        assert bound >= math.log10(values[site][0]) - 1e-9
    for site, bound in rows.of("jacobian/log-lower-bound").items():
        assert bound == -math.inf or bound <= math.log10(values[site][-1]) + 1e-9


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_tokens_spectrum_is_that_of_the_corner_of_the_dense_jacobian(placement: str) -> None:
    model, batch = gpt(8, placement), ids(5)
    rows, spending = checked(model, batch, Budget.DEEP)
    entry = model.embedding(batch[:1]).detach()
    for site, f in (("decoder", model.stack), ("blocks.0", model.blocks[0])):
        expected = singular_values(dense_jacobian(lambda t, f=f: f(t)[:, -1], entry)[:, -8:])
        found = rows.find("jacobian/token-singular-values", site)
        assert found is not None
        np.testing.assert_allclose(found.value, expected, atol=1e-9)
        assert value(rows, "token-rank", site) == (6 if placement == "post" else 8)
        assert "last of 5 tokens" in found.how
    assert spending.parts["one token"].forwards == pytest.approx(0.5 * 8 * 2)  # the stack, and all blocks


def test_the_lower_bound_says_something_where_branches_are_small() -> None:
    model = gpt(8, "pre")
    with torch.no_grad():
        for block in model.blocks:
            for weight in (block.attention.out.weight, block.feed_forward.down.weight):
                weight.mul_(0.05)
    rows, _ = checked(model, ids(5), Budget.STANDARD)
    assert value(rows, "lower-bound", "blocks.0") > 0.1
    assert value(rows, "log-lower-bound", "decoder") > -3


def test_branches_that_read_more_than_the_stream_are_no_chain() -> None:
    """B2T's second branch is added to the block's input as well."""
    model = build("decoder", scheme="b2t", depth=3, width=8, heads=2, vocab=11, context=8).double()
    batch = ids(5)
    anatomy = read_anatomy(model, batch)
    with measuring(model):
        feed = one_sequence(model, batch, anatomy)
        workspace = Workspace(model, anatomy, feed, hold(model, anatomy, feed), "", Spending(Budget.DEEP))
        whole, one = layers_of(workspace, anatomy.stacks[0]), layers_of(workspace, anatomy.blocks[0])
        product = torch.linalg.multi_dot([dense(layer.map) for layer in reversed(whole)])  # type: ignore[arg-type]
        torch.testing.assert_close(product, dense(workspace.ends(anatomy.stacks[0])))
    assert (len(whole), len(one)) == (3, 1)  # block by block


def test_a_budget_that_there_is_none_of() -> None:
    with pytest.raises(UsageError, match="deep"):
        Budget.of("deeep")


def test_an_interrupted_check_keeps_the_figures_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(workspace: Workspace, part: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("normscope.probes.jacobian.deep_rows", interrupted)
    with pytest.raises(CheckInterrupted) as stop:
        check(gpt(8, "pre"), ids(5), steps=0, budget="deep")
    measurements = stop.value.report.measurements
    assert value(measurements, "sigma-max", "decoder") > 0
    assert measurements.find("jacobian/token-singular-values", "decoder") is not None


def test_a_part_that_cannot_be_had_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_chain(workspace: Workspace, part: object) -> None:
        raise TangentError("no chain")

    monkeypatch.setattr(deep, "DENSE_LIMIT", 0)
    monkeypatch.setattr(deep, "layers_of", no_chain)
    rows, _ = checked(gpt(8, "pre"), ids(5), Budget.DEEP)
    assert rows.find("jacobian/rank", "decoder").how == "not measured: no chain"
    assert value(rows, "effective-rank", "decoder") > 1
    assert value(rows, "sigma-max", "blocks.0") > 0


@pytest.mark.parametrize(
    ("values", "null", "rank"),
    [
        ([4.0, 2.0, 1e-9], 0, 2.0),
        ([4.0, 2.0, 1e-6, 1e-12], 1, 3.0),  # the known kernel, not the tolerance
        ([4.0, 2.0, 1.0, 0.9], 1, 4.0),  # the assumed kernel is not one
        ([1.0, 3e-5, 1.2e-5, 8e-6, 3e-6], 0, None),  # a continuum across the tolerance
        ([0.0, 0.0], 0, 0.0),
    ],
)
def test_a_rank_is_plain_or_none(values: list[float], null: int, rank: float | None) -> None:
    rows = {row.quantity: row for row in spectrum_rows("site", np.array(values), null, "dense")}
    assert rows["jacobian/rank"].value == rank
    nonzero = rows["jacobian/sigma-min-nonzero"].value
    assert nonzero == (values[int(rank) - 1] if rank else None)
    if rank is None:
        assert "no gap" in rows["jacobian/condition"].how
