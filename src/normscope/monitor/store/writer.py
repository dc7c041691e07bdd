"""Writer of a run store."""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normscope.database import transaction
from normscope.errors import UsageError
from normscope.maps.owner import Owner
from normscope.monitor.row import Event, Layout, Raised, Row
from normscope.monitor.store.cells import as_blob, as_json, cells_of
from normscope.monitor.store.tables import OF_RANK, RUN


class RunStore:
    """Writer of one rank's record. Each method is one transaction; use it from one thread at a time.

    Args:
        path: the file; it is created if it does not exist.
        rank: rank of this process; several ranks may write to one file on the same machine.
        resume: go on with a run of this rank that the file holds. Its rows from the first new step on are
            replaced.

    Raises:
        UsageError: the file cannot be written, is no run store, or holds a run of this rank and `resume` is
            False. Every method raises it if the file can no longer be written.
    """

    def __init__(self, path: str | Path, *, rank: int = 0, resume: bool = False) -> None:
        self.path, self.rank = Path(path), rank
        self._token, self._attempt = uuid.uuid4().hex, 0
        self._layouts: dict[str, Layout] = {}
        self._ids: dict[str, int] = {}
        self._is_first = resume
        self._connection = RUN.connect(self.path)
        try:
            self._begin(resume)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. The run stays "running" unless `end` was called."""
        self._connection.close()

    def note(self, name: str, value: Any) -> None:
        """Write or replace a note on the run, such as its model or its recipe, that JSON can hold."""
        with self._writing():
            statement = (
                "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
            )
            self._connection.execute(statement, (name, as_json(value)))

    def declare(self, name: str, layout: Layout) -> None:
        """Set the columns of the rows called `name` that are added from now on."""
        if self._layouts.get(name) != layout:
            self._layouts[name] = layout
            self._ids.pop(name, None)

    def add(
        self, rows: Iterable[Row] = (), alarms: Iterable[Raised] = (), events: Iterable[Event] = ()
    ) -> None:
        """Write rows, alarms and events of this rank, all or none; a row replaces that of the same step.

        Raises:
            ValueError: a row does not fit its layout, or has none.
        """
        rows, alarms, events = list(rows), list(alarms), list(events)
        self._require_fit(rows)
        of = {*(r.rank for r in rows), *(a.rank for a in alarms), *(e.rank for e in events)}
        if of - {self.rank}:
            raise ValueError(f"a record of another rank in the store of rank {self.rank}")
        with self._writing():
            if self._is_first and rows:
                self._forget(min(row.step for row in rows))
            ids = {name: self._id(name) for name in dict.fromkeys(row.layout for row in rows)}
            self._connection.executemany(
                "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (self.rank, row.layout, row.step, ids[row.layout], row.time, as_blob(row.values))
                    for row in rows
                ],
            )
            self._connection.executemany(
                "INSERT INTO alarms VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(a.step, self.rank, self._attempt, a.time, *cells_of(a.finding)) for a in alarms],
            )
            self._connection.executemany(
                "INSERT INTO events VALUES (NULL, ?, ?, ?, ?, ?, ?)",
                [(e.step, self.rank, self._attempt, e.time, e.kind, as_json(dict(e.data))) for e in events],
            )
        self._ids |= ids  # only now: a transaction that failed has written none
        self._is_first = self._is_first and not rows

    def end(self, reason: str = "") -> None:
        """Mark the run as ended, or as failed for a `reason`."""
        with self._writing():
            self._connection.execute(
                "UPDATE ranks SET state = ?, reason = ? WHERE rank = ?",
                ("failed" if reason else "ended", reason, self.rank),
            )

    def _begin(self, resume: bool) -> None:
        with RUN.in_words(self.path), transaction(self._connection):
            before = self._one("SELECT attempt, rewinds, began FROM ranks WHERE rank = ?", self.rank)
            if before is not None:
                written = any(self._one(f"SELECT 1 FROM {t} WHERE rank = ?", self.rank) for t in OF_RANK)
                if written and not resume:
                    raise UsageError(
                        f'store "{self.path}" (it holds the run of {_date(before[2])})',
                        "a file without a run",
                        "name another file, delete this one, or go on with its run by resume=True",
                    )
                self._attempt = before[0] + written
            rewinds = 0 if before is None else before[1]
            owner, now = Owner.here(), time.time()
            process = owner.process
            self._connection.execute(
                "INSERT OR REPLACE INTO ranks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'running', '')",
                (
                    self.rank,
                    self._token,
                    self._attempt,
                    rewinds,
                    owner.host,
                    process.pid,
                    process.started,
                    now,
                    now,
                ),
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Transaction of a writer that still holds its rank; the time of its last write is kept."""
        with RUN.in_words(self.path), transaction(self._connection):
            held = self._connection.execute(
                "UPDATE ranks SET seen = ? WHERE rank = ? AND token = ?",
                (time.time(), self.rank, self._token),
            )
            if held.rowcount != 1:
                raise UsageError(
                    f'store "{self.path}" (another process has taken over rank {self.rank})',
                    "one process per rank and file",
                    "give each process its rank, or a file of its own",
                )
            yield

    def _require_fit(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.layout not in self._layouts:
                raise ValueError(f"no layout {row.layout!r} was declared")
            columns = len(self._layouts[row.layout])
            if row.values.shape != (columns,):
                raise ValueError(f"a row of {row.values.shape} values; layout {row.layout!r} has {columns}")

    def _id(self, name: str) -> int:
        if name in self._ids:
            return self._ids[name]
        key = self.rank, name, json.dumps(self._layouts[name])
        self._connection.execute("INSERT OR IGNORE INTO layouts VALUES (NULL, ?, ?, ?)", key)
        found: int = self._one("SELECT id FROM layouts WHERE rank = ? AND name = ? AND columns = ?", *key)[0]
        return found

    def _forget(self, step: int) -> None:
        """Delete this rank's rows from `step` on, because the run goes back to it; alarms and events stay."""
        self._connection.execute("DELETE FROM rows WHERE rank = ? AND step >= ?", (self.rank, step))
        self._connection.execute("UPDATE ranks SET rewinds = rewinds + 1 WHERE rank = ?", (self.rank,))

    def _one(self, statement: str, *values: Any) -> Any:
        return self._connection.execute(statement, values).fetchone()


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
