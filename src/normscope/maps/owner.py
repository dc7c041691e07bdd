"""Process that holds a cell, and the check whether it still runs.

A process on this machine is known by its id and its start time (ids are used again). Its keeper, the process
that started it, marks what it held when it dies, so that others only take cells whose keeper is gone too.
"""

import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

LEASE_SECONDS = 120.0  # without a heartbeat, a process that cannot be seen from here counts as gone


@dataclass(frozen=True)
class Process:
    """A process of a host: its id, and its start time in the kernel's words where it has them."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has this id now."""
        return cls(pid, _started(pid))

    @property
    def is_alive(self) -> bool:
        """True if it still runs: one that has died and waits for its parent does not."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # somebody else's, alive
        started = _started(self.pid)
        return started != "dead" and started == self.started


@dataclass(frozen=True)
class Owner:
    """A process that claims cells.

    Attributes:
        process: itself.
        keeper: who tells the store when it dies; itself where nobody else does.
        host: its machine, with the namespace of its process ids.
        id: name of this owner, unique among all that ever were.
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
        """True if nobody will tell the store what becomes of its cells."""
        if self.host != _host():
            return time.time() - heartbeat > LEASE_SECONDS
        return not (self.process.is_alive or self.keeper.is_alive)


def _host() -> str:
    """This machine's name; containers of one name count their processes apart."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """Start time of a process, "dead" for one that has ended, "" where the system does not report it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "" if not Path("/proc/self/stat").exists() else "dead"
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "dead" if state in "ZX" else fields[18]
