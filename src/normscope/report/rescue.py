"""Other rates and remedies on a terminal: a line a rate, a line a remedy, and the way out."""

from collections.abc import Iterator

from rich.text import Text

from normscope.forecast import Forecast, LadderForecast, ScaledRate
from normscope.forecast.best_rate import rates_on
from normscope.forecast.range_test import LAST
from normscope.report.console import NOTHING
from normscope.report.figure_table import FigureTable
from normscope.report.words import NEAR_LIMIT, risk_in_words
from normscope.rules import figure
from normscope.rules.remedies import LOWER_RATES, REMEDIES, Attempt, Rescue
from normscope.train import CRITERION_STEPS

OPEN = "open"
"""Word for a remedy that fails so far."""
OUTCOME_CLASSES = {
    **dict.fromkeys(("trains", "rescues"), "good"),
    **dict.fromkeys(("slow", "undecided", "needs-warmup", OPEN), "doubt"),
    "not measured": "none",
}
"""CSS class of a trial's outcome or a remedy's status; all others are failures."""
_COLOURS = {"good": "green", "doubt": "yellow", "none": "", "fail": "red"}
REACHES = ("the run's settings", "the starting weights", "the model")
"""The thing that a remedy changes, by its reach."""
_FIGURES = ("loss", "diversity")
_MARK = "←"
"""Mark of the largest rate that trains, in the table."""


def ladder_table(ladder: LadderForecast) -> FigureTable:
    """A row for each learning rate: outcome, and the steps, loss and diversity at the end of its trial.

    The largest rate that trains has a mark, see `mark_in_words`. The risk of divergence has a column if it is
    at least `RISKY` at any of them.
    """
    is_risky = any(map(risk_in_words, ladder.rungs))
    columns = ("probability", *(("diverges",) if is_risky else ()), "steps", *_FIGURES)
    table = FigureTable("rate", "outcome", *columns, figures=columns)
    for rung in ladder.rungs:
        here = rung.lr == ladder.largest_rate
        rate = Text(f"{rung.lr:g}", style="bold" if here else "")
        note = Text(f" {_MARK}", style="dim") if here else Text("")
        risk = [NOTHING if rung.divergence is None else f"{rung.divergence:.2f}"] if is_risky else []
        figures = (*risk, steps_taken(rung), *last_figures(rung))
        table.add_row(rate, _coloured(rung.outcome) + note, probability(rung), *figures)
    return table


def mark_in_words(ladder: LadderForecast) -> str:
    """Meaning of the mark in the ladder's table; "" where no rate has it."""
    if ladder.largest_rate is None:
        return ""
    return (
        f"{_MARK} {'trains; no larger rate was tested' if ladder.largest_is_bound else 'largest that trains'}"
    )


def ladder_words(ladder: LadderForecast) -> str:
    """The largest learning rate that trains, or a bound on it, and what is known of a warm-up."""
    warmup, count = f"warm-up {ladder.warmup}", len(ladder.judged)
    if not count:
        return f"no learning rate was judged{' yet' if ladder.best is None else ''}; {warmup}"
    largest = "none trains"
    if any(rung.outcome == "undecided" for rung in ladder.rungs):
        largest = "none is known to train"
    if ladder.largest_is_bound and ladder.largest_rate is not None:
        at_least = f"the largest that trains is at least {ladder.largest_rate:g}"
        largest = f"{at_least} (no larger one was tested; {rates_on(ladder.largest_rate)} goes on)"
    elif ladder.largest_rate is not None:
        largest = f"the largest that trains is {ladder.largest_rate:g}"
    number = f"{count} learning rate{'s' if count != 1 else ''} tested"
    untried = sum(rung.is_untried for rung in ladder.rungs)
    decided = f" ({untried} of them by the loss of larger ones)" if untried else ""
    return f"{number}{decided}, {largest}; {warmup}"


def other_trial_in_words(trial: Forecast | None, ladder: LadderForecast) -> str:
    """Why the trial of the run and the one of its learning rate on the ladder differ; "" where they agree."""
    rung = None if trial is None else ladder.same_run(trial)
    if trial is None or rung is None or rung.outcome == trial.outcome:
        return ""
    if "not measured" in (rung.outcome, trial.outcome):
        return ""
    here = "decided by the loss of larger rates" if rung.is_untried else f"of {rung.last_step} steps"
    return (
        f"at {trial.lr:g} the run's trial of {trial.steps} steps says {trial.outcome}, and the one here, "
        f"{here}, says {rung.outcome}; the verdict rests on the former"
    )


def near_limit_in_words(ladder: LadderForecast) -> str:
    """The rates whose outcome and probability point to different sides; "" where there are none."""
    rates = [f"{rung.lr:g}" for rung in ladder.rungs if rung.is_near_limit]
    return f"outcome and probability differ at {', '.join(rates)}: {NEAR_LIMIT}" if rates else ""


def range_test_in_words(ladder: LadderForecast) -> str:
    """The learning rate at which the loss diverged in the range test; "" without one."""
    if ladder.range_test is None:
        return ""
    if ladder.range_test >= LAST:
        return f"in a range test the loss did not diverge below learning rate {LAST:g}"
    said = f"in a range test the loss diverged at learning rate {ladder.range_test:.2g}"
    return f"{said}; longer runs can diverge at a tenth of it, so the table counts"


def ladder_sentences(trial: Forecast | None, ladder: LadderForecast) -> list[str]:
    """The largest rate that trains; then what seems to contradict, where something does, and why."""
    said = (
        ladder_words(ladder),
        other_trial_in_words(trial, ladder),
        near_limit_in_words(ladder),
        range_test_in_words(ladder),
    )
    return [words for words in said if words]


def rate_to_use(ladder: LadderForecast) -> str:
    """The learning rate to use, its range if it is known, and its warm-up; "" where none can be named."""
    best = ladder.best
    if best is None or best.rate is None:
        return ""
    span = "" if best.low is None or best.high is None else f" ({best.low:.2g} … {best.high:.2g})"
    warmup = best.warmup or ladder.rungs[0].warmup
    ramp = f"warm-up {warmup} step{'s' if warmup != 1 else ''}" if warmup else "without a warm-up"
    if best.warmup:
        ramp += " or more"
    return f"learning rate {best.rate:.2g}{span}, {ramp}: {best.reason}"


def rates_at_scale(ladder: LadderForecast) -> str:
    """The learning rates to expect at twice the width and depth; "" where none can be named."""
    if not rate_to_use(ladder) or ladder.at_scale is None:
        return ""
    twice = {(each.axis, each.parametrisation): each for each in ladder.at_scale.rates if each.times == 2}
    parts = []
    for axis in ("width", "depth"):
        if usual := twice.get((axis, "standard")):
            mup = twice.get((axis, "mup"))
            under = f", under μP {_ranged(mup)}" if mup is not None else ""
            parts.append(f"at 2× the {axis} about {_ranged(usual)}{under}")
    return "; ".join(parts)


def _ranged(each: ScaledRate) -> str:
    return f"{each.rate:.2g} ({each.low:.2g} … {each.high:.2g})"


def remedies_table(rescue: Rescue) -> FigureTable:
    """A line a remedy that was tried, the best first; see `remedies_legend`."""
    columns = ("steps", *_FIGURES)
    table = FigureTable("remedy", "forecast", *columns, "changes", figures=columns)
    for attempt in rescue.attempts:
        if attempt.forecast is not None:
            table.add_row(
                Text(named(attempt), style="bold" if attempt is rescue.best else ""),
                _coloured(status_in_words(attempt)),
                steps_taken(attempt.forecast),
                *last_figures(attempt.forecast),
                Text(REACHES[attempt.reach].split()[-1], style="dim"),
            )
    return table


def named(attempt: Attempt) -> str:
    """The remedy's name, with the learning rate where it changes that: "much-lower-rate (0.001)"."""
    if attempt.forecast is None or LOWER_RATES.keys().isdisjoint(attempt.names):
        return attempt.name
    return f"{attempt.name} ({attempt.forecast.lr:.3g})"


def status_in_words(attempt: Attempt) -> str:
    """The attempt's status; one that fails by a trial that does not tell is open."""
    return OPEN if attempt.is_hasty else attempt.status


def remedies_legend(rescue: Rescue) -> str:
    """Help to read the table: a remedy may rescue beside a larger loss than that of one that fails."""
    tried = next((a.forecast for a in rescue.attempts if a.forecast is not None), None)
    if tried is None:
        return ""
    aim = "train"
    if tried.baseline.loss is not None:
        name = "loss without the input" if tried.unigram_entropy is None else "unigram entropy"
        aim = f"get under the {name}, {figure(tried.baseline.loss)},"
    is_open = any(attempt.is_hasty for attempt in rescue.attempts)
    open_ = f"“{OPEN}”: it fails so far, and so few steps do not tell; --rates tries for longer. "
    return (
        f"“rescues”: forecast to {aim} within {CRITERION_STEPS} steps; a short trial need not be there yet. "
        f"{open_ if is_open else ''}"
        "The loss is that of the first batch: compare only losses after the same number of steps."
    )


def remedies_words(rescue: Rescue) -> Iterator[tuple[str, str]]:
    """The way out, label and words; then what could not be tried and why."""
    if rescue.best is not None:
        yield "rescue", way_out(rescue.best)
    elif not rescue.reason:
        yield "rescue", "no remedy that was tried rescues this run"
    if rescue.reason:
        yield "rescue", rescue.reason
    skipped = [a for a in rescue.attempts if a.forecast is None]
    if skipped:
        yield "skipped", "; ".join(f"{a.name} ({a.reason})" for a in skipped)


def way_out(attempt: Attempt) -> str:
    """The remedy to take first, in words, with the code that a user writes."""
    parts = [f"{REMEDIES[name].summary} {REMEDIES[name].code}" for name in attempt.names]
    cost = "; ".join(REMEDIES[name].cost for name in attempt.names)
    settings = any(REMEDIES[name].reach == 0 for name in attempt.names)  # then the rate is a number to copy
    tried = f" (tried at {attempt.forecast.lr:g})" if settings and attempt.forecast else ""
    return f"{attempt.name}. {' '.join(parts)}{tried}. Costs {cost}."


def outcome_class(outcome: str) -> str:
    """CSS class of an outcome, or of a remedy's status."""
    return OUTCOME_CLASSES.get(outcome, "fail")


def _coloured(word: str) -> Text:
    return Text(word, style=_COLOURS[outcome_class(word)])


def probability(forecast: Forecast) -> str:
    """The probability that the run trains."""
    return NOTHING if forecast.certainty is None else f"{forecast.certainty:.2f}"


def steps_taken(forecast: Forecast) -> str:
    """Steps of the trial after which its last figures were measured."""
    return str(forecast.last_step) if forecast.curve else NOTHING


def last_figures(forecast: Forecast) -> tuple[str, str]:
    """Loss and token diversity of the last stack at the end of a trial."""
    if not forecast.curve:
        return NOTHING, NOTHING
    last = forecast.curve[-1]
    diversity = list(last.diversity.values())[-1:]
    return figure(last.loss), figure(diversity[0]) if diversity else NOTHING
