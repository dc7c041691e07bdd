"""Short descriptions of a stack, for the heads of the terminal's and the page's reports."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from normscope.anatomy import Branch, Stack
from normscope.forecast import Forecast, LadderForecast
from normscope.forecast.rule import FIXED
from normscope.option_values import LADDER_STEPS
from normscope.probes import Measurements
from normscope.probes.next_step import NO_LOSS
from normscope.rules import figure
from normscope.train.criterion import LAST, MARGIN


def norms_in_words(stack: Stack) -> str:
    """The place of the norms: "post (layernorm)", or "deepnorm (post, layernorm)" where a scheme was read."""
    by_scheme: defaultdict[str | None, list[Branch]] = defaultdict(list)
    for block in stack.blocks:
        for branch in block.branches:
            by_scheme[branch.scheme].append(branch)
    return " and ".join(_of_scheme(*item) for item in by_scheme.items())


def _of_scheme(scheme: str | None, branches: Sequence[Branch]) -> str:
    placements = " and ".join(dict.fromkeys(branch.placement for branch in branches))
    norms = " and ".join(dict.fromkeys(branch.norm for branch in branches))
    if scheme is None:
        return f"{placements} ({norms})"
    return f"{scheme} (no norms)" if placements == norms == "none" else f"{scheme} ({placements}, {norms})"


def stack_in_words(stack: Stack) -> str:
    """Blocks and norms of a stack: "layers: 12 blocks, pre (layernorm), then a final norm"."""
    norms = norms_in_words(stack) or "no branch (no norm)"
    final = "" if stack.final_norm is None else ", then a final norm"
    partly = "" if stack.complete else " (partly read)"
    return f"{stack.name or 'stack'}: {len(stack.blocks)} blocks{partly}, {norms}{final}"


def headline(verdict: str, forecast: Forecast | None, ladder: LadderForecast | None = None) -> str:
    """The verdict and, where the trial leaves it open, its outcome or probability: "healthy, trial slow".

    No finding speaks of a trial that is undecided, slow or not sure, so the verdict alone would read as that
    of a whole check. An open trial also names a risk of divergence. A longer trial of the ladder that says
    that the same run trains counts more than a slow one.
    """
    if forecast is None or verdict not in ("healthy", "at risk", "will fail"):
        return verdict
    again = None if ladder is None else ladder.same_run(forecast)
    if forecast.outcome == "slow" and again is not None and again.trains:
        forecast = again
    if verdict != "will fail" and forecast.outcome in ("undecided", "slow", "not measured"):
        risk = risk_in_words(forecast)
        return f"{verdict}, trial {forecast.outcome}" + (f", {risk}" if risk else "")
    rests_on_it = forecast.failed or (forecast.outcome == "trains" and verdict != "will fail")
    if rests_on_it and forecast.certainty is not None and not forecast.is_sure:
        return f"{verdict}, probability of training {forecast.certainty:.2f}"
    return verdict


def forecast_in_words(forecast: Forecast) -> str:
    """The trial: "adamw at 0.0003, 20 steps → trains (probability of training 0.97); loss …"."""
    words = f"{forecast.optimizer} at {forecast.lr:g}"
    words += f", warm-up {forecast.warmup}" if forecast.warmup else ""
    words += f", {forecast.steps} steps → {forecast.outcome}"
    words += f" ({certainty_in_words(forecast)})" if forecast.certainty is not None else ""
    words += f"; {risk}" if (risk := risk_in_words(forecast)) else ""
    if len(forecast.curve) > 1:
        first, last = forecast.curve[0], forecast.curve[-1]
        words += f"; loss {FIXED} {figure(first.loss)} → {figure(last.loss)}"
        if forecast.unigram_entropy is not None:
            times = "" if forecast.loss_unit == 1 else f" × {figure(forecast.loss_unit)}"
            words += f" (unigram entropy {figure(forecast.unigram_entropy)}{times})"
        elif forecast.best_constant is not None:
            words += f" (best constant output {figure(forecast.best_constant)})"
        for stack, value in last.diversity.items():
            if stack in first.diversity:
                words += f"; diversity of {stack} {figure(first.diversity[stack])} → {figure(value)}"
    return words


def certainty_in_words(forecast: Forecast) -> str:
    """The probability that the run trains: "probability of training 0.97"; "" if it is unknown."""
    if forecast.certainty is None:
        return ""
    said = f"probability of training {forecast.certainty:.2f}"
    said = said if forecast.is_sure else f"{said}, not sure"
    return f"{said}: {NEAR_LIMIT}" if forecast.is_near_limit else said


NEAR_LIMIT = "near the limit, where runs go either way"


def too_early_in_words(forecast: Forecast, ladder: LadderForecast | None) -> str:
    """A sentence on what says more than a short trial that says "slow"; "" for other trials."""
    if forecast.outcome != "slow" or ladder is not None or forecast.steps >= LADDER_STEPS:
        return ""
    return (
        f"A trial of {forecast.steps} steps may call a run slow too early: --forecast takes {LADDER_STEPS} "
        "and compares with other rates."
    )


RISKY = 0.1
"""Risk of divergence from which a report mentions it."""


def risk_in_words(forecast: Forecast) -> str:
    """The risk that the run diverges: "risk of divergence 0.42"; "" if it is small or unknown."""
    if forecast.divergence is None or forecast.divergence < RISKY:
        return ""
    return f"risk of divergence {forecast.divergence:.2f}"


def criterion_in_words(word: str, unigram_entropy: float | None) -> str:
    """The criterion for a trained run, as the meaning of `word` ("Trains")."""
    entropy = "" if unigram_entropy is None else f" of {unigram_entropy:.3f} nats"
    return (
        f"“{word}” means that the mean loss of the last {LAST} steps is at least {MARGIN} nats "
        f"below the unigram entropy{entropy}."
    )


def cost_in_words(cost: Mapping[str, float]) -> str:
    """The seconds: "4.1 s (anatomy 0.4, forecast 2.0)"."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in cost.items() if name != "total")
    total = cost.get("total", sum(cost.values()))
    return f"{total:.1f} s ({parts})" if parts else f"{total:.1f} s"


def budget_in_words(budget: Mapping[str, Any], *, left_out: bool = True) -> str:
    """The cost of a report's Jacobians: "standard: 104 of 480 forwards (branches 24, …); left out: …"."""
    parts = ", ".join(f"{name} {part['forwards']:.0f}" for name, part in budget["parts"].items())
    spent = f"{budget['name']}: {budget['forwards']:.0f} of {budget['limit']} forwards"
    missing = ", ".join(budget["left_out"]) if left_out else ""
    return spent + (f" ({parts})" if parts else "") + (f"; left out: {missing}" if missing else "")


def gains_in_words(site: str, measurements: Measurements) -> str:
    """A stack's Jacobian: "σ_max 66.9 (its blocks allow 728); one token: rank 62 of 64, κ 17"."""
    found = {row.quantity.removeprefix("jacobian/"): row.value for row in measurements if row.site == site}
    figures = {name: value for name, value in found.items() if isinstance(value, float)}
    parts = []
    if "sigma-max" in figures:
        bound = figures.get("log-upper-bound")
        beside = "" if bound is None or bound > 300 else f" (its blocks allow {figure(10**bound)})"
        parts.append(f"σ_max {figure(figures['sigma-max'])}{beside}")
    if "sigma-min-nonzero" in figures and "condition" in figures:
        parts.append(
            f"least non-zero σ {figure(figures['sigma-min-nonzero'])}, κ {figure(figures['condition'])}"
        )
    if "rank" in figures:
        parts.append(f"rank {figure(figures['rank'])}")
    spectrum = found.get("token-singular-values")
    if isinstance(spectrum, tuple) and "token-rank" in figures:
        rank = f"rank {figures['token-rank']:.0f} of {len(spectrum)}"
        condition = figures.get("token-condition")
        parts.append(f"one token: {rank}" + ("" if condition is None else f", κ {figure(condition)}"))
    if "effective-rank" in figures:
        parts.append(f"effective rank {figure(figures['effective-rank'])}")
    return "; ".join(parts + _missing(site, measurements))


def next_step_in_words(measurements: Measurements) -> str:
    """The next step: "raises the loss … from learning rate 0.0041 on (14 × the run's); gradient norm 2.3"."""
    critical = measurements.find("step/critical-rate")
    if critical is None:
        return ""
    if not isinstance(critical.value, float):
        return "" if NO_LOSS in critical.how else f"critical learning rate {critical.how}"
    ratio = measurements.of("step/critical-over-lr").get("")
    words = f"raises the loss of the first batch from learning rate {figure(critical.value, 2)} on"
    words += "" if ratio is None else f" ({figure(ratio, 2)} × the run's)"
    for name, quantity, bound in _SHARPNESSES:
        row = measurements.find(quantity)
        if row is not None and isinstance(row.value, float):
            words += f"; {name} {figure(row.value, 2)}{bound}"
    gradient = measurements.of("gradient/total").get("")
    words += "" if gradient is None else f"; gradient norm {figure(gradient, 2)}"
    return f"{words}. {NEXT_STEP_ONLY}"


NEXT_STEP_ONLY = "This predicts the next step, not whether the run trains"
_SHARPNESSES = (
    ("λ_max · learning rate", "step/lambda-max-times-lr", " (gradient descent is stable below 2)"),
    ("λ_max(P⁻¹H) · learning rate", "step/preconditioned-lambda-max-times-lr", ""),
)
"""Name, quantity and bound of the sharpnesses of a deep check."""


def _missing(site: str, measurements: Measurements) -> list[str]:
    """Why there is no σ_max, or no σ_min where the budget had one."""
    for quantity, name in (("sigma-max", "σ_max"), ("sigma-min-nonzero", "σ_min")):
        row = measurements.find(f"jacobian/{quantity}", site)
        if row is not None and not row.measured and "--budget" not in row.how:
            return [f"{name} {row.how}"]
    return []
