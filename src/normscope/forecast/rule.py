"""The decision rule of the forecast, with its thresholds: from a trial's curve to its outcome.

A run trains if three margins are above zero. *Pace*: the loss falls towards the unigram entropy fast enough
for 300 steps. *Life*: tokens still differ at the stack's output. *Pull*: batches agree on separating them
further. The smallest margin is the score. A trial as long as a run is judged by the loss at its end alone.
docs/forecast-rule.md names the runs that set the thresholds, and those that tested them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normscope.forecast.record import ForecastStep, Outcome
from normscope.subjects.subject import Baseline
from normscope.subjects.targets import Hidden
from normscope.train import CRITERION_STEPS

EXTENSION = 5  # further steps of an undecided trial, once
WORSE = 1.5  # loss over the first loss from which the run diverges
BLOWN_UP = 10.0  # the same for batches that are not tokens: random labels alone make a loss rise
FEW = 10  # steps below which no run is called trained: the rule was set on measurements after 20 and 40
LONG = 100  # steps after which a loss at the unigram entropy that has stopped falling is stuck
LEARNT = 0.1  # nats under the unigram entropy: the model uses its context
TIME_CONSTANT = 80.0  # steps in which the loss's excess over the unigram entropy must fall by a factor of e
AGREEMENT = 0.3  # pace that a pull of 1 makes up for: agreement on separating tokens speeds the run up
ARRIVED = 1 / 3  # share of that excess below which pace is not informative
NEAR = 0.28  # nats over the unigram entropy from which a run still gets under it
LEAD = 5.0  # pace gained per nat that a run at a larger learning rate is below `NEAR`
MOST_LEAD = 0.5  # largest such gain: a smaller loss only shows that the frequencies are learnt
BEGUN = 0.5  # nats of that excess at the start below which pace cannot be measured
DEAD = 1e-10  # token diversity from which no run recovered; float32 resolves about 1e-14
SUNK = 2e-6  # diversity below which one run of ours in 40 recovered (from 7e-7)
TRANSIENT = 20  # steps in which diversity may fall by decades; a later fall continues
PARTED = 1e-3  # diversity above which tokens differ enough
FAINT = 1e-5  # diversity below which a run that does not separate its tokens has collapsed
ALIGNED = 3.0  # weight of alignment beside coherence: one is small where the other is not
ENOUGH = 0.03  # pull, coherence + 3·alignment, that separates tokens further: noise has less
SHARED = 0.12  # pull of a run on measured values that uses its input; noise has under 0.08
HELD = 0.02  # units by which such a run's loss may rise, or stay above that of a constant output
DOUBT = 0.03  # distance from `ENOUGH` within which the trial continues
FIXED = "of the first batch"  # whose loss a measurement has: a reader would take it for that of the data


@dataclass(frozen=True)
class Decision:
    """An outcome, its reason as a sentence, whether a few more steps may decide it, and the score.

    Attributes:
        is_whole: whether the trial was as long as the run, so that its own loss decided.
    """

    outcome: Outcome
    reason: str
    in_doubt: bool = False
    score: float | None = None
    is_whole: bool = False

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
    curve = _with_all_baselines(curve)
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
    return _unless_noise(found, last, baseline) if hidden == "random" else found


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
    margins, name = _margins(curve, baseline, tokens, warmup, ahead), _baseline_name(tokens, baseline)
    score = max(WORST, min(margins.values())) if margins else None
    if last.diversity and (margins["life"] <= 0 if tokens else last_diversity(last) <= DEAD):
        return _collapsed(curve, score)
    if has_learnt(last, baseline):
        said = _learnt_in_words(last, baseline, name)
        return Decision("trains", said, score=max(score or 0.0, LEARNT))
    if not last.diversity:
        return _by_loss(curve, Baseline(None) if hidden == "random" else baseline, margins, name)
    if not tokens:
        return _by_agreement(curve, margins, baseline, name)
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


def half_way(curve: Sequence[ForecastStep]) -> ForecastStep:
    """The measurement nearest to half of the trial's steps."""
    return min(curve, key=lambda each: abs(each.step - curve[-1].step / 2))


def has_learnt(last: ForecastStep, baseline: Baseline) -> bool:
    """Whether all losses of a measurement are so far under the baseline that the model uses its input.

    Without a baseline, nothing shows it.
    In a long trial it is the mean loss alone: single batches differ from one another by as much.
    """
    if baseline.loss is None:
        return False
    mean = [] if last.recent_loss is None else [above(last, baseline)]
    singles = [baseline.above(loss) for loss in (last.loss, last.train_loss) if loss is not None]
    return max(mean if long_mean(last) is not None else singles + mean) < -LEARNT


def own_baseline(each: ForecastStep, baseline: Baseline) -> Baseline:
    """The baseline on the batches of the mean loss, where known, else that of all data."""
    own = each.recent_baseline
    if own is None or not own > 0:
        return baseline
    return baseline._replace(loss=own, unit=baseline.unit if baseline.is_entropy else own)


def beaten(each: ForecastStep, baseline: Baseline, name: str) -> str:
    """The baseline with which the mean loss of the last batches is compared, in words."""
    own = own_baseline(each, baseline)
    return f"{name}{'' if own is baseline else ' of these batches'}, {own.loss:.4g}"


def _with_all_baselines(curve: Sequence[ForecastStep]) -> Sequence[ForecastStep]:
    """The measurements without the baselines of their batches, if one has none: they are compared."""
    if all(each.recent_baseline is not None for each in curve if each.recent_loss is not None):
        return curve
    return [dataclasses.replace(each, recent_baseline=None) for each in curve]


def above(each: ForecastStep, baseline: Baseline) -> float:
    """Units by which the mean loss of the last batches is above the best one without their input."""
    assert each.recent_loss is not None
    return own_baseline(each, baseline).above(each.recent_loss)


WORST = -3.0  # the lowest score
HIDES = (
    "The input hides the targets, as in a masked language model: whether the loss gets under the unigram "
    "entropy within 300 steps, or stays at it for longer, cannot be told from a trial"
)


def _margins(
    curve: Sequence[ForecastStep],
    baseline: Baseline,
    tokens: bool,
    warmup: int,
    ahead: float | None,
) -> dict[str, float]:
    """Margins that could be measured; each is above 0 in a run that trains."""
    margins: dict[str, float] = {}
    seen = any(pull(step) is not None for step in curve)
    mean = mean_pull(curve)
    if curve[-1].diversity:
        margins["life"] = life(curve)
        if seen and not tokens:
            margins["pull"] = (mean - SHARED) / (2 * SHARED)
        elif seen and last_diversity(curve[-1]) < PARTED:
            margins["pull"] = (mean - ENOUGH) / (2 * ENOUGH)
    if not tokens and "pull" in margins and baseline.loss is not None:
        if long_mean(curve[-1]) is not None:  # by then the loss itself says whether batches agree
            margins["pull"] = _is_under(above(curve[-1], baseline))
        if ahead is not None:  # who has learnt shows that the batches agree after all
            margins["pull"] = max(margins["pull"], _is_under(baseline.above(ahead)))
    found = pace(curve, baseline, warmup)
    if found is not None:
        margins["pace"] = found + AGREEMENT * mean - 1
        if ahead is not None:
            margins["pace"] += min(MOST_LEAD, LEAD * (NEAR - baseline.above(ahead)))
    held = rise(curve, baseline, "pace" in margins)
    if not tokens and held is not None:
        margins["held"] = (HELD - held) / (2 * HELD)
    return margins


def _is_under(above: float) -> float:
    """Margin of a loss that is so many units above that without the input."""
    return (-above - HELD) / (2 * HELD)


def long_mean(last: ForecastStep) -> float | None:
    """The mean loss at the end of a long trial; None of a shorter one, whose ten losses say less."""
    return last.recent_loss if last.step > LONG else None


def life(curve: Sequence[ForecastStep]) -> float:
    """Decades that the diversity, as it sinks, is above the least that runs recover from, halved."""
    return math.log10(max(sinking_diversity(curve), 1e-15) / SUNK) / 2


def rise(curve: Sequence[ForecastStep], baseline: Baseline, far: bool = False) -> float | None:
    """Units by which the mean loss rose in the second half, or is above the baseline; the larger of both.

    A run that has `far` to go, or whose loss falls clearly, need not be near the baseline yet.
    """
    last = curve[-1]
    half = half_way(curve)
    if baseline.loss is None or last.recent_loss is None or half.recent_loss is None:
        return None
    now = above(last, baseline)
    risen = now - above(half, baseline)
    return risen if far or risen < -LEARNT else max(risen, now)


def pace(curve: Sequence[ForecastStep], baseline: Baseline, warmup: int = 0) -> float | None:
    """e-foldings of the loss's fall towards the unigram entropy in `TIME_CONSTANT` steps; 1 is enough.

    Measured over the second half of the trial, on means over training batches, because one batch's own
    entropy differs by 0.1 nats from the text's. None where the entropy is unknown, or where the loss starts
    or has come near it.
    """
    first, last = curve[0], curve[-1]
    half = half_way(curve)
    if baseline.loss is None or last.recent_loss is None or half.recent_loss is None or half is last:
        return None
    start, before, now = baseline.above(first.loss), above(half, baseline), above(last, baseline)
    if start < BEGUN or now < ARRIVED * start:
        return None
    steps = at_full_rate(last.step, warmup) - at_full_rate(half.step, warmup)
    return math.log(max(before, 1e-3) / now) * TIME_CONSTANT / steps


def at_full_rate(steps: int, warmup: int) -> float:
    """Number of steps at the full learning rate that equal the first `steps` of a linear warm-up."""
    ramp = min(steps, warmup)
    return steps - ramp + (ramp * (ramp + 1) / (2 * warmup) if warmup else 0.0)


def sinking_diversity(curve: Sequence[ForecastStep]) -> float:
    """The last diversity, reduced by its last fall once the first transient is over."""
    last, before = curve[-1], curve[-2] if len(curve) > 1 else curve[-1]
    now = last_diversity(last)
    if before.step < TRANSIENT or not before.diversity:
        return now
    return now * min(1.0, now / max(last_diversity(before), 1e-30))


def last_diversity(step: ForecastStep) -> float:
    """Token diversity of the last stack's output."""
    return list(step.diversity.values())[-1]


def pull(step: ForecastStep) -> float | None:
    """coherence + 3·alignment of a measurement; None where there was nothing to compare."""
    if step.coherence is None or step.alignment is None:
        return None
    return step.coherence + ALIGNED * step.alignment


def mean_pull(curve: Sequence[ForecastStep]) -> float:
    """Mean of the pulls that were measured; 0 where there is none."""
    seen = [pulled for pulled in map(pull, curve) if pulled is not None]
    return sum(seen) / len(seen) if seen else 0.0


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
    curve: Sequence[ForecastStep], margins: Mapping[str, float], baseline: Baseline, name: str
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
    if margins.get("held", 0.0) < 0:
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
        f"{sign} the loss falls from {first.loss:.2f} ({FIXED}) to {last.recent_loss:.2f} (mean of the last "
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
