"""Run store: the record of one run in a SQLite file, which other processes read while it grows.

Each rank begins the run once in the file, and writes its rows, alarms and events in one transaction per
flush. A value of a row is kept in a blob, because SQLite turns a NaN in a REAL column into NULL.
"""

import functools
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.database import OF_RUN, Database, snapshot, transaction
from normscope.errors import UsageError, suggest
from normscope.maps.owner import Owner, Process
from normscope.monitor.alarms import is_measured
from normscope.monitor.row import Event, Layout, Raised, Row
from normscope.probes import Measurement
from normscope.rules import Finding, Severity

FORMAT = 1
TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ranks (
    rank INTEGER PRIMARY KEY, token TEXT NOT NULL, attempt INTEGER NOT NULL, rewinds INTEGER NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, started TEXT NOT NULL, began REAL NOT NULL, seen REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'ended', 'failed')), reason TEXT NOT NULL
);
CREATE TABLE layouts (
    id INTEGER PRIMARY KEY, rank INTEGER NOT NULL, name TEXT NOT NULL, columns TEXT NOT NULL,
    UNIQUE (rank, name, columns)
);
CREATE TABLE rows (
    rank INTEGER NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL,
    layout INTEGER NOT NULL REFERENCES layouts (id), time REAL NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (rank, name, step)
);
CREATE TABLE alarms (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, rank INTEGER NOT NULL, attempt INTEGER NOT NULL,
    time REAL NOT NULL, code TEXT NOT NULL, name TEXT NOT NULL, severity TEXT NOT NULL, sites TEXT NOT NULL,
    message TEXT NOT NULL, evidence TEXT NOT NULL, threshold TEXT NOT NULL, source TEXT NOT NULL,
    remedy TEXT NOT NULL, remedies TEXT NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, rank INTEGER NOT NULL, attempt INTEGER NOT NULL,
    time REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL
);
"""
RUN = Database(
    application=OF_RUN,
    format=FORMAT,
    tables=TABLES,
    ours="a run store that normscope.Monitor wrote",
    another="name another file",
    create="name the file that the Monitor of the run was given as store",
    unwritable="name another file",
    again="try again; what was written before is safe",
    synchronous="NORMAL",
    patience_seconds=10.0,
)
_LITTLE = np.dtype("<f8")


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


@dataclass(frozen=True)
class Grid:
    """Values of one quantity by step and site.

    Attributes:
        steps: [n], ascending.
        sites: names of the sites, in depth order.
        values: [n, sites]; NaN where a step has no value of a site.
        present: [n, sites]; False where a step has no value of a site. A NaN where it is True was measured.
    """

    steps: NDArray[np.int64]
    sites: tuple[str, ...]
    values: NDArray[np.float64]
    present: NDArray[np.bool_]


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
            self._connection.execute(statement, (name, _json(value)))

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
                    (self.rank, row.layout, row.step, ids[row.layout], row.time, _blob(row.values))
                    for row in rows
                ],
            )
            self._connection.executemany(
                "INSERT INTO alarms VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(a.step, self.rank, self._attempt, a.time, *_cells(a.finding)) for a in alarms],
            )
            self._connection.executemany(
                "INSERT INTO events VALUES (NULL, ?, ?, ?, ?, ?, ?)",
                [(e.step, self.rank, self._attempt, e.time, e.kind, _json(dict(e.data))) for e in events],
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
                written = any(self._one(f"SELECT 1 FROM {t} WHERE rank = ?", self.rank) for t in _OF_RANK)
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


_OF_RANK = ("rows", "alarms", "events")


def ends_since(path: Path, moment: float) -> tuple[list[str], int]:
    """Ends of the ranks with rows that began since `moment` (s since the epoch), and number of alarms since.

    The end of a rank is the reason why it failed, "" where it did not.

    It leaves no file beside the store, which a reader cannot remove.
    """
    connection = RUN.connect(path)
    try:
        ranks = connection.execute(
            "SELECT CASE state WHEN 'failed' THEN reason ELSE '' END FROM ranks "
            "WHERE began >= ? AND rank IN (SELECT rank FROM rows) ORDER BY rank",
            (moment,),
        ).fetchall()
        counted = connection.execute("SELECT count(*) FROM alarms WHERE time >= ?", (moment,)).fetchone()
    finally:
        connection.close()
    return [reason for (reason,) in ranks], counted[0]


class RunReader:
    """Reader of a run store, also while it is written. Each method reads one state of the file.

    Raises:
        UsageError: the file does not exist, is no run store, or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._connection = RUN.connect(self.path, reading=True)

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Context in which all reads see one state, whatever the run writes."""
        with RUN.in_words(self.path), snapshot(self._connection):
            yield

    def damage(self) -> str | None:
        """First damage that SQLite finds in the file; None for a sound one. It reads the whole file."""
        (found,) = self._all("PRAGMA quick_check(1)")[0]
        return None if found == "ok" else str(found)

    def notes(self) -> dict[str, Any]:
        """All notes on the run."""
        return {name: json.loads(value) for name, value in self._all("SELECT name, value FROM meta")}

    def ranks(self) -> list[RankState]:
        """State of each rank, by rank."""
        fields = "rank, attempt, rewinds, host, pid, started, began, seen, state, reason"
        return [
            RankState(rank, attempt, rewinds, host, Process(pid, started), *rest)
            for rank, attempt, rewinds, host, pid, started, *rest in self._all(
                f"SELECT {fields} FROM ranks ORDER BY rank"
            )
        ]

    @property
    def last_step(self) -> int | None:
        """Last step that any rank has written; None before the first."""
        of_name = "SELECT max(step) FROM rows WHERE rows.rank = layouts.rank AND rows.name = layouts.name"
        last: int | None = self._all(f"SELECT max(({of_name})) FROM layouts")[0][0]
        return last

    def columns(self, rank: int = 0, name: str | None = None) -> dict[str, list[str]]:
        """Sites of each quantity of the rank's rows, or of those of one layout, in depth order."""
        found: dict[str, list[str]] = {}
        statement = "SELECT columns FROM layouts WHERE rank = ? AND name = coalesce(?, name) ORDER BY id"
        for (columns,) in self._all(statement, rank, name):
            of_layout: dict[str, list[str]] = {}
            for quantity, site in json.loads(columns):
                of_layout.setdefault(quantity, []).append(site)
            for quantity, sites in of_layout.items():
                found[quantity] = _merged([found.get(quantity, []), sites])
        return found

    def series(
        self, quantity: str, site: str = "", rank: int = 0, *, after: int = -1
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of one quantity at one site, from the steps that have it.

        Args:
            quantity: see `columns`.
            site: see `columns`.
            rank: rank of the process.
            after: only later steps.

        Returns:
            Steps [n], ascending, and values [n].

        Raises:
            UsageError: no row has the quantity at the site.
        """
        grid = self._grid(quantity, rank, after, site)
        if not grid.sites:
            self._refuse(quantity, rank, site)
        return grid.steps, grid.values[:, 0]

    def grid(self, quantity: str, rank: int = 0, *, after: int = -1) -> Grid:
        """Values of one quantity at all its sites, of all steps or only the later ones.

        Raises:
            UsageError: no row has the quantity.
        """
        grid = self._grid(quantity, rank, after)
        if not grid.sites:
            self._refuse(quantity, rank)
        return grid

    def whole(self, quantity: str, *, after: int = -1) -> Grid:
        """Values of the whole model, at the steps that all ranks have, of one that ranks hold parts of.

        That is the root of the sum of their squares, see `sharded.PARTS`.

        Raises:
            UsageError: a rank has no row with the quantity.
        """
        with self.one_moment():
            parts = [self.grid(quantity, each.rank, after=after) for each in self.ranks()]
        steps = functools.reduce(np.intersect1d, (part.steps for part in parts))
        rows = [np.searchsorted(part.steps, steps) for part in parts]
        values = sum(part.values[row] ** 2 for part, row in zip(parts, rows, strict=True)) ** 0.5
        present = np.all([part.present[row] for part, row in zip(parts, rows, strict=True)], axis=0)
        return Grid(steps, parts[0].sites, values, present)

    def table(
        self, quantity: str, rank: int = 0, *, after: int = -1
    ) -> tuple[NDArray[np.int64], list[str], NDArray[np.float64]]:
        """Steps, sites and values of `grid`."""
        grid = self.grid(quantity, rank, after=after)
        return grid.steps, list(grid.sites), grid.values

    def last_rows(self, rank: int = 0) -> list[tuple[Row, Layout]]:
        """The last row of each name, with its layout."""
        statement = (
            "SELECT step, time, rows.name, data, columns FROM rows JOIN layouts ON layouts.id = layout "
            "WHERE rows.rank = ? AND rows.name = ? ORDER BY step DESC LIMIT 1"
        )
        with self.one_moment():
            names = self._all("SELECT DISTINCT name FROM layouts WHERE rank = ? ORDER BY name DESC", rank)
            found = [row for (name,) in names for row in self._all(statement, rank, name)]
        return [
            (
                Row(step, rank, moment, name, np.frombuffer(data, dtype=_LITTLE)),
                tuple((quantity, site) for quantity, site in json.loads(columns)),
            )
            for step, moment, name, data, columns in found
        ]

    def rows(
        self, rank: int, name: str, *, after: int, until: int | None = None
    ) -> list[tuple[int, float, int, NDArray[np.float64]]]:
        """Steps, times, numbers of the layouts and values of the rows after one step, up to another."""
        statement = (
            "SELECT step, time, layout, data FROM rows "
            "WHERE rank = ? AND name = ? AND step > ? AND step <= coalesce(?, step) ORDER BY step"
        )
        return [
            (step, moment, layout, np.frombuffer(data, dtype=_LITTLE))
            for step, moment, layout, data in self._all(statement, rank, name, after, until)
        ]

    def layout(self, number: int) -> Layout:
        """Columns of a layout, by the number that `rows` gives."""
        ((text,),) = self._all("SELECT columns FROM layouts WHERE id = ?", number)
        return tuple((quantity, site) for quantity, site in json.loads(text))

    def last_step_of(self, rank: int, name: str) -> int | None:
        """Last step of a rank's rows of one name; None before the first."""
        last: int | None = self._all("SELECT max(step) FROM rows WHERE rank = ? AND name = ?", rank, name)[0][
            0
        ]
        return last

    def first_step_since(self, moment: float, rank: int) -> int | None:
        """First step of a rank whose row was written since `moment`, in seconds since the epoch."""
        first: int | None
        ((first,),) = self._all("SELECT min(step) FROM rows WHERE rank = ? AND time >= ?", rank, moment)
        return first

    def all_rows(self, until: int | None = None) -> Iterator[tuple[Row, Layout]]:
        """All rows of all ranks by step, then rank, each with its layout; a step's own figures come first.

        Args:
            until: last step; None for all.
        """
        known: dict[str, Layout] = {}
        layouts: dict[int, Layout] = {}
        for number, text in self._all("SELECT id, columns FROM layouts"):
            if text not in known:
                known[text] = tuple((quantity, site) for quantity, site in json.loads(text))
            layouts[number] = known[text]
        statement = (
            "SELECT step, rank, time, name, layout, data FROM rows WHERE step <= coalesce(?, step) "
            "ORDER BY step, rank, name DESC"
        )
        with RUN.in_words(self.path):
            for step, rank, moment, name, layout, data in self._connection.execute(statement, (until,)):
                yield Row(step, rank, moment, name, np.frombuffer(data, dtype=_LITTLE)), layouts[layout]

    def alarms(self) -> list[Raised]:
        """All alarms, in the order they were written."""
        fields = (
            "step, rank, time, attempt, code, name, severity, sites, message, evidence, threshold, source, "
            "remedy, remedies"
        )
        return [
            Raised(step, rank, moment, _finding(*cells), attempt)
            for step, rank, moment, attempt, *cells in self._all(f"SELECT {fields} FROM alarms ORDER BY id")
        ]

    def events(self, kind: str | None = None) -> list[Event]:
        """All events, or those of one kind, in the order they were written."""
        rows = self._all("SELECT step, rank, time, kind, data, attempt FROM events ORDER BY id")
        return [
            Event(step, rank, moment, of, json.loads(data), attempt)
            for step, rank, moment, of, data, attempt in rows
            if kind in (None, of)
        ]

    def _grid(self, quantity: str, rank: int, after: int, only: str | None = None) -> Grid:
        """As `grid`, with no sites instead of an error; `only` restricts it to one site."""
        of_rows = "SELECT step, data FROM rows WHERE rank = ? AND name = ? AND step > ? AND layout = ?"
        parts = []
        with self.one_moment():
            layouts = self._all("SELECT id, name, columns FROM layouts WHERE rank = ? ORDER BY id", rank)
            for number, name, text in layouts:
                columns = json.loads(text)
                found = {
                    i: site for i, (of, site) in enumerate(columns) if of == quantity and only in (None, site)
                }
                if found:
                    rows = self._all(of_rows, rank, name, after, number)
                    data = np.frombuffer(b"".join(blob for _, blob in rows), dtype=_LITTLE)
                    at = np.array([step for step, _ in rows], dtype=np.int64)
                    parts.append(
                        (at, list(found.values()), data.reshape(len(rows), len(columns))[:, list(found)])
                    )
        sites = _merged(part for _, part, _ in parts)
        steps = np.unique(np.concatenate([at for at, _, _ in parts])) if parts else np.empty(0, np.int64)
        values = np.full((len(steps), len(sites)), np.nan)
        present = np.zeros(values.shape, dtype=np.bool_)
        for at, part, data in parts:
            columns = np.array([sites.index(site) for site in part])
            cells = np.searchsorted(steps, at)[:, None], columns
            values[cells], present[cells] = data, is_measured(data)
        return Grid(steps, tuple(sites), values, present)

    def _refuse(self, quantity: str, rank: int, site: str = "") -> None:
        known = self.columns(rank)
        if quantity in known:
            sites = known[quantity]
            given, choices = f'site "{site}" of {quantity}', sites
        else:
            given, choices = f"quantity {quantity!r}", list(known)
        expected = f"one of {', '.join(choices)}" if choices else "a run that has written rows"
        raise UsageError(given, expected, suggest(quantity, choices, "choose one"))

    def _all(self, statement: str, *values: Any) -> list[Any]:
        with RUN.in_words(self.path):
            return self._connection.execute(statement, values).fetchall()


def _merged(parts: Iterable[Sequence[str]]) -> list[str]:
    """Names of all parts; a new name comes after its predecessor, and parts with no name in common follow."""
    merged: list[str] = []
    for part in parts:
        at = next((merged.index(name) for name in part if name in merged), len(merged))
        for name in part:
            if name in merged:
                at = merged.index(name)
            else:
                merged.insert(at, name)
            at += 1
    return merged


def _blob(values: NDArray[np.float64]) -> bytes:
    return np.ascontiguousarray(values, dtype=_LITTLE).tobytes()


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _cells(finding: Finding) -> tuple[str, ...]:
    """The finding as cells of the table of alarms."""
    return (
        finding.code,
        finding.name,
        str(finding.severity),
        json.dumps(finding.sites),
        finding.message,
        json.dumps([measurement.to_dict() for measurement in finding.evidence]),
        finding.threshold,
        finding.source,
        finding.remedy,
        json.dumps(finding.remedies),
    )


def _finding(
    code: str,
    name: str,
    severity: str,
    sites: str,
    message: str,
    evidence: str,
    threshold: str,
    source: str,
    remedy: str,
    remedies: str,
) -> Finding:
    return Finding(
        code=code,
        name=name,
        severity=Severity(severity),
        sites=tuple(json.loads(sites)),
        message=message,
        evidence=tuple(_measurement(row) for row in json.loads(evidence)),
        threshold=threshold,
        source=source,
        remedy=remedy,
        remedies=tuple(json.loads(remedies)),
    )


def _measurement(row: Mapping[str, Any]) -> Measurement:
    value = tuple(row["value"]) if isinstance(row["value"], list) else row["value"]
    return Measurement(**{**row, "value": value})


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
