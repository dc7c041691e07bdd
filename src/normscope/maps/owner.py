"""Process that holds a cell, and the check whether it still runs.

A process on this machine is identified by its id and its start time, because ids are reused. Its keeper is
the process that started it. When a process dies, its keeper releases its cells; others take cells only if the
keeper is gone too.
"""

import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

LEASE_SECONDS = 120.0  # a process on another machine counts as gone after this time without a heartbeat


@dataclass(frozen=True)
class Process:
    """A process of a host: its id, and its start time as the kernel gives it, if it does."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that currently has this id."""
        return cls(pid, _started(pid))

    @property
    def is_alive(self) -> bool:
        """True if it still runs; a zombie does not."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # alive, but another user's
        started = _started(self.pid)
        return started != "dead" and started == self.started


@dataclass(frozen=True)
class Owner:
    """A process that claims cells.

    Attributes:
        process: the process.
        keeper: the process that tells the store when it dies; itself if there is no other.
        host: its machine, with the namespace of its process ids.
        id: name of this owner, never used twice.
    """

    process: Process
    keeper: Process
    host: str = field(default_factory=lambda: _host())
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def here(cls) -> "Owner":
        """This process."""
        me = Process.of(os.getpid())
        return cls(me, me)

    def is_gone(self, heartbeat: float) -> bool:
        """True if neither it nor its keeper can report on its cells any more."""
        if self.host != _host():
            return time.time() - heartbeat > LEASE_SECONDS
        return not (self.process.is_alive or self.keeper.is_alive)


def _host() -> str:
    """This machine's name, with the namespace of process ids, which differs between containers."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """Start time of a process; "dead" if it has ended, "" if the system does not report it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "" if not Path("/proc/self/stat").exists() else "dead"
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "dead" if state in "ZX" else fields[18]
