"""`assert_healthy`: a check that passes or raises, with the findings as the message.

It imports nothing heavy before it is called: the pytest plugin loads this file in every test run.
"""

import warnings
from typing import TYPE_CHECKING, Any, Literal

from normscope.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from normscope.report import Report
    from normscope.subjects import LossFn, Subject


def assert_healthy(
    model: "nn.Module | Subject | str",
    batch: Any = None,
    loss_fn: "LossFn | None" = None,
    *,
    fail_on: Literal["error", "warning"] = "warning",
    budget: str = "fast",
    **options: Any,
) -> "Report":
    """Check a model, and raise AssertionError with the findings unless it is healthy.

    Python warnings of the model are silenced during the check, so that a suite under `-W error` measures the
    same as any other.

    Args:
        model: a module, a `Subject`, or a MODEL as on the command line ("hf:gpt2,n_layer=4").
        batch, loss_fn: as in `normscope.check`.
        fail_on: the least severity that fails; the verdict "no trial" counts as a warning.
        budget: what Jacobians may cost: "fast", "standard" or "deep".
        options: further options of `normscope.check`: `lr`, `optimizer`, `warmup`, `steps`, `ignore`, ….

    Returns:
        The report of a model that passes.

    Raises:
        AssertionError: the model is not healthy.
        UsageError: the model, the batch or an option cannot be used.
    """
    __tracebackhide__ = True
    if fail_on not in ("error", "warning"):
        raise UsageError(f"fail_on={fail_on!r}", '"error" or "warning"', "choose one")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = _checked(model, batch, loss_fn, {"budget": budget, **options})
    except UsageError as error:  # one message; the frames inside normscope help nobody
        raise error.with_traceback(None) from error.__cause__
    if _fails(report, fail_on):
        raise AssertionError(failure(report, fail_on))
    return report


def failure(report: "Report", fail_on: str) -> str:
    """The message of a failed check, as plain text: the verdict, what failed with its remedy, the trial."""
    from normscope.report.sites import compress
    from normscope.report.words import forecast_in_words

    lines = [f"{report.model}: {report.verdict}"]
    for finding in report.findings:
        if str(finding.severity) in _grave(fail_on):
            places = f" at {compress(finding.sites)}" if finding.sites else ""
            lines.append(f"  {finding.severity} {finding.code} {finding.name}{places}")
            lines.append(f"    {finding.message}")
            lines += [f"    → {finding.remedy}"] if finding.remedy else []
    if report.verdict == "no trial" and report.forecast is not None:
        lines.append(f"  no training step was tried: {report.forecast.reason}")
    elif report.forecast is not None:
        lines.append(f"  trial: {forecast_in_words(report.forecast)}")
    return "\n".join(lines)


def _checked(model: Any, batch: Any, loss_fn: Any, options: dict[str, Any]) -> "Report":
    import normscope

    if isinstance(model, str):
        from normscope.subjects.load import load

        of_load = {key: options[key] for key in ("seed", "batch_size", "seq_len", "text") if key in options}
        model = load(model, **of_load)
    return normscope.check(model, batch, loss_fn, **options)


def _fails(report: "Report", fail_on: str) -> bool:
    grave = any(str(finding.severity) in _grave(fail_on) for finding in report.findings)
    return grave or (report.verdict == "no trial" and fail_on == "warning")


def _grave(fail_on: str) -> tuple[str, ...]:
    return ("error",) if fail_on == "error" else ("error", "warning")
