"""Kept results of remedies: the ranking of each failing run, and what became of it in 300 training steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from normscope.forecast import Forecast
from normscope.rules.remedies.trying import needs_rescue

Run = TypeVar("Run")
Line = dict[str, Any]


@dataclass(frozen=True)
class Kept(Generic[Run]):
    """Lines of a file of results; of several for the same, the last counts.

    Attributes:
        lines: of kind "truth" (300 steps of a run with some remedies or none), "again" (a later ranking of a
            missed run), "other seed" (300 steps of the first-ranked with another seed), and `rankings`.
        run_of: the run that a line belongs to.
        rankings: kind of the lines with every remedy forecast on a run.
    """

    lines: Sequence[Line]
    run_of: Callable[[Line], Run]
    rankings: str = "ranking"

    def _of(self, kind: str, run: Run) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind and self.run_of(line) == run]

    def truth(self, run: Run, names: Iterable[str]) -> Line | None:
        """Result of 300 steps with these remedies; None if they were not run."""
        found = [line for line in self._of("truth", run) if line["names"] == list(names)]
        return found[-1] if found else None

    def trains(self, run: Run, names: Iterable[str]) -> bool:
        """True if the run trains with these remedies (or, for no names, unchanged)."""
        line = self.truth(run, names)
        return line is not None and line.get("trains", False)

    def ranking(self, run: Run) -> Line | None:
        """The ranking of a run."""
        found = self._of(self.rankings, run)
        return found[-1] if found else None

    def attempts(self, run: Run) -> list[Line]:
        """The remedies in the ranking of a run; empty without one."""
        line = self.ranking(run)
        return [] if line is None else list(line["attempts"])

    def order(self, run: Run) -> list[tuple[str, ...]]:
        """The remedies that apply, by rank."""
        return [tuple(a["names"]) for a in self.attempts(run) if a["status"] != "not applicable"]

    def another(self, run: Run) -> Line | None:
        """Result of the first-ranked remedy with another seed; None if it was not run."""
        found = [
            line
            for line in self._of("other seed", run)
            if (tuple(line["names"]),) == tuple(self.order(run)[:1])
        ]
        return found[-1] if found else None

    def ranked_again(self, run: Run) -> tuple[str, ...]:
        """The remedy that the later ranking of a missed run puts first; empty if there is none."""
        found = self._of("again", run)
        return tuple(found[-1]["attempts"][0]["names"]) if found else ()

    def rescuers(self, run: Run) -> list[tuple[str, ...]]:
        """All remedies that rescued a run in training."""
        return [tuple(r["names"]) for r in self._of("truth", run) if r["names"] and r.get("trains")]

    def is_judged(self, run: Run) -> bool:
        """True if the first-ranked remedy was trained; a run on which none applies is missed."""
        order = self.order(run)
        return self.ranking(run) is not None and (not order or self.truth(run, order[0]) is not None)

    def is_rescued(self, run: Run) -> bool:
        """True if the first-ranked remedy rescues the run."""
        order = self.order(run)
        return bool(order) and self.trains(run, order[0])

    def is_foreseen(self, run: Run) -> bool:
        """True if the forecast says that the unchanged run fails, so that `check` tries remedies."""
        line = self.ranking(run)
        return line is not None and needs_rescue(Forecast(line["before"], "", "", 0.0, 0, 0, None))
