"""Each alarm: series that raise it, and twins that do not."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from streams import codes, raised

from normscope.monitor.alarms import ALARMS, NOT_MEASURED
from normscope.rules import Severity

RNG = np.random.default_rng(0)
T = np.arange(400.0)
NOISE = RNG.normal(size=400)
TAILS = RNG.standard_t(5, size=400)
LOSS = 2 + 5 * np.exp(-T / 80) + 0.05 * NOISE
GRADIENT = np.exp(0.15 * NOISE)
FALLS = np.exp(-T / 30 + 0.03 * NOISE)
OPENS = 0.25 * 280 ** np.clip((T - 50) / 12, 0, 1) * np.exp(0.1 * NOISE)
AWAKES = 0.4 * 2.5 ** np.clip((T - 180) / 15, 0, 1) * np.exp(0.1 * NOISE)


def at(series: np.ndarray, step: int | slice, value: float) -> np.ndarray:
    """The series with another value at step `step` (from 1), or at a slice of places."""
    changed = np.array(series, dtype=float)
    changed[step if isinstance(step, slice) else step - 1] = value
    return changed


@dataclass(frozen=True)
class Row:
    """A case: series, and the alarm that they raise at which step; None for twins."""

    name: str
    series: dict[str, Any]
    code: str | None = None
    step: int | None = None
    every: int = 1
    notes: dict[str, Any] = field(default_factory=dict)


H = "stream/diversity@decoder.hidden"
LR = np.full(400, 1e-3)
COSINE = 1e-3 * (0.51 + 0.49 * np.cos(np.pi * T / 400))
WARMUP = 1e-3 * np.minimum(1, (T + 1) / 100)
SHARP, SHARP_LOGIT = "attention/entropy@b", "attention/max-logit@b"
AWAKE = np.where(T < 15, 5.0, 150.0)
RATIO = "branch/update-ratio@b.0"
QUIET = 0.01 + 0 * T
FORGETS = 0.98 ** (-5 * T)  # √v with β2 = 0.98, rows 10 steps apart
DOUBLES = 2.0 ** (T / 15)  # every 150 steps where rows are 10 steps apart

CASES = [
    Row("nan", {"loss": at(LOSS, 7, math.nan)}, "NS801", 7),
    Row("infinity", {"x@b": at(LOSS, 1, -math.inf)}, "NS801", 1),
    Row("nan-that-stays", {"loss": at(LOSS, slice(50, None), math.nan)}, "NS801", 51),
    Row("skipped-infinity", {"skipped": at(0 * T, 5, 1), "gradient/norm": at(GRADIENT, 5, math.inf)}),
    Row("skipped-loss", {"skipped": at(0 * T, 5, 1), "loss": at(LOSS, 5, math.nan)}, "NS801", 5),
    Row("infinity-not-skipped", {"skipped": 0 * T, "gradient/norm": at(GRADIENT, 5, math.inf)}, "NS801", 5),
    Row("garbage", {"weight/norm@b": at(1 + 0 * T, 90, -1e30)}, "NS802", 90),
    Row("large", {"weight/norm@b": 9e17 + 0 * T}),
    Row("skips", {"skipped": at(0 * T, slice(100, 150), 1)}, "NS803", 117),
    Row("skips-at-start", {"skipped": at(0 * T, slice(0, 16), 1)}),
    Row("rescued", {"rescued": at(at(0 * T, slice(50, 54), 1), 149, 1)}, "NS816", 149),
    Row("rescued-apart", {"rescued": at(at(0 * T, slice(50, 54), 1), 151, 1)}),
    Row("rescue-given-up", {"rescued": at(0 * T, 90, 2)}, "NS816", 90),
    Row("loss-spike", {"loss": at(LOSS, 200, 5)}, "NS804", 200),
    Row("loss-odd-batch", {"loss": at(LOSS, 340, 2.95)}),
    Row("loss-odd-batches", {"loss": at(at(LOSS, 340, 2.95), 343, 2.95)}, "NS804", 343),
    Row("loss-spike-that-stays", {"loss": at(LOSS, slice(199, None), 7)}, "NS804", 200),
    Row("negative-loss-spike", {"loss": at(LOSS - 100, 300, -60)}, "NS804", 300),
    Row("loss-spike-near-0", {"loss": at(0.01 * np.exp(0.3 * NOISE), 200, 0.2)}, "NS804", 200),
    Row("loss-near-0", {"loss": 0.01 * np.exp(0.4 * NOISE)}),
    Row("loss", {"loss": LOSS}),
    Row("loss-rises", {"loss": LOSS + np.maximum(0, T - 250) / 80}, "NS815"),
    Row("loss-rises-from-the-start", {"loss": 3 + T / 200 + 0.05 * NOISE}, "NS815"),
    Row("loss-restarts", {"loss": LOSS + 0.15 * (T % 100 < 40)}),
    Row("loss-constant", {"loss": 2 + 1e-9 * NOISE}),
    Row("loss-zero", {"loss": 0 * T}),
    Row("loss-outlier-down", {"loss": at(LOSS, 200, 0.1)}),
    Row("loss-step-down", {"loss": np.where(T < 200, 3, 1) + 0.05 * NOISE}),
    Row("loss-small-step-up", {"loss": np.where(T < 200, 3, 3.2) + 0.02 * NOISE}),
    Row("loss-rises-slowly", {"loss": 2 + T / 2500 + 0.05 * NOISE}),
    Row("gradient-spike", {"gradient/norm": at(GRADIENT, 200, 30)}, "NS805", 200),
    Row("block-spike", {"gradient/block@b.1": at(GRADIENT, 200, 30)}, "NS805", 200),
    Row("gradient-blip", {"gradient/norm": at(GRADIENT, 200, 8), "gradient/block@b": at(GRADIENT, 200, 8)}),
    Row("gradient-blip-returns", {"gradient/norm": at(at(GRADIENT, 200, 8), 204, 8)}, "NS805", 204),
    Row("gradient-blips-apart", {"gradient/norm": at(at(GRADIENT, 200, 8), 205, 8)}),
    Row("gradient", {"gradient/norm": GRADIENT}),
    Row("gradient-tails", {"gradient/norm": np.exp(0.1 * TAILS)}),
    Row("gradient-early", {"gradient/norm": (1 + 20 * np.exp(-T / 10)) * GRADIENT}),
    Row("gradient-warms-up", {"gradient/norm": np.minimum(1, (T + 1) / 100) * GRADIENT}),
    Row("gradient-decays", {"gradient/norm": GRADIENT / (1 + T)}),
    Row("gradient-starts-late", {"gradient/norm": np.where(T < 100, 0, GRADIENT)}),
    Row("gradient-step", {"gradient/norm": np.where(T < 200, 1, 3) * GRADIENT}),
    Row("gradient-spike-while-it-falls", {"gradient/norm": at(FALLS, 200, 20 * FALLS[199])}, "NS805", 200),
    Row("gradient-opens", {"gradient/norm": OPENS}),
    Row("gradient-awakes", {"gradient/norm": at(at(AWAKES, 200, 3.6), 201, 2.9)}),
    Row("update-spike", {"lr": LR, "update/ratio@norm": at(1e-3 * GRADIENT, 200, 2e-2)}, "NS806", 200),
    Row("update-warms-up", {"lr": WARMUP, "update/ratio@norm": WARMUP * GRADIENT}),
    Row(
        "update-restarts",
        {"lr": np.where(T % 100 < 50, 1e-3, 1e-5), "update/ratio@n": np.where(T % 100 < 50, 1, 0.01)},
    ),
    Row("update-decays", {"lr": COSINE, "update/ratio@norm": COSINE * GRADIENT}),
    Row(
        "update-at-rate-0",
        {"lr": at(LR, slice(200, 210), 0), "update/ratio@n": at(GRADIENT, slice(200, 210), 0)},
    ),
    Row("stream-doubles", {"stream/rms@b": DOUBLES[:100]}, "NS807", every=10),
    Row("weight-doubles", {"lr": LR[:100], "weight/norm@b": DOUBLES[:100]}, "NS807", every=10),
    Row(
        "logit-doubles",
        {"attention/max-logit@b": np.exp(0.05 * NOISE[:130]) * DOUBLES[:130]},
        "NS807",
        every=10,
    ),
    Row("logit-doubles-small", {"attention/max-logit@b": np.minimum(20, DOUBLES)}, every=10),
    Row("stream-grows-linearly", {"stream/rms@b": (T + 1) / 10}, every=10),
    Row("weight-grows-from-zero", {"weight/norm@b": T**2}, every=10),
    Row("weight-warms-up", {"lr": WARMUP, "weight/norm@b": np.cumsum(WARMUP)}, every=10),
    Row("branch-doubles", {RATIO: 0.1 * DOUBLES[:90]}, "NS807", every=10),
    Row("branch-doubles-ever-faster", {RATIO: 0.1 * 2.0 ** (T[:60] ** 2 / 500)}, "NS807", every=10),
    Row("branch-awakes", {RATIO: np.minimum(0.9, 0.05 * DOUBLES)}, every=10),
    Row("branch-grows-from-zero", {RATIO: 1e-3 * T}, every=10),
    Row(
        "weight-restarts",
        {"lr": np.where(T < 100, 1e-4, 1e-2), "weight/norm@b": np.cumsum(np.where(T < 100, 1e-4, 1e-2))},
        every=10,
    ),
    Row("stream-steps-up", {"stream/rms@b": np.where(T < 200, 1, 8)}, every=10),
    Row("stream-noisy", {"stream/max@b": np.exp(0.3 * TAILS)}, every=10),
    Row("stream-shrinks", {"stream/rms@b": 1 / DOUBLES}, every=10),
    Row("collapse", {H: np.maximum(1e-9, 10.0 ** (-T / 10))}, "NS808", every=10),
    Row("collapse-transient", {H: np.where(T < 25, 1e-8, 0.1)}),
    Row("collapse-one-value", {H: at(0.1 + 0 * T, 30, 1e-7)}, every=10),
    Row("collapsed-from-the-start", {H: 4e-15 * (1 + T / 100)}, every=10),
    Row("diversity-low", {H: 1e-5 * GRADIENT}, every=10),
    Row("inner-block-low", {"stream/diversity@b.0": 1e-8 + 0 * T, H: 0.1 + 0 * T}, every=10),
    Row("no-tokens", {H: 1e-8 + 0 * T}, every=10, notes={"tokens": False}),
    Row("stuck", {"loss": 6.02 + 0.03 * NOISE}, "NS809", 100, notes={"entropy": 6.0}),
    Row("passes-entropy", {"loss": 7 - T / 400 + 0.03 * NOISE}, notes={"entropy": 6.5}),
    Row("above-entropy", {"loss": 6.3 + 0.03 * NOISE}, notes={"entropy": 6.0}),
    Row("slow-under-entropy", {"loss": 5.97 - T / 20000 + 0.03 * NOISE}, notes={"entropy": 6.0}),
    Row("under-entropy", {"loss": 5.7 + 0.03 * NOISE}, notes={"entropy": 6.0}),
    Row("entropy-unknown", {"loss": 6.0 + 0.03 * NOISE}),
    Row("branch-dies", {RATIO: np.where(T < 100, 0.3, 0.001)}, "NS810", 1050, every=10),
    Row("branch-zero", {RATIO: np.where(T < 100, 0.3, 0.0)}, "NS810", 1050, every=10),
    Row("branch-declines", {RATIO: 0.3 / (1 + T / 20)}, every=10),
    Row("branch-starts-at-zero", {RATIO: np.where(T < 50, 0.0, 0.05)}, every=10),
    Row("branch-small", {RATIO: 0.005 * GRADIENT}, every=10),
    Row("gains-decay", {"gain/rms@b.norm": np.exp(-T / 100)}, "NS811", every=10),
    Row("gains", {"gain/rms@b.norm": 1 - 0.3 * T / 400}, every=10),
    Row(
        "headroom-ends", {"stream/max@b": 30 * 2.0 ** (T / 12)}, "NS812", every=10, notes={"dtype": "float16"}
    ),
    Row("headroom-small", {"stream/max@b": 10000 * GRADIENT}, every=10, notes={"dtype": "float16"}),
    Row("headroom-bits", {"precision/float16-headroom": 6 - T / 50}, "NS812", every=10),
    Row("bfloat16", {"stream/max@b": 1e6 * GRADIENT}, every=10, notes={"dtype": "bfloat16"}),
    Row("freeze", {"update/lost@norm": np.where(T < 50, 0.2, 0.9)}, "NS813", 550, every=10),
    Row("no-gradient-in-float32", {"update/lost@norm": 1 + 0 * T}, every=10, notes={"weights": "float32"}),
    Row(
        "entropy-collapses", {SHARP: np.where(T < 20, 0.6, 0.01), SHARP_LOGIT: AWAKE}, "NS819", 230, every=10
    ),
    Row("sharp-heads", {SHARP: np.where(T < 20, 0.6, 0.01), SHARP_LOGIT: 0.5 * AWAKE}, every=10),
    Row("sharp-by-design", {SHARP: 0.2 - 0.19 * (T > 20), SHARP_LOGIT: AWAKE}, every=10),
    Row("sharp-twice", {SHARP: at(0.6 + 0 * T, slice(30, 32), 0.01), SHARP_LOGIT: AWAKE}, every=10),
    Row("entropy-low", {SHARP: np.where(T < 20, 0.6, 0.06), SHARP_LOGIT: AWAKE}, every=10),
    Row("entropy-alone", {SHARP: np.where(T < 20, 0.6, 0.01)}, every=10),
    Row(
        "sharp-head-of-many",
        {"attention/head-entropy@b.head0": 0.6 - 0.6 * (T > 20), "attention/head-max-logit@b.head0": AWAKE},
        every=10,
    ),
    Row("some-lost", {"update/lost@norm": 0.4 + 0 * T}, every=10),
    Row("adam-forgets", {"adam/lag@mlp": QUIET, "adam/rate@mlp": FORGETS}, "NS817", 190, every=10),
    Row("adam-is-fed", {"adam/lag@mlp": 0.5 + 0 * T, "adam/rate@mlp": FORGETS}, every=10),
    Row(
        "adam-is-fed-once-in-five", {"adam/lag@m": np.where(T % 5, 0.01, 1), "adam/rate@m": FORGETS}, every=10
    ),
    Row("adam-averages", {"adam/lag@mlp": QUIET, "adam/rate@mlp": np.sqrt(T + 1)}, every=10),
    Row("adam-rate-decays", {"adam/lag@mlp": QUIET, "adam/rate@mlp": COSINE * 10 ** (T / 1000)}, every=10),
    Row("lost-at-rate-0", {"lr": 0 * T, "update/lost@norm": 1 + 0 * T}, every=10),
]
TWO = {"headroom-ends", "loss-spike-that-stays"}
"""Cases that rightly raise a second alarm: the growth before the end, and a loss that stays high."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_alarm_is_raised_once_at_its_step_and_not_by_twins(case: Row) -> None:
    found = raised(case.series, every=case.every, notes=case.notes)
    own = [(step, each) for step, each in found if each.code == case.code]
    others = [(step, each.code, each.message) for step, each in found if each.code != case.code]
    assert not others or case.name in TWO, others
    assert len(own) == (case.code is not None), [each.message for _, each in own]
    if case.step is not None:
        assert own[0][0] == case.step


def test_every_alarm_is_raised_by_a_case() -> None:
    assert {case.code for case in CASES} == {None, *ALARMS} - {"NS814"}, "tests of ranks have NS814"


def test_a_weight_that_is_tiny_beside_others_may_double() -> None:
    """A key's bias has no gradient but rounding, and doubles from 1e-4 in healthy runs."""
    others = {f"weight/norm@b.{i}": 50 + 0 * T for i in range(3)}
    assert (
        codes(
            {"weight/norm@b.key.bias": 1e-4 * DOUBLES[:100], **{k: v[:100] for k, v in others.items()}},
            every=10,
        )
        == []
    )
    assert codes(
        {"weight/norm@b.key": DOUBLES[:100], **{k: v[:100] for k, v in others.items()}}, every=10
    ) == ["NS807"]


def test_an_outlier_that_recovers_is_one_alarm_and_the_next_is_another() -> None:
    loss = at(at(LOSS, 200, 6), 203, 6)
    assert [step for step, _ in raised({"loss": loss})] == [200], "three steps later it is the same episode"
    assert [step for step, _ in raised({"loss": at(at(LOSS, 200, 6), 240, 6)})] == [200, 240]


def test_spikes_in_a_row_are_not_absorbed() -> None:
    """The window's median stays: 30 spikes in a row do not move it, so a later one is a spike too."""
    loss = at(at(LOSS, slice(199, 229), 6.0), 255, 6.0)
    (_, second) = [each for each in raised({"loss": loss}) if each[1].code == "NS804"]
    assert second[0] == 255
    assert "median of 2." in second[1].message


def test_a_level_that_stays_becomes_the_new_normal() -> None:
    loss = at(np.where(T < 100, 2, 6) + 0.05 * NOISE, 350, 12)
    assert [step for step, each in raised({"loss": loss}) if each.code == "NS804"] == [101, 350]


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e6])
def test_spikes_do_not_depend_on_the_scale(scale: float) -> None:
    for name, base in (("loss", at(LOSS, 200, 5)), ("gradient/norm", at(GRADIENT, 200, 30))):
        assert [step for step, _ in raised({name: scale * base})] == [200], name


def test_a_spike_names_its_sites_and_the_worst_one_first() -> None:
    blocks: dict[str, Any] = {
        f"gradient/block@b.{i}": at(GRADIENT, 200, value) for i, value in enumerate([1, 20, 90])
    }
    ((step, finding),) = raised({"gradient/norm": at(GRADIENT, 200, 50), **blocks})
    assert (step, finding.sites) == (200, ("b.1", "b.2"))
    assert "gradient/block at b.2 is 90" in finding.message
    assert finding.evidence[0].site == "b.2"
    assert {row.quantity for row in finding.evidence} == {"gradient/norm", "gradient/block"}


def test_slow_alarms_of_many_sites_come_together() -> None:
    series = {f"branch/update-ratio@b.{i}": np.where(T - i < 100, 0.3, 0.001) for i in range(12)}
    found = raised(series, every=10)
    assert [len(each.sites) for _, each in found] == [1, 11], "the first, and after a rest all others"


@pytest.mark.parametrize("first", [math.nan, math.inf])
def test_a_value_that_is_not_finite_enters_no_window(first: float) -> None:
    loss = at(at(LOSS, slice(20, 40), first), 200, 5)
    assert [(step, each.code) for step, each in raised({"loss": loss})] == [(21, "NS801"), (200, "NS804")]


def test_a_nan_of_one_column_does_not_hide_a_later_one_of_another() -> None:
    series = {"gain/rms@b": math.nan + 0 * T, "loss": at(LOSS, slice(49, None), math.nan)}
    assert [(step, each.evidence[0].quantity) for step, each in raised(series)] == [
        (1, "gain/rms"),
        (50, "loss"),
    ]
    series = {"weight/norm@b": 1e30 + 0 * T, "x@b": at(1 + 0 * T, slice(49, None), 1e30)}
    assert [step for step, each in raised(series) if each.code == "NS802"] == [1, 50]


def test_a_nan_that_spreads_is_one_alarm_at_once_and_one_for_the_rest() -> None:
    series = {f"stream/rms@b.{i}": at(1 + 0 * T, slice(99 + i, None), math.nan) for i in range(12)}
    assert [(step, len(each.sites)) for step, each in raised(series)] == [(100, 1), (121, 11)]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e30])
def test_one_wrong_value_soon_after_that_of_another_column_is_an_alarm_of_its_own(wrong: float) -> None:
    series = {"loss": at(1 + 0 * T, 50, wrong), "x@b": at(1 + 0 * T, 58, wrong)}
    found = [(step, each.evidence[0].quantity) for step, each in raised(series)]
    assert found == [(50, "loss"), (58, "x")]


def test_a_wrong_value_that_comes_while_another_lasts_is_reported_when_both_are_over() -> None:
    series = {"loss": at(1 + 0 * T, slice(49, 60), math.nan), "x@b": at(1 + 0 * T, 58, math.nan)}
    (_, (step, late)) = raised(series)
    assert step == 61
    assert "x at b was NaN at step 58" in late.message
    assert math.isnan(late.evidence[0].value)


@pytest.mark.parametrize("wrong", [math.nan, 1e30])
def test_a_column_that_is_wrong_each_time_it_is_measured_raises_once(wrong: float) -> None:
    values = np.where((T + 1) % 25 == 0, wrong, NOT_MEASURED)
    assert [step for step, _ in raised({"loss": LOSS, "x@b": values})] == [25]


def test_the_steps_to_an_overflow_count_from_the_last_value() -> None:
    """Bits that fall by 0.01 a step and reach 0 at step 605, 195 steps after the alarm."""
    ((step, finding),) = raised({"precision/float16-headroom": 5.95 - T[:45] / 10}, every=10)
    assert step == 410
    assert "at this pace it does so in 195 steps" in finding.message


@pytest.mark.parametrize(
    ("steps", "size", "severities"),
    [((200,), 30, ["note"]), ((200,), 3000, ["note"]), ((200, 203), 30, ["note", "warning"])],
)
def test_a_gradient_that_jumps_once_is_a_note(
    steps: tuple[int, ...], size: float, severities: list[str]
) -> None:
    gradient = GRADIENT
    for step in steps:
        gradient = at(gradient, step, size)
    found = raised({"gradient/norm": gradient})
    assert [(step, str(finding.severity)) for step, finding in found] == list(
        zip(steps, severities, strict=True)
    )


def test_the_growth_of_a_logit_counts_from_100_on() -> None:
    """A logit that reaches 100 at step 855."""
    logit = 100 * 2.0 ** ((T[:90] - 84.5) / 15)
    assert [step for step, _ in raised({"attention/max-logit@b": logit}, every=10)] == [860]


def test_only_a_fall_is_said_to_reduce_a_diversity() -> None:
    (dead,) = [each for _, each in raised({H: np.where(T < 20, 0.1, 1e-12)[:60]}, every=10)]
    assert dead.severity is Severity.ERROR
    assert "reduced" not in dead.evidence[0].how
    (sunk,) = [each for _, each in raised({H: np.where(T < 20, 0.1, 1e-7)[:60]}, every=10)]
    assert "reduced by the last fall" in sunk.evidence[0].how


def test_a_collapse_that_is_over_names_the_value_before_it() -> None:
    ((_, dead),) = raised({H: np.where(T < 1, 0.1, 4e-15 * (1 + T / 100))[:60]}, every=10)
    assert "after 0.1 at step 10" in dead.message


def test_a_zero_scale_of_rounding_alarms_nothing() -> None:
    single = np.float32(0.1) * (1 + 6e-8 * (T % 3))
    assert codes({"loss": single, "gradient/norm": single, "update/ratio@x": single}) == []


def test_heavy_tails_of_20_seeds_raise_two_alarms_at_most() -> None:
    gradient: Callable[[int], np.ndarray] = lambda seed: np.exp(  # noqa: E731
        0.1 * np.random.default_rng(seed).standard_t(5, size=2000)
    )
    counts = [len(codes({"gradient/norm": gradient(seed)})) for seed in range(20)]
    assert sum(counts) <= 2, "one in 17,000 values of a Student-t with 5 degrees is beyond ten deviations"
