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
from normscope.monitor.row import Raised
from normscope.monitor.scene import Scene
from normscope.monitor.store import RunReader
from normscope.rules import Finding, Severity

DURING, AFTER = "monitor", "check"
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
    """

    step: int
    ranks: tuple[int, ...]
    attempt: int
    by: str
    finding: Finding

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data."""
        place = {"step": self.step, "ranks": list(self.ranks), "attempt": self.attempt, "by": self.by}
        return place | self.finding.to_dict()


def findings_of(reader: RunReader, scene: Scene) -> list[RunFinding]:
    """All findings of a run, ordered by severity, then step."""
    during = list(scene.alarms)
    known = {(each.finding.code, _of_rank(each.finding, each.rank)) for each in during}
    attempts = {each.rank: each.attempt for each in scene.ranks}
    after = [
        Raised(step, rank, moment, finding, attempts.get(rank, 0))
        for step, rank, moment, finding in judged_again(reader, scene)
        if (finding.code, _of_rank(finding, rank)) not in known
    ]
    found = [*_folded(during, DURING), *_folded(after, AFTER)]
    return sorted(found, key=lambda each: (_GRAVITY[each.finding.severity], each.step))


def _of_rank(finding: Finding, rank: int) -> int | None:
    """The rank that a finding is about; None where it compares the ranks."""
    return None if finding.code == RANK_APART.code else rank


def judged_again(reader: RunReader, scene: Scene) -> Iterable[tuple[int, int, float, Finding]]:
    """(step, rank, time, finding) of each alarm of the stored rows, all ranks in one `Judges`."""
    judges = Judges(facts_of(scene.notes, len(scene.ranks)))
    for row, layout in reader.all_rows(scene.last_step):
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


def _folded(alarms: Sequence[Raised], by: str) -> list[RunFinding]:
    """Alarms of one code at one step as one finding, whatever rank raised them."""
    groups: dict[tuple[int, int, str], list[Raised]] = {}
    for alarm in alarms:
        groups.setdefault((alarm.attempt, alarm.step, alarm.finding.code), []).append(alarm)
    return [
        RunFinding(step, tuple(sorted({each.rank for each in group})), attempt, by, group[0].finding)
        for (attempt, step, _), group in groups.items()
    ]
