"""Findings of a run: the alarms that its monitor raised, and those that its rows raise when judged again.

The stored alarms stand as they are: they are what was known at the step, also of steps that the run did
again later. The stored rows are judged once more by the alarms of this version, all ranks together. An alarm
from there is added where its rank has no stored alarm of the same code; NS814, which compares ranks, where no
rank has one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.monitor.alarms import Judges
from normscope.monitor.alarms.ranks import RANK_APART
from normscope.monitor.alarms.wrong import GARBAGE_VALUE, NOT_FINITE
from normscope.monitor.row import RESCUE, Event, Raised, Row
from normscope.monitor.scene import Scene
from normscope.monitor.store import RunReader
from normscope.rules import Finding, Severity

DURING, AFTER = "monitor", "check"
RESCUED, DONE_AGAIN = "rescued", "done again"
VALUES = (NOT_FINITE.code, GARBAGE_VALUE.code)
"""Alarms that say that a value went wrong."""
_GRAVITY = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


@dataclass(frozen=True)
class RunFinding:
    """A finding about a run.

    Attributes:
        step: optimizer step.
        ranks: ranks that raised it at this step.
        attempt: number of times that the run had been resumed.
        by: "monitor" where the run's own monitor raised it, "check" where the stored rows do.
        finding: what it says; of several ranks, that of the first.
        passed: `RESCUED` or `DONE_AGAIN` where it counts less for the verdict, see `severity`; else "".
    """

    step: int
    ranks: tuple[int, ...]
    attempt: int
    by: str
    finding: Finding
    passed: str = ""

    @property
    def severity(self) -> Severity:
        """Severity for the verdict: an error at a rescued step is a warning; of a step done again, a note."""
        if self.passed == DONE_AGAIN:
            return Severity.NOTE
        is_error = self.finding.severity is Severity.ERROR
        return Severity.WARNING if self.passed == RESCUED and is_error else self.finding.severity

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data."""
        place = {"step": self.step, "ranks": list(self.ranks), "attempt": self.attempt, "by": self.by}
        return place | {"passed": self.passed} | self.finding.to_dict()


class Past:
    """Steps of a run that no longer count: a rescue passed over them, or a resumed run did them again.

    Attributes:
        again: first step that the last attempt did anew; None in a run that was never resumed.
    """

    def __init__(self, reader: RunReader, scene: Scene) -> None:
        self._rescued = rescued_steps(scene.events)
        self._attempts = {each.rank: each.attempt for each in scene.ranks}
        began = {each.rank: each.began for each in scene.ranks if each.attempt}
        first = [reader.first_step_since(moment, rank) for rank, moment in began.items()]
        self.again = min((step for step in first if step is not None), default=None)
        self._began = began

    def of(self, step: int, rank: int, attempt: int, *, is_value: bool) -> str:
        """Why a record of a step counts less: `RESCUED`, `DONE_AGAIN`; else "".

        Args:
            is_value: whether it says that a value went wrong; a rescue passes over nothing else.
        """
        if self.again is not None and step >= self.again and attempt < self._attempts.get(rank, attempt):
            return DONE_AGAIN
        return RESCUED if is_value and step in self._rescued else ""

    def is_stale(self, row: Row) -> bool:
        """Whether a row is of an earlier attempt, and the others have done its step again."""
        return self.again is not None and row.step >= self.again and row.time < self._began.get(row.rank, 0.0)


def rescued_steps(events: Iterable[Event]) -> set[int]:
    """Steps whose updates a rescue left out, or took back."""
    steps: set[int] = set()
    for event in events:
        if event.kind == RESCUE and event.data.get("action") in ("skip", "back"):
            steps |= set(range(int(event.data.get("to", event.step)), event.step + 1))
    return steps


def findings_of(reader: RunReader, scene: Scene, past: Past) -> list[RunFinding]:
    """All findings of a run, ordered by severity, then step."""
    during = list(scene.alarms)
    known = {(each.finding.code, _of_rank(each.finding, each.rank)) for each in during}
    attempts = {each.rank: each.attempt for each in scene.ranks}
    after = [
        Raised(step, rank, moment, finding, attempts.get(rank, 0))
        for step, rank, moment, finding in judged_again(reader, scene, past)
        if (finding.code, _of_rank(finding, rank)) not in known
    ]
    found = [*_folded(during, DURING, past), *_folded(after, AFTER, past)]
    return sorted(found, key=lambda each: (_GRAVITY[each.severity], each.step))


def _of_rank(finding: Finding, rank: int) -> int | None:
    """The rank that a finding is about; None where it compares the ranks."""
    return None if finding.code == RANK_APART.code else rank


def judged_again(reader: RunReader, scene: Scene, past: Past) -> Iterable[tuple[int, int, float, Finding]]:
    """(step, rank, time, finding) of each alarm of the stored rows, all ranks in one `Judges`."""
    judges = Judges(facts_of(scene.notes, len(scene.ranks)))
    for row, layout in reader.all_rows(scene.last_step):
        if past.is_stale(row):
            continue
        for finding in judges.feed(row.step, layout, row.values, rank=row.rank):
            yield row.step, row.rank, row.time, finding


def facts_of(notes: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The facts that the alarms need, as far as the run noted them."""
    noted = notes.get("facts")
    facts = dict(noted) if isinstance(noted, Mapping) else {}
    if notes.get("entropy") is not None:
        facts.setdefault("entropy", notes["entropy"])
    if notes.get("sharded"):
        facts["sharded"] = True
    return facts | ({"ranks": ranks} if ranks > 1 else {})


def _folded(alarms: Sequence[Raised], by: str, past: Past) -> list[RunFinding]:
    """Alarms of one code at one step as one finding, whatever rank raised them."""
    groups: dict[tuple[int, int, str], list[Raised]] = {}
    for alarm in alarms:
        groups.setdefault((alarm.attempt, alarm.step, alarm.finding.code), []).append(alarm)
    found = []
    for (attempt, step, code), group in groups.items():
        ranks = tuple(sorted({each.rank for each in group}))
        passed = past.of(step, ranks[0], attempt, is_value=code in VALUES)
        found.append(RunFinding(step, ranks, attempt, by, group[0].finding, passed))
    return found
