"""RunReport: everything that the store of a run says about it, and the verdict."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from normscope.monitor.after.figures import Figures, figures_of, gaps
from normscope.monitor.after.findings import DONE_AGAIN, Past, RunFinding, findings_of
from normscope.monitor.after.opening import opened
from normscope.monitor.alarms.growth import SPANS
from normscope.monitor.alarms.looks import APART
from normscope.monitor.alarms.tokens import LATE_COLLAPSE
from normscope.monitor.row import LOOK, NOISE, RANKS, RESCUE, Event
from normscope.monitor.scene import Scene, Watcher, of_event
from normscope.report.report import strict
from normscope.rules import ALARMS, Finding, Record, Severity, matches, parse_codes

SCHEMA = "normscope.run/1"
"""Name of the JSON Schema of `RunReport.to_dict()`, schemas/run.json."""
LEAST_STEPS = SPANS[0] * APART
"""Steps from which on all alarms have judged a run; slow alarms need this many."""
MONITOR_FAILED = "monitor-failed"
_CTRL_C = "KeyboardInterrupt"

RunVerdict = Literal["failed", "at risk", "undecided", "healthy"]


@dataclass(frozen=True)
class RunReport:
    """A run, as its store has it.

    Attributes:
        scene: state, notes, first wrong value, events and loss of the run.
        findings: the findings that were kept, ordered by severity, then step.
        figures: figures of the first rank.
        verdict: "failed" where a finding is an error, a value went wrong, or the run failed or died; else
            "at risk" with a warning, or a wrong value that a rescue passed over; else "undecided" where the
            run still goes on, was interrupted, is short, or has missing figures; else "healthy".
        why: the reason for the verdict, a sentence.
    """

    scene: Scene
    findings: tuple[RunFinding, ...]
    figures: Figures
    verdict: RunVerdict
    why: str
    schema: str = SCHEMA

    @property
    def model(self) -> str:
        """Name of the model that the run noted; "" without one."""
        name = self.scene.notes.get("model")
        return name if isinstance(name, str) else ""

    @property
    def rescues(self) -> tuple[Event, ...]:
        """Interventions in the run, such as skipped steps and rollbacks."""
        return tuple(event for event in self.scene.events if event.kind.startswith(RESCUE))

    @property
    def looks(self) -> tuple[Event, ...]:
        """Looks at the model with the probes of `check`; their findings are no part of the verdict."""
        return tuple(event for event in self.scene.events if event.kind == LOOK)

    @property
    def events(self) -> tuple[Event, ...]:
        """Other events."""
        known = {id(event) for event in (*self.rescues, *self.looks)}
        return tuple(event for event in self.scene.events if id(event) not in known)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was not watched."""
        noted = self.scene.notes.get("notes")
        return tuple(map(str, noted)) if isinstance(noted, list) else ()

    @property
    def severities(self) -> set[str]:
        """Severities for `--fail-on`: of the findings, and of the verdict itself."""
        of_verdict = {"failed": "error", "at risk": "warning", "undecided": "warning"}.get(self.verdict)
        found = {str(each.severity) for each in self.findings}
        return found | ({of_verdict} if of_verdict else set())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data that strict JSON can hold: what is not finite is a string, as "nan"."""
        scene = self.scene.to_dict()
        loss = self.scene.loss
        return strict(
            {
                "schema": self.schema,
                "store": scene["store"],
                "model": self.model or None,
                "verdict": self.verdict,
                "why": self.why,
                "state": scene["state"],
                "reason": scene["reason"],
                "ranks": scene["ranks"],
                "first_wrong_value": scene["first_wrong_value"],
                "findings": [each.to_dict() for each in self.findings],
                "rescues": [of_event(event) for event in self.rescues],
                "looks": [of_event(event) for event in self.looks],
                "events": [of_event(event) for event in self.events],
                "figures": self.figures.to_dict(),
                "loss": {
                    "steps": [] if loss is None else loss.steps[loss.present[:, 0]].tolist(),
                    "values": [] if loss is None else loss.values[loss.present[:, 0], 0].tolist(),
                },
                "notes": list(self.notes),
                "noted": {name: value for name, value in scene["notes"].items() if name != "notes"},
            }
        )

    def to_json(self) -> str:
        """One JSON object, indented, in the schema of schemas/run.json."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_markdown(self, command: str | None = None) -> str:
        """The report for a pull request; `command` is the shell command that made it."""
        from normscope.monitor.after.markdown import render_markdown  # it reads RunReport

        return render_markdown(self, command)

    def to_html(self, path: str | Path | None = None, *, command: str | None = None) -> str:
        """The report as one self-contained HTML page.

        Args:
            path: file to write it to; None only returns it.
            command: shell command that made the report.
        """
        from normscope.monitor.after.page import render_page  # it reads RunReport

        page = render_page(self, command)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def assert_healthy(self) -> None:
        """Raise AssertionError, with the verdict, its reason and the findings, unless it is "healthy".

        For a test or a job that comes after a training run.
        """
        __tracebackhide__ = True  # pytest shows the caller's line
        if self.verdict != "healthy":
            named = [each for each in self.findings if each.severity is not Severity.NOTE]
            listed = "".join(f"\n  {each.severity} {_named(each)}: {each.finding.message}" for each in named)
            raise AssertionError(f"{self.scene.path}: verdict {self.verdict!r}, {self.why}{listed}")

    def __repr__(self) -> str:
        """Store, verdict and codes, for a prompt."""
        codes = ", ".join(dict.fromkeys(each.finding.code for each in self.findings))
        return f"<RunReport of {self.scene.path}: {self.verdict}{'; ' * bool(codes)}{codes}>"


def is_interrupted(scene: Scene) -> bool:
    """Whether Ctrl-C ended the run."""
    return scene.state == "failed" and scene.reason.startswith(_CTRL_C)


def check_run(
    path: str | Path, *, select: str | Iterable[str] = (), ignore: str | Iterable[str] = ()
) -> RunReport:
    """Report on the run whose store is `path`: while it goes on, after its end, or after it died.

    Args:
        path: the file that the run's Monitor wrote; nothing is written to it.
        select, ignore: codes, prefixes ("NS8") or names of findings to keep or to drop.

    Raises:
        UsageError: the file cannot be read, or holds no run; or a code is unknown.
    """
    path = Path(path)
    wanted, dropped = parse_codes(select, of=ALARMS), parse_codes(ignore)
    with opened(path) as reader:
        scene = Watcher(path).look(reader)
        past = Past(reader, scene)
        found = findings_of(reader, scene, past)
        figures = figures_of(reader, scene.ranks[0].rank, scene.last_step)

    def is_kept(each: Finding | Record) -> bool:
        return (not wanted or _is_one_of(each, wanted)) and not _is_one_of(each, dropped)

    kept = tuple(each for each in found if is_kept(each.finding))
    wrong = scene.wrong  # counts whatever is selected
    passed = "" if wrong is None else past.of(wrong.step, wrong.rank, wrong.attempt, is_value=True)
    still_wrong = None if passed == DONE_AGAIN else wrong
    verdict, why = _verdict(scene, kept, figures, still_wrong, passed, is_kept)
    if verdict == "healthy" and (wanted or dropped):
        why = _among(wanted, dropped, figures)
    return RunReport(scene, kept, figures, verdict, why)


def _among(wanted: tuple[str, ...], dropped: tuple[str, ...], figures: Figures) -> str:
    """The reason of "healthy" where only some alarms were asked for."""
    among = f" among {', '.join(wanted)}" if wanted else ""
    without = f", {', '.join(dropped)} ignored" if dropped else ""
    return f"no alarm{among} in {figures.num_steps} steps{without}"


def _is_one_of(finding: Finding | Record, codes: tuple[str, ...]) -> bool:
    return any(matches(finding, code) for code in codes)


def _verdict(
    scene: Scene,
    findings: tuple[RunFinding, ...],
    figures: Figures,
    wrong: Event | None,
    passed: str,
    is_asked: Callable[[Record], bool],
) -> tuple[RunVerdict, str]:
    """The verdict with its reason.

    Args:
        wrong: the first wrong value.
        passed: of it, as of a finding.
        is_asked: whether an alarm was not left out.
    """
    last = scene.last_step
    until = "before its first step" if last is None else f"after step {last}"
    errors = [each for each in findings if each.severity is Severity.ERROR]
    warnings = [each for each in findings if each.severity is Severity.WARNING]
    if wrong is not None and not passed:
        return "failed", f"a value went wrong at step {wrong.step}"
    if errors:
        return "failed", _named(errors[0])
    if scene.state == "failed" and not is_interrupted(scene):
        return "failed", f"the run failed {until}: {scene.reason}"
    if scene.state == "gone":
        return "failed", f"the run died {until}, without an end: {scene.reason}"
    if wrong is not None:
        return "at risk", f"a value went wrong at step {wrong.step}, which a rescue passed over"
    if warnings:
        return "at risk", _named(warnings[0])
    reasons = list(_open(scene, figures, is_asked))
    if reasons:
        return "undecided", "; ".join(reasons)
    return "healthy", f"no alarm in {figures.num_steps} steps"


def _named(found: RunFinding) -> str:
    return f"{found.finding.code} {found.finding.name} at step {found.step}"


def _open(scene: Scene, figures: Figures, is_asked: Callable[[Record], bool]) -> Iterator[str]:
    """Reasons why a run without alarms is not judged healthy."""
    if is_interrupted(scene):
        yield f"the run was interrupted after step {scene.last_step}"
    if scene.state in ("running", "silent"):
        silent = f", and has not written for {scene.silence:.0f} s" if scene.state == "silent" else ""
        yield f"the run still goes on at step {scene.last_step}{silent}"
    failed = next((event for event in scene.events if event.kind == MONITOR_FAILED), None)
    if failed is not None:
        yield f"the monitor stopped at step {failed.step}: {failed.data.get('error')}"
    yield from (event.sentence for event in scene.events if event.kind == RANKS)
    if NOISE in scene.notes and is_asked(LATE_COLLAPSE):
        yield f"NS808 late-collapse was not judged: dropout can hide it, and {scene.notes[NOISE]}"
    if not figures.num_steps:
        yield "no step was stored"
    elif figures.num_steps < LEAST_STEPS:
        yield f"{figures.num_steps} steps are fewer than the {LEAST_STEPS} that slow alarms need"
    yield from gaps(figures)
