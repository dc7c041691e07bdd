"""Readers of a run store, also while the run goes on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.database import snapshot
from normscope.errors import UsageError, suggest
from normscope.maps.owner import Process
from normscope.monitor.row import Event, Layout, Raised, Row
from normscope.monitor.store.cells import finding_of, layout_of, values_of
from normscope.monitor.store.grid import Grid, Part, grid_of, merged, whole_of
from normscope.monitor.store.rank import RankState
from normscope.monitor.store.tables import RUN


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
                found[quantity] = merged([found.get(quantity, []), sites])
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

        That is the root of the sum of their squares, see `row.PARTS`.

        Raises:
            UsageError: a rank has no row with the quantity.
        """
        with self.one_moment():
            parts = [self.grid(quantity, each.rank, after=after) for each in self.ranks()]
        return whole_of(parts)

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
            (Row(step, rank, moment, name, values_of(data)), layout_of(columns))
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
            (step, moment, layout, values_of(data))
            for step, moment, layout, data in self._all(statement, rank, name, after, until)
        ]

    def layout(self, number: int) -> Layout:
        """Columns of a layout, by the number that `rows` gives."""
        ((text,),) = self._all("SELECT columns FROM layouts WHERE id = ?", number)
        return layout_of(text)

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
                known[text] = layout_of(text)
            layouts[number] = known[text]
        statement = (
            "SELECT step, rank, time, name, layout, data FROM rows WHERE step <= coalesce(?, step) "
            "ORDER BY step, rank, name DESC"
        )
        with RUN.in_words(self.path):
            for step, rank, moment, name, layout, data in self._connection.execute(statement, (until,)):
                yield Row(step, rank, moment, name, values_of(data)), layouts[layout]

    def alarms(self) -> list[Raised]:
        """All alarms, in the order they were written."""
        fields = (
            "step, rank, time, attempt, code, name, severity, sites, message, evidence, threshold, source, "
            "remedy, remedies"
        )
        return [
            Raised(step, rank, moment, finding_of(*cells), attempt)
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
                    steps = np.array([step for step, _ in rows], dtype=np.int64)
                    values = values_of(b"".join(blob for _, blob in rows)).reshape(len(rows), len(columns))
                    parts.append(Part(steps, list(found.values()), values[:, list(found)]))
        return grid_of(parts)

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
