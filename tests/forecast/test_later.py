"""Late failures: what counts as one, what is observed, and the scoring, on made-up runs and tiny models."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

from benchmarks.later import alarms, failures, ladders, monitored, scores, tables, watched
from benchmarks.later.failures import Failure, curve_of, failure_of, hardness, is_healthy
from benchmarks.later.observed import observe, sharpness
from benchmarks.predictors.scoring import auroc
from benchmarks.regimes.data import next_token
from normscope.anatomy.measuring import measuring
from normscope.nn import Decoder, build

HEALTHY = [3.0, 2.5, *[2.0] * 98]


def curve(*changes: tuple[int, float]) -> list[float]:
    """A healthy curve of 2000 steps with other values at some points."""
    found = list(HEALTHY)
    for point, value in changes:
        found[point] = value
    return found


def test_a_spike_counts_from_its_last_good_step_and_a_collapse_does_not_come_back() -> None:
    assert failure_of(curve(), 2.7) is None
    assert failure_of(curve((50, 2.29)), 2.7) is None
    assert failure_of(curve(*((point, 1.5) for point in range(60, 100))), 2.7) is None  # it only falls
    assert failure_of(curve((50, 2.31)), 2.7) == Failure(1000, lasts=False)
    assert failure_of(curve(*((point, 2.4) for point in range(60, 100))), 2.7) == Failure(1200, lasts=True)
    assert failure_of([*HEALTHY[:40], math.inf], 2.7) == Failure(800, lasts=True)


def test_a_slow_rise_over_the_entropy_is_a_collapse_at_the_end() -> None:
    rising = [3.0] * 14 + [2.65] + [2.75] * 85
    assert failure_of(rising, 2.7) == Failure(1940, lasts=True)


@pytest.mark.parametrize(
    ("first", "healthy"),
    [
        ([2.5] * 15, True),  # under the entropy by 0.1
        ([2.65] * 15, False),  # not enough, and not falling
        ([2.9] * 10 + [2.87] * 5, True),  # falls by 0.02 within 100 steps
        ([2.9] * 10 + [2.89] * 5, False),
        ([2.0] * 14 + [2.31], False),  # has failed already
        ([2.0] * 14 + [math.inf], False),
        ([2.0] * 14, False),
    ],
)
def test_a_run_takes_part_if_it_is_healthy_at_step_300(first: list[float], healthy: bool) -> None:
    assert is_healthy(first, 2.7) is healthy


def test_hard_batches_are_no_spike_and_a_loss_that_is_not_finite_ends_a_curve() -> None:
    reference = np.full(400, 2.0)
    reference[200:220] += 0.5
    run = np.full(400, 1.8)
    run[200:220] += 0.5
    assert curve_of(run.tolist(), hardness(reference.tolist())) == pytest.approx([1.8] * 20)
    assert max(curve_of(run.tolist())) == pytest.approx(2.3)
    assert curve_of([1.0] * 45 + [math.nan]) == [1.0, 1.0, math.inf]


def test_the_strict_variant_leaves_out_hard_stretches_and_small_rises() -> None:
    reference = curve((50, 2.4), (51, 2.4))
    steady = failures.steadier(curve((50, 2.4), (51, 2.4)), reference)
    assert steady[2:] == pytest.approx(HEALTHY[2:])
    assert len(failures.steadier([*HEALTHY[:40], math.inf], reference)) == 41
    assert failure_of(curve((50, 2.4)), 2.7, strict=True) is None
    assert failure_of(curve((50, 2.6)), 2.7, strict=True) == Failure(1000, lasts=False)
    assert not is_healthy([2.9] * 10 + [2.87] * 5, 2.7, strict=True)


def run(number: int, fails: bool, sign: float = 1.0, part: str = "held-out", **more: Any) -> dict[str, Any]:
    """A run whose gradient norm is high (`sign` 1) or low (−1) where it fails; the rest says nothing."""
    value = math.exp(sign * (2.0 if fails else 0.0) + 0.01 * (number % 7))
    figures = {"recent/gradient": value, "recent/loss": 2.0 + 0.01 * (number % 5), "loss": 2.0}
    made = curve((50, 2.5)) if fails else curve()
    seen = {str(step): dict(figures) for step in (0, *watched.AT, *watched.NEAR.values())}
    identity = {
        "ladder": part,
        "kind": "x",
        "part": part,
        "lr": 1e-3,
        "seed": number,
        "entropy": 2.7,
        "warmup": 0,
    }
    return identity | {"curve": made, "seen": seen} | more


def lines(held: list[dict[str, Any]], step: int = 36) -> dict[str, scores.Line]:
    seton = [run(number, number % 3 == 0, part="set-on") for number in range(30)]
    pair = (scores.samples(each, step) for each in (seton, held))
    return {line.name: line for line in scores.lines(*pair, step)}


def test_a_figure_that_announces_every_failure_has_auroc_1_and_one_that_says_the_opposite_0() -> None:
    right = lines([run(number, number % 4 == 0) for number in range(40)])["recent/gradient"]
    assert (right.auroc, right.found, right.failures, right.false, right.others) == (1.0, 10, 10, 0, 30)
    assert right.lead == 1000 - 36
    assert right.more > 0.3
    assert right.more_low > 0
    turned = lines([run(number, number % 4 == 0, sign=-1.0) for number in range(40)])["recent/gradient"]
    assert turned.auroc == 0.0  # the direction is that of the set-on runs
    assert turned.found == 0


def test_the_logistic_model_knows_the_held_out_runs_by_their_figures_alone() -> None:
    line = lines([run(number, number % 4 == 0) for number in range(40)])["8 figures, logistic"]
    assert line.auroc == 1.0


def test_the_reference_is_not_scored_and_gives_the_strict_variant_its_hard_stretches() -> None:
    hard = curve((50, 2.6))
    runs = [run(0, False, curve=hard), run(1, False, curve=hard, kind="reference")]
    assert [failure for _, failure in scores.judged(runs)] == [Failure(1000, lasts=False)]
    assert [failure for _, failure in scores.judged(runs, strict=True)] == [None]


def test_runs_that_failed_by_the_step_or_were_never_healthy_are_not_scored() -> None:
    runs = [run(0, True), run(1, False), run(2, False, curve=[3.0] * 100)]
    assert [sample.fails for sample in scores.samples(runs, 1000)] == [True, False]
    early = run(3, False, curve=curve((20, 2.5)))
    assert [sample.fails for sample in scores.samples([early], 300)] == [True]
    assert scores.samples([early], 600) == []
    spike, lasting = (scores.samples([run(0, True)], 36, lasting=each)[0] for each in (False, True))
    assert spike.fails
    assert not lasting.fails


def test_the_rate_is_relative_to_the_largest_of_the_ladder_that_is_healthy() -> None:
    runs = [run(k, False, lr=lr) for k, lr in enumerate((1e-3, 4e-3))] + [run(2, False, lr=8e-3)]
    runs[2]["curve"] = [3.0] * 100
    runs.append(run(3, False, lr=1e-2, kind="y"))
    found = scores.samples(runs, 36)
    assert [each.figures[scores.OF_KIND] for each in found] == pytest.approx([math.log(1 / 4), 0.0, 0.0])
    of_ladder = [each.figures[scores.OF_LADDER] for each in found]
    assert of_ladder == pytest.approx([math.log(0.1), math.log(0.4), 0.0])


def test_bootstrap_samples_of_the_auroc_lie_around_it() -> None:
    generator = np.random.default_rng(1)
    fails = np.arange(60) < 20
    values = generator.normal(size=60) + fails
    found, whole = scores.resampled(values, fails), auroc(values.tolist(), fails.tolist())
    assert found.mean() == pytest.approx(whole, abs=0.01)
    expected = math.sqrt(whole * (1 - whole) / 20)  # of the smaller class alone, about
    assert 0.5 * expected < found.std() < 1.5 * expected
    assert scores.resampled(fails.astype(float), fails).min() == 1.0


def test_at_most_a_twentieth_of_the_set_on_runs_is_above_the_threshold() -> None:
    seton = scores.samples([run(number, False, part="set-on") for number in range(40)], 36)
    values = {id(sample): float(number) for number, sample in enumerate(seton)}
    limit = scores.threshold(lambda sample: values[id(sample)], seton)
    assert sum(value > limit for value in values.values()) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_runs_of_one_kind_have_no_auroc_but_counts(fails: bool) -> None:
    line = lines([run(number, fails) for number in range(5)])["recent/gradient"]
    assert all(map(math.isnan, (line.auroc, line.low, line.high, line.more_low)))
    assert (line.found, line.failures, line.others) == ((5, 5, 0) if fails else (0, 0, 5))
    seton = scores.samples([run(number, True, part="set-on") for number in range(5)], 36)
    assert scores.threshold(lambda sample: 0.0, seton) == -math.inf


def test_the_tables_have_a_head_without_runs_and_a_dash_without_a_figure() -> None:
    seton = [run(k, k % 3 == 0, part="set-on", kind="by heart") for k in range(30)]
    for held in ([], [run(0, False, kind="by heart")]):
        shown = tables.tables([*seton, *held])
        assert f"Step 1000, late failures: 0 of {len(held)} runs held out, 10 of 30 set on" in shown
        assert ("| – | – to – |" in shown) == bool(held)
        assert "nan" not in shown
    assert "0 of 0 set on" in tables.tables([])


def test_a_rule_that_watches_is_early_or_it_does_not_count() -> None:
    norms = [1.0] * 100
    early, late, quiet = list(norms), list(norms), list(norms)
    early[40], late[60] = 5.0, 5.0
    runs = [
        run(0, True, **{"gradient": norms, "gradient-max": early}),
        run(1, True, **{"gradient": norms, "gradient-max": late}),
        run(2, False, **{"gradient": norms, "gradient-max": late}),
        run(3, False, **{"gradient": norms, "gradient-max": quiet}),
    ]
    assert alarms.seen(alarms.jump(4), runs) == alarms.Seen((1000 - 820,), 2, 1, 2)
    assert alarms.seen(alarms.jump(6), runs) == alarms.Seen((), 2, 0, 2)
    assert alarms.seen(alarms.risen(0.15), runs) == alarms.Seen((), 2, 0, 2)
    slowly = curve((48, 2.2), (49, 2.2), (50, 2.5))
    rising = run(4, True, **{"curve": slowly, "gradient": norms, "gradient-max": norms})
    assert alarms.seen(alarms.risen(0.15), [rising]).leads == (20,)
    doubled = [1.0] * 30 + [2.1] * 70
    assert alarms.seen(alarms.grown(2), [rising | {"gradient": doubled}]).leads == (1000 - 620,)


def test_alarms_of_the_monitor_count_from_step_100_and_notes_do_not() -> None:
    runs = [run(k, False, kind="by heart", curve=curve((50, 2.6))) for k in range(2)]
    runs += [run(k, False, kind="by heart") for k in (2, 3)]
    said = [
        [(50, "NS807", "warning"), (700, "NS807", "warning"), (900, "NS807", "warning")],
        [(800, "NS805", "note")],
        [(300, "NS811", "error")],
        [],
    ]
    rows = [
        {"ladder": "held-out", "seed": k, "steps": 1000, "alarms": alarms} for k, alarms in enumerate(said)
    ]
    shown = monitored.table(runs, rows)
    assert "| NS807 | 1 of 2 | 300 | 0 of 2 |" in shown
    assert "| NS811 | 0 of 2 | – | 1 of 2 |" in shown
    assert "| any | 1 of 2 | 300 | 1 of 2 |" in shown
    assert "NS805" not in shown


def test_a_failure_after_the_last_watched_step_is_not_watched() -> None:
    runs = [run(k, False, kind="by heart", curve=curve((50, 2.6))) for k in range(2)]
    alarms = [(700, "NS807", "warning")]
    rows = [
        {"ladder": "held-out", "seed": k, "steps": steps, "alarms": alarms}
        for k, steps in enumerate((1000, 980))
    ]
    shown = monitored.table(runs, rows)
    assert "| any | 1 of 1 | 300 | 0 of 0 |" in shown
    assert "not watched until their failure: 1 runs" in shown


def tiny(dtype: torch.dtype = torch.float32) -> tuple[Decoder, torch.Tensor]:
    torch.manual_seed(0)
    made = build("decoder", scheme="pre", depth=2, width=4, heads=1, vocab=7, context=6, bias=False)
    assert isinstance(made, Decoder)
    return made.to(dtype), torch.randint(7, (2, 6))


def test_attention_logits_and_gains_are_those_of_the_model() -> None:
    model, ids = tiny()
    with torch.no_grad():
        model.blocks[0].attention_residual.norms.branch_in.weight.mul_(-50)
        found = observe(model, ids)
        x = model.embedding(ids, torch.arange(6).expand(2, 6))
        seen = model.blocks[0].attention_residual.norms.branch_in(x)
        q, k = (seen @ getattr(model.blocks[0].attention, name).weight.T for name in "qk")
        logits = (q @ k.transpose(1, 2) / 2).tril()
    assert found["attention/max-logit"] == pytest.approx(float(logits.abs().max()), rel=1e-4)
    assert found["gain/max"] == pytest.approx(50.0)
    assert found["gain/min"] == pytest.approx(1.0)
    rows = [row[: t + 1].softmax(0) for sequence in logits for t, row in enumerate(sequence) if t]
    shares = [-float(sum(p * p.log() for p in row if p > 0)) / math.log(len(row)) for row in rows]
    assert found["attention/min-entropy"] == pytest.approx(sum(shares) / len(shares), rel=1e-4)


def test_sharpness_is_the_largest_eigenvalue_of_the_dense_preconditioned_hessian() -> None:
    model, ids = tiny(torch.float64)
    names = [name for name, p in model.named_parameters() if name.endswith("o.weight")]
    generator = torch.Generator().manual_seed(1)
    squares = {
        name: torch.rand(model.get_parameter(name).shape, generator=generator).double() for name in names
    }
    shapes = [square.shape for square in squares.values()]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return next_token(functional_call(model, weights, (ids,)).logits, ids)

    start = torch.cat([model.get_parameter(name).detach().reshape(-1) for name in names])
    with measuring(model):
        hessian = torch.autograd.functional.hessian(loss, start)
    root = torch.cat([(square.sqrt() + 1e-8).sqrt().reshape(-1) for square in squares.values()])
    largest = float(torch.linalg.eigvalsh(hessian / root / root[:, None])[-1])
    assert sharpness(model, ids, squares, 1e-8) == pytest.approx(largest, rel=0.02)


def test_a_ladder_is_trained_and_observed_as_the_runs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "STEPS", 40)
    setting = ladders.Setting("plain", 1e-2, seed=1)
    other = ladders.Setting("repeated", 3e-2, seed=2, repeat=1)
    ladder = ladders.Ladder("x", "set-on", "help", "pre", 1, 0.99, 5, (setting, other))
    found = watched.train(ladder)
    assert [record["kind"] for record in found] == ["reference", "plain", "repeated"]
    assert [len(record["curve"]) for record in found] == [2, 2, 2]
    seen = found[1]["seen"]
    assert set(seen) == {"0", "26", "36"}
    assert 0 < seen["36"]["update/median"] <= seen["36"]["update/max"] < 1
    assert seen["36"]["lag/max"] > 0.1
    assert math.isfinite(seen["36"]["sharpness"])
    assert seen["36"]["weight/head"] > seen["0"]["weight/head"]
    assert found[2]["curve"][-1] < found[1]["curve"][-1]  # one batch is learnt by heart


def test_the_grid_has_both_parts_apart() -> None:
    parts = {
        part: [ladder for ladder in ladders.LADDERS if ladder.part == part] for part in ("set-on", "held-out")
    }
    assert sum(len(ladder.settings) for ladder in ladders.LADDERS) >= 60
    texts, seeds = (
        [{getattr(ladder, name) for ladder in each} for each in parts.values()] for name in ("text", "seed")
    )
    assert not texts[0] & texts[1]
    assert not seeds[0] & seeds[1]
    shared = [(a, b) for a in parts["set-on"] for b in parts["held-out"] if a.scheme == b.scheme]
    assert [a.scheme for a, _ in shared] == ["pre", "post"]
    assert all(a.depth != b.depth and a.beta2 != b.beta2 for a, b in shared)
