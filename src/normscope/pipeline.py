"""The pipeline from a Subject to a Report: anatomy, probes, forecast, findings."""

import dataclasses
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normscope
from normscope.anatomy import Anatomy, read_anatomy, require_residual_stream
from normscope.errors import BatchesError, UsageError
from normscope.forecast import (
    Forecast,
    ForecastInterrupted,
    LadderForecast,
    LadderInterrupted,
    forecast,
    forecast_ladder,
    forecast_measurements,
    lacks_baseline,
    longer_trials,
    with_baseline,
    with_caveat,
)
from normscope.forecast.one_rate import unless_noise
from normscope.forecast.warmup import beside_trial
from normscope.interrupts import only_once
from normscope.option_values import LADDER_STEPS, require_longer
from normscope.probes import (
    PROBES,
    Budget,
    Measurement,
    Measurements,
    Spending,
    measure_jacobian,
    measure_next_step,
    measure_quantisation,
    measure_wiring,
    not_measured,
    settled_batch_norms,
)
from normscope.probes.quantisation import formats_to_round
from normscope.recording.intake import as_run
from normscope.report import Report
from normscope.rules import RULES, Finding, judge, matches, parse_codes, verdict
from normscope.rules.remedies import RemediesInterrupted, Rescue, needs_rescue, try_remedies
from normscope.subjects import Batch, LossFn, Run, Subject, make_subject, untouched
from normscope.subjects.memory import is_out_of_memory, memory_refusals
from normscope.subjects.repeats import SINGLE, period_of
from normscope.timing import timed
from normscope.train import Recipe, described

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`: called at the start of each stage and at each step of the forecast."""
Begun = Callable[[str, int], None]
"""The same without the total."""


class CheckInterrupted(KeyboardInterrupt):
    """Ctrl-C during a check; `report` holds the measurements so far."""

    def __init__(self, report: Report) -> None:
        super().__init__("interrupted")
        self.report = report


NOTHING_READ = Anatomy(())
"""The reading of a check that was interrupted before it had one."""


@dataclass
class Check:
    """One check and its results so far; `report()` may be called at any time.

    Attributes:
        earlier: forecast of the run from fewer steps, if it needed a rescue.
        cut_short: why the check ended before its end; empty if it did not.
    """

    subject: Subject
    config: Recipe
    spending: Spending
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    rates: tuple[float, ...]
    try_remedies: bool
    refine: int | None = None
    anatomy: Anatomy = NOTHING_READ
    measurements: Measurements = field(default_factory=Measurements)
    forecast: Forecast | None = None
    ladder: LadderForecast | None = None
    remedies: Rescue | None = None
    notes: list[str] = field(default_factory=list)
    quantise: tuple[str, ...] = ()
    interrupted: bool = False
    cut_short: str = ""
    is_script: bool = False
    earlier: Forecast | None = None
    cost: dict[str, float] = field(default_factory=dict)

    def findings(self) -> list[Finding]:
        if self.anatomy is NOTHING_READ:
            return []
        found = judge(self.anatomy, self.measurements, self.forecast, _dtype(self.subject.model))
        kept = [f for f in found if not self.select or any(matches(f, code) for code in self.select)]
        return [f for f in kept if not any(matches(f, code) for code in self.ignore)]

    @property
    def needs_rescue(self) -> bool:
        """Whether remedies make sense: the run fails, or it seemed to at first and does not train."""
        assert self.forecast is not None
        return needs_rescue(self.forecast) or (self.earlier is not None and not self.forecast.trains)

    @property
    def tried(self) -> bool:
        """True if a trial ran that could have failed."""
        return self.forecast is not None and self.forecast.outcome != "not measured"

    def recipe(self) -> dict[str, Any] | None:
        """Description of the trial's steps; None where none was asked for or could be taken."""
        if self.config.steps == 0:
            return None
        try:
            found = described(self.config, self.subject.model)
        except UsageError:  # nothing to train, or nothing for Muon
            return None
        weights = _dtype(self.subject.model)
        return found if weights == "float32" else found | {"weights": weights}

    def report(self) -> Report:
        subject, found = self.subject, self.findings()
        return Report(
            model=subject.spec,
            input=subject.input,
            seed=None if self.is_script else subject.seed,
            device=str(next((p.device for p in subject.model.parameters()), "cpu")),
            versions=versions(),
            anatomy=self.anatomy,
            measurements=self.measurements,
            forecast=self.forecast,
            ladder=self.ladder,
            remedies=self.remedies,
            recipe=self.recipe(),
            findings=tuple(found),
            verdict=verdict(found, interrupted=self.interrupted, tried=self.tried),
            budget=self.spending.to_dict(),
            cost=self.cost | {"total": round(sum(self.cost.values()), 4)},
            notes=(*subject.notes, *self.notes, *filter(None, [self.cut_short])),
            cut_short=self.cut_short,
        )


def check(
    model_or_subject: nn.Module | Subject | Run | Any,
    batch: Batch | Iterator[Batch] | None = None,
    loss_fn: LossFn | None = None,
    *,
    optimizer: str | None = None,
    lr: float | None = None,
    warmup: int | None = None,
    schedule: str | None = None,
    run_steps: int | None = None,
    weight_decay: float | None = None,
    eps: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    clip: float | None = None,
    accumulation: int | None = None,
    precision: str | None = None,
    steps: int = 20,
    forecast_rates: Iterable[float] = (),
    refine: int | None = None,
    try_remedies: bool = False,
    budget: str = "standard",
    quantise: str | Iterable[str] = (),
    seed: int = 0,
    batch_size: int = 4,
    seq_len: int = 64,
    text: Path | None = None,
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
    progress: Progress | None = None,
    reraise: bool = False,
) -> Report:
    """Read, measure and judge a model, and restore it afterwards.

    Args:
        model_or_subject: a module, a `Subject` from `normscope.load`, or a `Run`: a module with your own
            optimizer, schedule, batches and loss. A `transformers.Trainer` (or one of TRL), and a tuple of a
            LightningModule and its datamodule, become a `Run`.
        batch: tensor, tuple of arguments, dict of keyword arguments, or an iterator of those; None makes one.
        loss_fn: `loss_fn(output, batch)` → scalar.
        optimizer: optimiser of the intended run: "adamw" (the default), "adam", "sgd" or "muon".
        lr, warmup: learning rate (3e-4) and linear warm-up (0 steps) of the intended run. The `lr` of a `Run`
            scales the learning rates of all its groups.
        schedule, run_steps: "constant" (the default), "cosine" or "wsd" after the warm-up, and the steps of
            the whole run, over which they fall; without `run_steps`, the trial ends before the fall begins.
        weight_decay, eps, beta1, beta2: of the optimiser; None is its default.
        clip: largest norm of all gradients together; None does not clip.
        accumulation: batches per step (1).
        precision: "float32" (the default), or autocast to "bfloat16" or "float16".
        steps: training steps to try on a copy of the model; 0 skips the forecast.
        forecast_rates: other learning rates to try; also tests whether the run needs warm-up.
        refine: steps over which the best of these rates are tried again; those in doubt around the largest
            that trains are tried over 300. 0 for none of both; 140 by default, as far as your batches do not
            repeat by then and the run is as long. A range test then adds to the risk of divergence.
        try_remedies: if the forecast fails, forecast the run with each remedy and rank them.
        budget: amount of Jacobian analysis: "fast", "standard" or "deep"; the report says what was spent.
        quantise: formats to round weights and activations to, place by place: "int8", "int4", "fp8" or
            several ("int8,fp8"); needs the extra `quantise` (torchao).
        seed: seed of the batches and of dropout.
        batch_size, seq_len, text: sequences per batch, tokens per sequence, and text of the input that is
            made if `batch` is None.
        select, ignore: codes, prefixes ("NS5") or names of findings to keep or to drop.
        progress: called as `progress(stage, done, total)`.
        reraise: raise a probe's error instead of reporting it as "not measured".

    Raises:
        UsageError: the model, the batch or an option cannot be used.
        CheckInterrupted: Ctrl-C; its `.report` holds the measurements so far.
    """
    account = Budget.of(budget)
    formats = formats_to_round(quantise)
    model_or_subject = as_run(model_or_subject)
    config = Recipe.asked_for(
        _run_of(model_or_subject),
        steps=steps,
        seed=seed,
        optimizer=optimizer,
        lr=lr,
        warmup=warmup,
        schedule=schedule,
        run_steps=run_steps,
        weight_decay=weight_decay,
        eps=eps,
        beta1=beta1,
        beta2=beta2,
        clip=clip,
        accumulation=accumulation,
        precision=precision,
    )
    if isinstance(model_or_subject, Subject):
        if batch is not None or loss_fn is not None:
            raise UsageError(
                "a Subject together with a batch or a loss_fn",
                "either a Subject, or a module with its batch and loss_fn",
                "pass the module itself, or the Subject alone",
            )
        subject = model_or_subject
    else:
        subject = make_subject(
            model_or_subject, batch, loss_fn, seed=seed, batch_size=batch_size, seq_len=seq_len, text=text
        )
    rates = tuple(forecast_rates)
    _require_steps(steps, rates, try_remedies)
    require_longer(refine, steps, tries_rates=bool(rates))
    for rate in rates:  # an invalid rate is refused before the long work
        dataclasses.replace(config, lr=rate)
    run = Check(
        subject,
        config,
        Spending(account),
        parse_codes(select, of=RULES),
        parse_codes(ignore),
        rates,
        try_remedies,
        refine,
        quantise=formats,
    )
    with only_once():
        try:
            with untouched(subject.model), memory_refusals(subject.spec):
                _measure(run, progress or (lambda stage, done, total: None), reraise)
        except KeyboardInterrupt as stop:
            keep(run, stop)
            run.interrupted = True
            run.cut_short = "interrupted: the report has the measurements so far"
            raise CheckInterrupted(run.report()) from stop
        return run.report()


def _run_of(given: nn.Module | Subject | Run) -> Run | None:
    """The user's run, where it is known."""
    if isinstance(given, Run):
        return given
    return given.run if isinstance(given, Subject) else None


def _require_steps(steps: int, rates: tuple[float, ...], remedies: bool) -> None:
    """Raise UsageError if rates or remedies are to be tried in trials of 0 steps."""
    if steps == 0 and (rates or remedies):
        what = "forecast_rates" if rates else "try_remedies"
        raise UsageError(f"{what} with steps=0", "real steps to try", "use steps=20, the default")


def keep(run: Check, stop: KeyboardInterrupt) -> bool:
    """Keep the results that an interrupted trial had so far; False if it had none."""
    if isinstance(stop, ForecastInterrupted):
        run.forecast = stop.forecast
    elif isinstance(stop, LadderInterrupted):
        run.ladder = _said(run, stop.ladder)
        run.notes.extend(run.ladder.notes)
    elif isinstance(stop, RemediesInterrupted):
        run.remedies = stop.rescue
    else:
        return False
    return True


def _measure(run: Check, progress: Progress, reraise: bool) -> None:
    num_probes = len(PROBES) + bool(run.quantise)
    total = num_probes + 2 + bool(run.rates) + run.try_remedies

    def begun(stage: str, done: int) -> None:
        progress(stage, done, total)

    look(run, begun, reraise)
    find_entropy(run)
    _try_out(run, begun, num_probes + 1)
    begun("done", total)


def look(run: Check, progress: Begun, reraise: bool) -> None:
    """Read the model and run the probes."""
    progress("anatomy", 0)
    with timed(run.cost, "anatomy"):
        run.anatomy = read_anatomy(run.subject)
    require_residual_stream(run.anatomy, run.subject.spec)
    probes = PROBES | {
        "jacobian": partial(measure_jacobian, spending=run.spending),
        "wiring": partial(measure_wiring, recipe=run.config),
        "step": partial(measure_next_step, recipe=run.config, spending=run.spending),
    }
    if run.quantise:
        deep = run.spending.budget is Budget.DEEP
        probes["quantisation"] = partial(measure_quantisation, formats=run.quantise, every=deep)
    with settled_batch_norms(run.subject) as settled:
        if settled:
            run.notes.append(
                f"{settled} BatchNorms that have seen no batch were measured with this batch's statistics"
            )
        for done, (name, probe) in enumerate(probes.items(), start=1):
            progress(name, done)
            with timed(run.cost, name):
                run.measurements.extend(_probed(name, probe, run, reraise))


def find_entropy(run: Check) -> None:
    """Estimate the baseline loss of the user's own batches, see `with_baseline`."""
    if run.config.steps == 0 or not lacks_baseline(run.subject):
        return
    with timed(run.cost, "targets"):
        run.subject, notes = with_baseline(run.subject, run.config.steps * run.config.accumulation)
        run.notes.extend(notes)


def _try_out(run: Check, progress: Begun, done: int) -> None:
    """Run the trials: the intended run, then other learning rates, then remedies."""
    with timed(run.cost, "forecast"):
        told = _stepping(progress, "forecast", done)
        run.forecast = forecast(run.subject, run.anatomy, run.config, told)
    run.notes.extend(_repeats(run))
    try:
        try_others(run, progress, done + 1)
    finally:
        run.measurements.extend(forecast_measurements(run.forecast))


def try_others(run: Check, progress: Begun, done: int) -> None:
    """Try other learning rates and remedies, as far as wanted; `done` stages came before."""
    assert run.forecast is not None
    given = (run.subject, run.anatomy, run.config)
    if run.rates and run.forecast.outcome == "not measured":
        run.notes.append(f"no other learning rates were tried: {run.forecast.reason}")
    elif run.rates:
        with timed(run.cost, "rates"):
            told = _stepping(progress, "rates", done)
            again = _counting(progress, "rates, longer trials (Ctrl-C keeps the short ones)", done)
            script_steps = run.forecast.steps if run.is_script else None
            longer = longer_trials(run.subject, run.config, run.refine, script_steps=script_steps)
            run.notes.extend(filter(None, [longer.note]))
            ladder = forecast_ladder(
                *given,
                run.rates,
                told,
                again=again,
                refine=longer.refine,
                whole=longer.whole,
                seen=unless_noise(run.forecast, run.subject, run.config) if run.is_script else None,
            )
            run.ladder = _said(run, ladder)
        run.notes.extend(run.ladder.notes)
        if not run.is_script:  # a script's own steps count more than a copy's, which repeat its batches
            run.forecast = run.ladder.longest(run.forecast)
        run.forecast = run.ladder.with_chances(run.forecast)
        run.ladder = beside_trial(run.ladder, run.forecast, max(run.config.steps, LADDER_STEPS))
    if run.try_remedies:
        done += bool(run.rates)
        progress("remedies", done)
        with timed(run.cost, "remedies"):
            run.remedies = try_remedies(
                *given,
                run.forecast,
                lambda words, number, count: progress(f"{words} ({number + 1} of {count})", done),
                whatever=run.needs_rescue,
            )


def _repeats(run: Check) -> Iterator[str]:
    """A note where the trial took the user's batches more than once, unless one says so of a single batch."""
    taken = run.config.steps * run.config.accumulation
    if not run.tried or SINGLE in run.subject.notes:
        return
    period = period_of(run.subject, taken)
    if period is not None:
        given = "a single batch is" if period == 1 else f"the {period} batches are"
        yield f"{given} repeated: the trial takes {taken}"


def _said(run: Check, ladder: LadderForecast) -> LadderForecast:
    """The ladder as the report has it."""
    return with_caveat(ladder, run.subject, run.config, run.refine, is_script=run.is_script)


def _stepping(progress: Begun, stage: str, done: int) -> Callable[[int, int], None]:
    """Begin a stage; return the `progress(step, steps)` of its trial."""
    progress(stage, done)
    return _counting(progress, stage, done)


def _counting(progress: Begun, stage: str, done: int) -> Callable[[int, int], None]:
    """The `progress(step, steps)` of a stage."""
    return lambda step, steps: progress(f"{stage}, step {step} of {steps}", done)


def _probed(
    name: str, probe: Callable[[Subject, Anatomy], Iterable[Measurement]], run: Check, reraise: bool
) -> Iterator[Measurement]:
    """Yield one probe's measurements; if it fails, a "not measured" row and a note give the reason.

    The other probes, the forecast and the verdict do not depend on it.
    """
    try:
        yield from probe(run.subject, run.anatomy)
    except BatchesError:
        raise
    except Exception as error:
        if reraise or is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        run.notes.append(f"the {name} probe could not measure this model: {reason}")
        yield not_measured(f"{name}/all", "", reason)


def _dtype(model: nn.Module) -> str:
    """The dtype of most of the model's floating-point weights, such as "float32"."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.") if sizes else "float32"


def versions() -> dict[str, str]:
    """Versions of normscope, PyTorch and Python."""
    ours, torchs = normscope.__version__, str(torch.__version__)
    return {"normscope": ours, "torch": torchs, "python": platform.python_version()}
