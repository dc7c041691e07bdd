"""State of a rank, as its run store has it."""

from dataclasses import dataclass

from normscope.maps.owner import Owner, Process


@dataclass(frozen=True)
class RankState:
    """State of one rank of a run.

    Attributes:
        rank: the rank.
        attempt: number of times that it was resumed.
        rewinds: number of times that it went back to an earlier step.
        host: name of its machine, as `Owner` names it.
        process: its process.
        began: time of its start, in seconds since the epoch.
        seen: time of its last write.
        state: "running", "ended" or "failed"; a process that was killed stays "running".
        reason: reason of a failure, else "".
    """

    rank: int
    attempt: int
    rewinds: int
    host: str
    process: Process
    began: float
    seen: float
    state: str
    reason: str

    @property
    def is_gone(self) -> bool:
        """True if it is "running" but its process has died, on this machine; elsewhere that is not known."""
        return self.state == "running" and self.host == Owner.here().host and not self.process.is_alive
