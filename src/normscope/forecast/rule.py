"""The decision rule of the forecast: from a trial's curve to its outcome.

A run trains if three margins are above zero. *Pace*: the loss falls towards the unigram entropy fast enough
for 300 steps. *Life*: tokens still differ at the stack's output. *Pull*: batches agree on separating them
further. The smallest margin is the score. A trial as long as a run is judged by the loss at its end alone.
docs/forecast-rule.md names the runs that set the thresholds, and those that tested them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normscope.forecast.margins import (
    above,
    half_way,
    has_learnt,
    last_diversity,
    long_mean,
    margins_of,
    mean_pull,
    mean_shows_it,
    own_baseline,
    pull,
    second_half,
    steadiness,
    with_all_baselines,
)
from normscope.forecast.record import ForecastStep, Outcome
from normscope.forecast.thresholds import (
    BLOWN_UP,
    DEAD,
    DOUBT,
    ENOUGH,
    FAINT,
    FEW,
    HELD,
    LEARNT,
    LONG,
    PARTED,
    SHARED,
    STEADY,
    WORSE,
    WORST,
)
from normscope.subjects.subject import Baseline
from normscope.subjects.targets import Hidden
from normscope.train import CRITERION_STEPS

FIXED = "of the first batch"  # whose loss a measurement has: a reader would take it for that of the data
HIDES = (
    "The input hides the targets, as in a masked language model: whether the loss gets under the unigram "
    "entropy within 300 steps, or stays at it for longer, cannot be told from a trial"
)


@dataclass(frozen=True)
class Decision:
    """An outcome, its reason as a sentence, whether a few more steps may decide it, and the score.

    Attributes:
        is_whole: whether the trial was as long as the run, so that its own loss decided.
        is_shown: whether the loss shows it; False of a trial that is said to train, and whose mean loss is
            not clearly under the loss to beat, if it is long or its tokens are not clearly apart.
    """

    outcome: Outcome
    reason: str
    in_doubt: bool = False
    score: float | None = None
    is_whole: bool = False
    is_shown: bool = True

    @property
    def failed(self) -> bool:
        """Whether the run will not train this way."""
        return self.outcome in ("collapses", "plateau", "diverges")


def decide(
    curve: Sequence[ForecastStep],
    baseline: Baseline,
    *,
    tokens: bool = True,
    hidden: Hidden = "",
    warmup: int = 0,
    ahead: float | None = None,
) -> Decision:
    """The outcome of a trial from its measurements, the last state above all.

    Args:
        curve: the measurements, the first one before the first step.
        baseline: the best loss of a model that ignores its input, and the unit by which losses are compared.
            Of tokens it is the unigram entropy.
        tokens: whether the model is fed token ids. Of other batches the rule asks whether they agree on what
            to learn. If the best loss without the input is unknown (often they are noise with random labels),
            "trains" is never the outcome, and only a collapse is a failure.
        hidden: what hides the targets, see `subjects.targets.hides_targets`. What a masked model gains below
            the unigram entropy comes from attention alone, and often after more than 300 steps. Of ids that
            look random, only a loss under it is decisive: noise stays at it.
        warmup: steps of linear warm-up in the trial.
        ahead: loss of the same model at a larger learning rate, at the progress that this run will have after
            300 steps (see `ladder.ahead`); None where it is unknown.
    """
    curve = with_all_baselines(curve)
    first, last = curve[0], curve[-1]
    losses = [last.loss] if last.train_loss is None else [last.loss, last.train_loss]
    if not all(map(math.isfinite, losses)):
        return Decision("diverges", f"the loss is not finite after {last.step} steps", score=WORST)
    if 0 < (WORSE if tokens else BLOWN_UP) * first.loss < min(losses):
        change = f"from {first.loss:.2f} to {last.loss:.2f}"
        return Decision("diverges", f"the loss {FIXED} went {change} in {last.step} steps", score=WORST)
    if not baseline.is_entropy and hidden == "random":
        hidden = ""  # numbers are predicted, of which the ids say nothing
    found = _by_trial(curve, baseline, tokens, hidden, warmup, ahead)
    is_short = last.step < CRITERION_STEPS or not math.isfinite(last.recent_loss or math.nan)
    if baseline.loss is not None and not is_short:
        found = _by_run(found, curve, baseline, _baseline_name(tokens, baseline), hidden)
    found = _unless_noise(found, last, baseline) if hidden == "random" else found
    sinks = not tokens and last.recent_loss is not None and _hardly_differ(last)
    is_open = found.outcome == "trains" and baseline.loss is not None and (sinks or last.step > LONG)
    if is_open and not mean_shows_it(last, baseline):
        return _not_shown(found, last, baseline, tokens)
    return found


def _not_shown(found: Decision, last: ForecastStep, baseline: Baseline, tokens: bool) -> Decision:
    """The decision on a trial that is said to train, and whose loss does not show it, though it is long.

    It may stay where it is: a rate that is too large lets tokens differ, and the loss stand at the baseline.
    The same holds for a short trial on measured values whose tokens hardly differ.
    """
    own = own_baseline(last, baseline)
    to_beat = beaten(last, baseline, _baseline_name(tokens, baseline))
    said = f"the mean loss of the last batches, {last.recent_loss:.4g}, is not {LEARNT * own.unit:.2g} under "
    return dataclasses.replace(found, reason=f"{found.reason}. But {said}the {to_beat}, yet", is_shown=False)


def _by_trial(
    curve: Sequence[ForecastStep],
    baseline: Baseline,
    tokens: bool,
    hidden: Hidden,
    warmup: int,
    ahead: float | None,
) -> Decision:
    """Decide a run that has not diverged from the margins of its first steps."""
    last = curve[-1]
    margins, name = margins_of(curve, baseline, tokens, warmup, ahead), _baseline_name(tokens, baseline)
    score = max(WORST, min(margins.values())) if margins else None
    if last.diversity and (margins["life"] <= 0 if tokens else last_diversity(last) <= DEAD):
        return _collapsed(curve, score)
    if has_learnt(last, baseline):
        said = _learnt_in_words(last, baseline, name)
        return Decision("trains", said, score=max(score or 0.0, LEARNT))
    if not last.diversity:
        return _by_loss(curve, baseline, margins, name)
    if not tokens:
        return _by_agreement(curve, margins, baseline, name, warmup)
    found = _by_margins(curve, margins, score, name)
    if hidden == "mask" and found.outcome == "trains":
        return Decision("undecided", f"{found.reason}. {HIDES}")
    return found


def _unless_noise(found: Decision, last: ForecastStep, baseline: Baseline) -> Decision:
    """A decision on ids that look random: they may be noise, unless the loss itself shows that they are not.

    A failure that noise does not explain stays one. A plateau may be noise: batches of it never agree.
    """
    is_shown = has_learnt(last, baseline)
    if found.outcome not in ("trains", "slow", "plateau") or (found.outcome == "trains" and is_shown):
        return found
    bound = "that of equally likely ids"
    if baseline.loss is not None:
        bound = f"the {_baseline_name(True, baseline)}, {baseline.loss:.3g},"
    unless = "unless the targets follow from the input, the loss falls below"
    said = f"The ids look random: {unless} {bound} only by memorising"
    return Decision("undecided", f"{found.reason}. {said}")


def _by_run(
    found: Decision,
    curve: Sequence[ForecastStep],
    baseline: Baseline,
    name: str,
    hidden: Hidden,
) -> Decision:
    """Decide a trial that is as long as a run by its mean loss at the end.

    A run is stuck if it stands still at the baseline. A masked model is not: it often leaves it later.

    Args:
        found: the decision from the margins; it names the kind of a failure.
        hidden: what hides the targets.
    """
    last, half = curve[-1], half_way(curve)
    assert last.recent_loss is not None
    own = own_baseline(last, baseline)
    under = -own.above(last.recent_loss)
    said = f"the mean loss of the last batches is {last.recent_loss:.4g} after {last.step} steps"
    score = min(-WORST, max(WORST, under - LEARNT))
    to_beat = beaten(last, baseline, name)
    if score >= 0:
        return Decision("trains", f"{said}, under the {to_beat}", score=score, is_whole=True)
    if found.failed and not (hidden and found.outcome == "plateau"):
        why = found.reason if said in found.reason else f"{found.reason}; {said}"
        return Decision(found.outcome, why, score=score, is_whole=True)
    said += f", not {LEARNT * own.unit:.2g} under the {to_beat}"
    has_stopped = half.recent_loss is not None and above(half, baseline) + under < LEARNT
    stuck = not hidden and has_stopped and -LEARNT < under < HELD
    return Decision("plateau" if stuck else "slow", said, score=score, is_whole=True)


def beaten(each: ForecastStep, baseline: Baseline, name: str) -> str:
    """The baseline with which the mean loss of the last batches is compared, in words."""
    own = own_baseline(each, baseline)
    return f"{name}{'' if own is baseline else ' of these batches'}, {own.loss:.4g}"


def _collapsed(curve: Sequence[ForecastStep], score: float | None) -> Decision:
    dead = last_diversity(curve[-1]) <= DEAD
    why = "every token looks the same" if dead else "few runs recover from that"
    return Decision("collapses", f"{_figures(curve)}: {why}", score=score)


def _by_loss(
    curve: Sequence[ForecastStep],
    baseline: Baseline,
    margins: Mapping[str, float],
    name: str,
) -> Decision:
    """Decide by the loss alone, where no stack was read: slow, stuck at the unigram entropy, or undecided."""
    last = curve[-1]
    said = f"no stack was read, and the loss {FIXED} is {last.loss:.2f} after {last.step} steps"
    if baseline.loss is not None and last.step >= LONG:
        before = min(curve, key=lambda step: abs(step.step - last.step // 2))
        arrived = baseline.above(max(last.loss, before.loss)) < LEARNT
        if arrived and before.loss - last.loss < LEARNT * baseline.unit:
            fall = before.loss - last.loss
            return Decision("plateau", f"{said}, {fall:.2f} less than after {before.step}", score=-LEARNT)
    if margins.get("pace", 0.0) < 0:
        return _slow(curve, margins["pace"], name)
    return Decision("undecided", f"{said}, which decides nothing yet")


def _by_margins(
    curve: Sequence[ForecastStep], margins: Mapping[str, float], score: float | None, name: str
) -> Decision:
    last, diversity = curve[-1], last_diversity(curve[-1])
    if last.step < FEW:
        return Decision("undecided", f"{_unharmed(curve)}; {FEW} steps or more can decide whether it trains")
    if diversity < PARTED and "pull" not in margins:
        return Decision("undecided", f"{_figures(curve)}, and no gradients could be compared")
    mean = margins.get("pull", 1.0) * 2 * ENOUGH + ENOUGH
    scores = f"(pull {mean:.2f}, {ENOUGH:g} needed)"
    if sum(pull(step) is not None for step in curve) == 1 and abs(mean - ENOUGH) < DOUBT:
        return Decision(
            "undecided", f"{_figures(curve)}; batches hardly agree on separating the tokens {scores}", True
        )
    if mean < ENOUGH:
        stuck = f"{_figures(curve)}, and batches do not agree on separating the tokens again {scores}"
        return Decision("collapses" if diversity < FAINT else "plateau", stuck, score=score)
    if margins.get("pace", 0.0) < 0:
        return _slow(curve, margins["pace"], name)
    also = f"; but batches agree on separating the tokens {scores}" if diversity < PARTED else ""
    return Decision("trains", _unharmed(curve) + also, score=score)


def _by_agreement(
    curve: Sequence[ForecastStep], margins: Mapping[str, float], baseline: Baseline, name: str, warmup: int
) -> Decision:
    """Decide a run on measured values, such as images or series: do batches agree on what to learn?

    Its tokens differ from the start, and its loss starts near that of a constant output.
    """
    last = curve[-1]
    if baseline.loss is None or "pull" not in margins:
        said = f"{_figures(curve)}: no collapse; without token ids nothing more follows from it"
        return Decision("undecided", said)
    if last.step < FEW:
        return Decision("undecided", f"{_unharmed(curve)}; {FEW} steps or more can decide whether it trains")
    score = max(WORST, min(margin for kind, margin in margins.items() if kind != "life"))
    mean = mean_pull(curve)
    scores = f"(pull {mean:.2f}, {SHARED:g} needed)"
    own, to_beat = long_mean(last), beaten(last, baseline, name)
    if margins["pull"] < 0:
        said = f"the loss {FIXED} is {last.loss:.3g} after {last.step} steps, "
        said += "and batches do not agree on what to learn "
        said += scores
        if own is not None:
            said = f"the mean loss of the last batches is {own:.3g} after {last.step} steps, "
            said += f"not clearly under the {to_beat}"
        return Decision("plateau", said, score=score)
    before, now = second_half(curve, baseline) or (0.0, 0.0)
    is_slow = now - before <= HELD and steadiness(curve, baseline, warmup) >= STEADY
    if margins.get("held", 0.0) < 0 and not is_slow:
        losses = f"the mean loss of the last batches is {last.recent_loss:.3g} after {last.step} steps"
        said = f"{losses}; it has risen, or is above the {to_beat}"
        return Decision("plateau", said, score=score)
    if score < 0:
        return _slow(curve, score, name)
    agreed = f"batches agree on what to learn {scores}"
    if own is not None and above(last, baseline) < 0:
        agreed = f"the mean loss of the last batches, {own:.3g}, is under the {to_beat}"
    elif own is not None or mean < SHARED:
        agreed = f"as far in learning rate × steps, a larger learning rate is under the {name}"
    return Decision("trains", f"{_unharmed(curve)}, and {agreed}", score=score)


def _baseline_name(tokens: bool, baseline: Baseline) -> str:
    """The baseline in words; only cross-entropies of tokens have a unigram entropy."""
    name = "unigram entropy" if tokens and baseline.is_entropy else "loss without the input"
    return f"{name} × {baseline.unit:.3g}" if baseline.is_entropy and baseline.unit != 1 else name


def _slow(curve: Sequence[ForecastStep], margin: float, name: str) -> Decision:
    first, last = curve[0], curve[-1]
    sign = "the tokens hardly differ, and" if _hardly_differ(last) else "no sign of failure, but"
    said = (
        f"{sign} the loss goes from {first.loss:.2f} ({FIXED}) to {last.recent_loss:.2f} (mean of the last "
        f"batches) in {last.step} steps: too slowly to get under the {name} in 300 (score {margin:.2f})"
    )
    return Decision("slow", said, score=max(WORST, margin))


def _hardly_differ(last: ForecastStep) -> bool:
    """Whether the tokens have nearly become alike: a sign of failure, also in a run that recovers from it."""
    return bool(last.diversity) and last_diversity(last) < PARTED


def _learnt_in_words(last: ForecastStep, baseline: Baseline, name: str) -> str:
    """The loss that shows that a run has learnt, and the one that it is under."""
    mean = long_mean(last)
    if mean is None:
        return f"the loss {FIXED}, {last.loss:.3g}, is under the {name}, {baseline.loss:.3g}"
    return f"the mean loss of the last batches, {mean:.3g}, is under the {beaten(last, baseline, name)}"


def _figures(curve: Sequence[ForecastStep]) -> str:
    last = curve[-1]
    return f"token diversity of the last hidden state is {last_diversity(last):.1e} after {last.step} steps"


def _unharmed(curve: Sequence[ForecastStep]) -> str:
    """Figures of a run that does not fail, after what a reader must know of them."""
    first, last = curve[0], curve[-1]
    hardly = f"the tokens hardly differ after {last.step} steps"
    sign = hardly if _hardly_differ(last) else f"no sign of failure in {last.step} steps"
    return (
        f"{sign}: the loss {FIXED} goes from {first.loss:.2f} to "
        f"{last.loss:.2f}, the token diversity of the last hidden state from {last_diversity(first):.2g} to "
        f"{last_diversity(last):.2g}"
    )
