"""Tests of the rule that decides a forecast: measured states, synthetic curves, both sides of thresholds."""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from normscope.forecast import rule
from normscope.forecast.margins import at_full_rate, last_diversity, pace, pull, sinking_diversity
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import Decision
from normscope.forecast.thresholds import PARTED, TIME_CONSTANT
from normscope.subjects.subject import Baseline
from normscope.subjects.targets import Hidden
from normscope.train import CRITERION_STEPS, MARGIN, Recipe, rate_factor, trains


def decide(curve: Sequence[ForecastStep], loss: float | None, **options: Any) -> Decision:
    """The decision with this loss to beat, of a mean cross-entropy."""
    return rule.decide(curve, Baseline.of(loss, None), **options)


def curve(diversity: float, coherence: float, aligned: float) -> list[ForecastStep]:
    start = ForecastStep(0, None, 5.9, {"encoder": 0.06})
    return [start, ForecastStep(20, 3.3, 3.3, {"encoder": diversity}, coherence, alignment=aligned)]


@pytest.mark.parametrize(
    ("diversity", "coherence", "aligned", "outcome"),
    [
        (1.1e-7, 0.02, 0.009, "collapses"),  # nn.TransformerEncoder, 12 layers, d 256, Adam 3e-4: measured
        (1.1e-14, 0.04, 0.000, "collapses"),  # the same at 1e-3
        (1.1e-14, 0.90, 0.100, "collapses"),  # below float32's resolution: the agreement means nothing
        (9.3e-5, 0.10, 0.016, "trains"),  # the same at 1e-4
        (5.0e-5, 0.38, 0.092, "trains"),  # GPT-2 124M at 3e-4
        (4.3e-5, 0.56, 0.051, "trains"),  # OPT, 12 layers, d 128, Post-LN, 3e-4
        (2.0e-6, 0.03, 0.003, "collapses"),  # nn.TransformerEncoder, 24 layers, d 128, Adam 1e-4
        (1.3e-9, 0.25, 0.013, "collapses"),  # 12 layers, d 128, Adam 1e-3: agreeing on very little
        (2.4e-1, 0.17, -0.014, "trains"),  # BERT, 12 layers, d 128, 1e-4
        (3.0e-4, -0.05, 0.0, "plateau"),  # not far down, but nothing pulls tokens apart
        (1.0e-4, 0.05, 0.003, "undecided"),  # between noise and enough
        (
            2.0e-7,
            0.32,
            0.020,
            "collapses",
        ),  # the first again with another seed
        (4.4e-7, 0.40, 0.021, "collapses"),  # 10 layers, d 96, Adam 1e-3: agreeing, and stuck all the same
    ],
)
def test_the_rule_on_measured_states(
    diversity: float, coherence: float, aligned: float, outcome: str
) -> None:
    assert decide(curve(diversity, coherence, aligned), 3.313).outcome == outcome


def test_a_run_without_a_sign_of_failure_is_told_with_its_figures_only() -> None:
    said = decide([ForecastStep(0, None, 5.57, {"x": 0.19}), ForecastStep(20, 5.5, 5.4, {"x": 0.0055})], None)
    assert said.outcome == "trains"
    assert said.reason.startswith(
        "no sign of failure in 20 steps: the loss of the first batch goes from 5.57 to 5.40, the token"
    )
    assert said.reason.endswith("from 0.19 to 0.0055")


def test_a_run_whose_tokens_hardly_differ_is_not_said_to_show_no_sign_of_failure() -> None:
    said = decide(curve(9.3e-5, 0.10, 0.016), 3.313)
    assert said.outcome == "trains"
    assert said.reason.startswith("the tokens hardly differ after 20 steps: the loss of the first batch goes")
    assert said.reason.endswith("; but batches agree on separating the tokens (pull 0.15, 0.03 needed)")


@pytest.mark.parametrize("step", [1, 3, 9, 10])
def test_a_few_steps_do_not_tell_that_a_run_trains(step: int) -> None:
    for states in (
        [ForecastStep(0, None, 5.57, {"x": 0.19}), ForecastStep(step, 5.57, 5.57, {"x": 0.0055})],
        [
            ForecastStep(0, None, 5.57, {"x": 0.19}),
            ForecastStep(step, 5.57, 5.57, {"x": 1e-4}, coherence=0.9, alignment=0.1),
        ],
    ):
        said = decide(states, 3.313)
        assert said.outcome == ("trains" if step >= 10 else "undecided")
        alike = last_diversity(states[-1]) < PARTED
        sign = (
            f"the tokens hardly differ after {step} steps" if alike else f"no sign of failure in {step} steps"
        )
        assert said.reason.startswith(sign)
        assert not said.in_doubt


def test_without_token_ids_nothing_but_a_dead_end_is_reported() -> None:
    assert decide(curve(1e-6, 0.0, 0.0), None, tokens=False).outcome == "undecided"
    assert decide(curve(0.5, 0.9, 0.1), None, tokens=False).outcome == "undecided"
    assert decide(curve(1e-12, 0.9, 0.1), None, tokens=False).outcome == "collapses"
    start, risen = ForecastStep(0, None, 0.7, {}), ForecastStep(20, 1.4, 1.4, {"vit": 0.5})
    assert decide([start, risen], None).outcome == "diverges"
    assert decide([start, risen], None, tokens=False).outcome == "undecided", "random labels"


def test_a_loss_that_stopped_at_the_unigram_entropy_is_a_plateau_where_nothing_else_is_known() -> None:
    states = [ForecastStep(step, loss, loss, {}) for step, loss in [(0, 5.9), (60, 3.35), (120, 3.34)]]
    assert decide(states, 3.313).outcome == "plateau"
    assert decide(states, None).outcome == "undecided"
    assert decide([states[0], ForecastStep(20, 3.35, 3.35, {})], 3.313).outcome == "undecided"


def test_a_second_measurement_settles_a_doubt() -> None:
    once = curve(1e-4, 0.09, 0.005)
    again = ForecastStep(25, 3.3, 3.3, {"encoder": 1e-4}, 0.13, alignment=0.005)
    assert decide([*once, again], 3.313).outcome == "trains"


def paced(*excesses: float, steps: int = 40, entropy: float = 3.0) -> list[ForecastStep]:
    """A healthy run's curve; `excesses` are its loss over the entropy at the start, half way and the end."""
    first, half, last = (entropy + excess for excess in excesses)
    return [
        ForecastStep(0, None, first, {"x": 0.5}),
        ForecastStep(steps // 2, half, half, {"x": 0.4}, recent_loss=half),
        ForecastStep(steps, last, last, {"x": 0.3}, 0.0, alignment=0.0, recent_loss=last),
    ]


def test_pace_is_the_falls_share_of_a_time_constant() -> None:
    states = paced(2.4, 2.0, 2.0 * math.exp(-20 / TIME_CONSTANT))
    assert pace(states, Baseline(3.0)) == pytest.approx(1.0)
    assert pace(states, Baseline(None)) is None
    assert pace(paced(0.4, 0.4, 0.4), Baseline(3.0)) is None, "a start at the unigram entropy has no pace"
    assert pace(paced(2.4, 0.7, 0.7), Baseline(3.0)) is None, "nor has a run that has come near it"
    assert pace(states, Baseline(3.0), warmup=40) > 1.0, "steps of a warm-up are worth less"


@pytest.mark.parametrize(("fall", "outcome"), [(0.9, "slow"), (1.1, "trains"), (-0.5, "slow")])
def test_a_healthy_run_that_falls_too_slowly_is_slow(fall: float, outcome: str) -> None:
    said = decide(paced(2.4, 2.0, 2.0 * math.exp(-fall * 20 / TIME_CONSTANT)), 3.0)
    assert (said.outcome, said.score > 0, said.failed) == (outcome, outcome == "trains", False)


@pytest.mark.parametrize(
    ("diversity", "sign"), [(0.3, "no sign of failure, but"), (5e-4, "the tokens hardly differ, and")]
)
def test_a_slow_run_says_whose_its_losses_are(diversity: float, sign: str) -> None:
    start, half, end = paced(2.4, 2.1, 2.0)
    half = dataclasses.replace(half, diversity={"x": diversity})
    end = dataclasses.replace(end, diversity={"x": diversity}, coherence=0.1, loss=4.7)
    losses = f"{start.loss:.2f} (of the first batch) to {end.recent_loss:.2f} (mean of the last batches)"
    assert decide([start, half, end], 3.0).reason.startswith(f"{sign} the loss goes from {losses} in")


@pytest.mark.parametrize("warmup", [0, 1, 7, 40, 300])
def test_steps_at_full_rate_are_the_sum_of_the_schedule(warmup: int) -> None:
    config = Recipe(warmup=warmup)
    for steps in (0, 1, 6, 7, 8, 39, 60):
        full = sum(rate_factor(config, step) for step in range(steps))
        assert at_full_rate(steps, warmup) == pytest.approx(full)


def test_diversity_that_still_sinks_after_the_transient_counts_for_less() -> None:
    def sinking(*seen: tuple[int, float]) -> list[ForecastStep]:
        return [ForecastStep(step, 3.0, 3.0, {"x": diversity}) for step, diversity in seen]

    assert sinking_diversity(sinking((0, 1e-1), (20, 1e-4))) == 1e-4
    assert sinking_diversity(sinking((20, 1e-4), (30, 1e-5))) == pytest.approx(1e-6)
    assert sinking_diversity(sinking((20, 1e-4), (30, 1e-3))) == 1e-3, "rising adds nothing"
    assert sinking_diversity(sinking((20, 0.0), (30, 0.0))) == 0.0


def test_a_score_is_over_zero_where_a_run_is_said_to_train_and_nowhere_else() -> None:
    generator = random.Random(0)
    outcomes = set()
    for _ in range(2000):
        first, half, last = sorted((generator.uniform(-0.5, 3.0) for _ in range(3)), reverse=True)
        diversity = 10 ** generator.uniform(-15, 0)
        states = [
            ForecastStep(0, None, 3 + first, {"x": 0.5}),
            ForecastStep(20, 3 + half, 3 + half, {"x": diversity}, recent_loss=3 + half),
            ForecastStep(
                40,
                3 + last,
                3 + last,
                {"x": diversity},
                generator.uniform(-0.2, 1),
                alignment=generator.uniform(-0.1, 0.2),
                recent_loss=3 + last - generator.choice((0.0, 0.5)),
            ),
        ]
        said = decide(states, 3.0)
        outcomes.add(said.outcome)
        if said.outcome != "undecided":
            assert (said.score > 0) == (said.outcome == "trains"), said
    assert outcomes == {"trains", "slow", "plateau", "collapses", "undecided"}


def test_a_loss_diverges_where_the_state_and_the_batch_both_say_so() -> None:
    def outcome(loss: float, train_loss: float, entropy: float | None = None) -> str:
        states = [ForecastStep(0, None, 2.0, {"x": 0.5}), ForecastStep(20, train_loss, loss, {"x": 0.5})]
        return decide(states, entropy).outcome

    assert outcome(3.1, 3.1) == "diverges"
    assert outcome(3.1, 2.9) == "trains", "the last batch alone may be a hard one"
    assert outcome(2.9, 3.1) == "trains"
    assert outcome(math.nan, 2.0) == outcome(2.0, math.inf) == "diverges"


def test_a_loss_is_under_the_entropy_where_state_batch_and_mean_all_are() -> None:
    def reason(loss: float, train_loss: float, recent: float) -> str:
        start = ForecastStep(0, None, 3.2, {"x": 0.5})
        last = ForecastStep(20, train_loss, loss, {"x": 0.5}, recent_loss=recent)
        return decide([start, last], 3.0).reason

    assert "under the unigram entropy" in reason(2.89, 2.89, 2.89)
    for figures in [(2.95, 2.8, 2.8), (2.8, 2.95, 2.8), (2.8, 2.8, 2.95)]:
        assert "under the unigram entropy" not in reason(*figures)


@pytest.mark.parametrize(("diversity", "outcome"), [(1e-4, "plateau"), (5e-6, "collapses")])
def test_what_does_not_part_its_tokens_is_named_by_how_alike_they_are(diversity: float, outcome: str) -> None:
    states = curve(diversity, -0.05, 0.0)
    assert decide(states, None).outcome == outcome


def test_agreement_makes_up_for_pace() -> None:
    slow = paced(2.4, 2.0, 2.0 * math.exp(-0.9 * 20 / TIME_CONSTANT))
    agreed = ForecastStep(
        40, slow[-1].loss, slow[-1].loss, {"x": 0.3}, 0.5, alignment=0.0, recent_loss=slow[-1].loss
    )
    assert decide(slow, 3.0).outcome == "slow"
    assert decide([*slow[:-1], agreed], 3.0).outcome == "trains"
    once, none = ForecastStep(20, 5.0, 5.0, {"x": 0.4}, 0.5, alignment=0.0, recent_loss=5.0), [slow[0]]
    mean = decide([*none, once, slow[-1]], 3.0).score
    assert mean == pytest.approx(0.9 + 0.3 * 0.25 - 1), "the mean of what was measured, 0.5 and 0"


def test_a_larger_rate_speaks_for_a_slow_one_by_so_much_and_no_more() -> None:
    slow = paced(2.4, 2.0, 2.0 * math.exp(-0.9 * 20 / TIME_CONSTANT))
    assert decide(slow, 3.0, ahead=3.28).score == pytest.approx(-0.1), "at NEAR it says nothing"
    assert decide(slow, 3.0, ahead=3.24).score == pytest.approx(0.1)
    assert decide(slow, 3.0, ahead=2.5).score == pytest.approx(0.4), "MOST_LEAD"
    assert decide(slow, 3.0, ahead=3.48).score == pytest.approx(-1.1)


def test_the_figures_are_those_of_the_last_stack() -> None:
    states = [
        ForecastStep(0, None, 5.9, {"encoder": 0.5, "decoder": 0.5}),
        ForecastStep(20, 3.3, 3.3, {"encoder": 1e-12, "decoder": 0.5}),
    ]
    assert decide(states, None).outcome == "trains"


def test_alignment_weighs_three_times_coherence() -> None:
    assert pull(ForecastStep(20, 3.0, 3.0, {}, coherence=0.1, alignment=0.02)) == pytest.approx(0.16)
    assert pull(ForecastStep(20, 3.0, 3.0, {}, coherence=0.1)) is None


def test_a_loss_that_rests_over_the_unigram_entropy_is_no_plateau_of_it() -> None:
    states = [ForecastStep(step, loss, loss, {}) for step, loss in [(0, 5.9), (60, 4.0), (120, 4.0)]]
    assert decide(states, 3.313).outcome != "plateau"


@pytest.mark.parametrize(("fall", "outcome"), [(0.9, "slow"), (1.1, "undecided"), (-0.5, "slow")])
def test_a_masked_model_is_not_said_to_train_before_it_is_under_the_entropy(
    fall: float, outcome: str
) -> None:
    measured = paced(2.4, 2.0, 2.0 * math.exp(-fall * 20 / TIME_CONSTANT))
    assert decide(measured, 3.0, hidden="mask").outcome == outcome
    assert decide(paced(2.0, 0.1, -0.5), 3.0, hidden="mask").outcome == "trains"


@pytest.mark.parametrize("baseline", [3.0, None])
@pytest.mark.parametrize("fall", [0.9, 1.5])
def test_ids_that_look_random_are_undecided_without_a_loss_under_their_entropy(
    fall: float, baseline: float | None
) -> None:
    measured = paced(2.4, 2.0, 2.0 * math.exp(-fall * 20 / TIME_CONSTANT))
    found = decide(measured, baseline, hidden="random")
    assert decide(measured, baseline).outcome in ("slow", "trains")
    assert (found.outcome, found.score) == ("undecided", None)
    assert (
        f"below {'that of equally likely ids' if baseline is None else 'the unigram entropy, 3,'}"
        in found.reason
    )
    assert decide(paced(2.0, 0.1, -0.5), 3.0, hidden="random").outcome == "trains"
    assert decide(paced(2.0, 0.1, -0.5), None, hidden="random").outcome == "undecided"


@pytest.mark.parametrize("steps", [20, CRITERION_STEPS])
def test_noise_has_no_agreement_so_random_ids_fail_by_their_collapse_alone(steps: int) -> None:
    def outcomes(diversity: float) -> list[str]:
        state = {"x": diversity}
        steps_measured = [ForecastStep(0, None, 3.6, state), ForecastStep(steps // 2, 3.5, 3.5, state)]
        last = ForecastStep(steps, 3.5, 3.5, state, coherence=0.0, alignment=0.0, recent_loss=3.5)
        return [decide([*steps_measured, last], 3.0, hidden=hidden).outcome for hidden in ("", "random")]

    assert outcomes(1e-4) == ["plateau", "undecided"]
    assert outcomes(1e-12) == ["collapses", "collapses"]


def test_a_number_that_is_predicted_from_ids_that_look_random_is_judged_as_any_other() -> None:
    measured = paced(2.4, 2.0, 2.0 * math.exp(-1.5 * 20 / TIME_CONSTANT))
    squared = Baseline.of(None, 2.0)
    assert rule.decide(measured, squared, hidden="random") == rule.decide(measured, squared)


def test_a_sum_over_targets_that_look_random_is_judged_as_their_mean() -> None:
    measured = [
        dataclasses.replace(each, loss=64 * each.loss, recent_loss=each.recent_loss and 64 * each.recent_loss)
        for each in paced(2.4, 2.0, 2.0 * math.exp(-1.5 * 20 / TIME_CONSTANT))
    ]
    found = rule.decide(measured, Baseline.of(3.0, None, unit=64.0), hidden="random")
    assert found.outcome == "undecided"
    assert "the unigram entropy × 64, 192," in found.reason


@pytest.mark.parametrize(
    ("last", "half", "diversity", "outcome"),
    [
        (2.8, 3.0, 0.1, "trains"),
        (3.0, 3.0, 0.1, "undecided"),  # at the entropy, where noise stays
        (3.5, 5.0, 0.1, "undecided"),
        (3.0, 3.0, 1e-11, "collapses"),
    ],
)
def test_a_whole_run_on_ids_that_look_random_fails_by_a_collapse_alone(
    last: float, half: float, diversity: float, outcome: str
) -> None:
    measured = whole_run(last, half, diversity=diversity)
    assert decide(measured, 3.0, hidden="random").outcome == outcome


def test_a_model_without_a_stack_is_not_stuck_at_the_entropy_of_random_ids() -> None:
    states = [ForecastStep(step, loss, loss, {}) for step, loss in [(0, 5.9), (60, 3.0), (120, 3.0)]]
    assert decide(states, 3.0).outcome == "plateau"
    assert decide(states, 3.0, hidden="random").outcome == "undecided"


def whole_run(last: float, half: float, steps: int = CRITERION_STEPS, diversity: float = 0.1):
    """A trial that is as long as a run, with these mean losses half-way and at its end."""
    state = {"x": diversity}
    first = ForecastStep(0, None, 5.5, state)
    middle = ForecastStep(steps // 2, half, half, state, recent_loss=half)
    return [first, middle, ForecastStep(steps, last, last, state, 0.2, alignment=0.1, recent_loss=last)]


@pytest.mark.parametrize("hidden", ["", "mask"])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("diversity", [0.1, 1e-5, 1e-12])
def test_a_trial_as_long_as_a_run_is_judged_by_its_last_losses_alone(
    diversity: float, tokens: bool, hidden: Hidden
) -> None:
    generator = random.Random(0)
    for _ in range(50):
        last = 3.0 + generator.uniform(-0.3, 0.3)
        half = last + generator.uniform(-0.2, 0.6)
        found = decide(whole_run(last, half, diversity=diversity), 3.0, tokens=tokens, hidden=hidden)
        assert (found.outcome == "trains") == trains([last] * CRITERION_STEPS, 3.0)
        assert found.is_whole
        assert not (hidden and found.outcome == "plateau"), "a masked model leaves the entropy later"
        assert found.score == pytest.approx(3.0 - MARGIN - last)
        assert found.outcome != "undecided"


def test_the_unit_of_a_squared_error_scales_what_a_whole_run_must_get_under() -> None:
    for last, outcome in ((0.44, "trains"), (0.46, "slow"), (0.495, "plateau")):
        found = rule.decide(whole_run(last, last), Baseline.of(None, 0.5), tokens=False)
        assert found.outcome == outcome


@pytest.mark.parametrize(
    ("last", "half", "outcome"),
    [
        (3.0, 3.05, "plateau"),  # at the entropy, and no longer falling
        (3.0, 3.4, "slow"),  # at the entropy, on its way down
        (4.0, 4.05, "slow"),  # far above it, however slowly it falls
        (2.92, 2.95, "slow"),  # under it, so that it uses its input
    ],
)
def test_a_whole_run_that_does_not_train_is_stuck_at_the_entropy_or_slow(
    last: float, half: float, outcome: str
) -> None:
    assert decide(whole_run(last, half), 3.0).outcome == outcome


def test_the_loss_of_a_whole_run_is_said_once() -> None:
    for tokens in (True, False):
        for last in (2.5, 2.99, 3.05, 3.5):
            said = decide(whole_run(last, last), 3.0, tokens=tokens).reason
            assert said.count("the mean loss of the last batches") == 1


def test_a_mean_loss_that_is_not_known_decides_no_whole_run() -> None:
    last = dataclasses.replace(whole_run(2.5, 2.6)[-1], recent_loss=math.nan)
    assert not decide([*whole_run(2.5, 2.6)[:-1], last], 3.0).is_whole


def test_a_shorter_trial_is_no_whole_run_and_without_a_baseline_none_is() -> None:
    assert not decide(whole_run(3.0, 3.4, CRITERION_STEPS - 2), 3.0).is_whole
    assert not decide(whole_run(3.0, 3.4), None).is_whole


@pytest.mark.parametrize(
    ("steps", "above", "is_shown"), [(140, -0.02, False), (140, -0.11, True), (60, 0.0, True)]
)
def test_a_long_trial_whose_loss_stands_at_the_entropy_is_not_sure(
    steps: int, above: float, is_shown: bool
) -> None:
    """A rate that is too large: tokens differ, nothing fails, and the loss falls no further."""
    first, last = ForecastStep(0, None, 4.0, {"x": 0.5}), 3.0 + above
    states = [ForecastStep(step, last, last, {"x": 0.1}, recent_loss=last) for step in (steps // 2, steps)]
    said = decide([first, *states], 3.0)
    assert said.outcome == "trains"
    assert said.is_shown is is_shown
    assert ("is not 0.1 under the unigram entropy, 3, yet" in said.reason) is not is_shown
    assert decide([first, *states], None).is_shown, "nothing is known that it should be under"
