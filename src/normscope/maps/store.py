"""Store: the cells of a map and their results, in one SQLite file that many processes share.

A cell is waiting, claimed, done or crashed. Cells that are trained as one stack form a crew. A crew is
claimed in one transaction, and its results are written in one. A crew that was killed therefore starts again
as the same stack and gives the same floats.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normscope.database import snapshot, transaction
from normscope.errors import UsageError
from normscope.maps.cell import Cell, Result
from normscope.maps.database import MAP
from normscope.maps.owner import Owner, Process
from normscope.maps.record import COLUMNS, Counts, Crew, Record, record_of, row_of
from normscope.train import RunConfig

MOST_CRASHES = 2  # after these, a crew is split into single cells, and a single cell is marked as crashed


class Store:
    """The cells of one map. Each method is one transaction; use a store from one thread at a time."""

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        self.path = Path(path)
        self._connection = MAP.connect(self.path, reading=reading)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _repr_html_(self) -> str:
        """The map in a notebook cell, with the results so far."""
        from normscope.maps.notebook import store_html  # it reads Store: imported where it is needed

        return store_html(self)

    # Reading ------------------------------------------------------------------------------------------

    def note(self, name: str) -> Any:
        """A note on the map (its settings, its stack); None if there is none."""
        row = self._one("SELECT value FROM meta WHERE name = ?", name)
        return None if row is None else json.loads(row[0])

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The `cells` that the store does not have."""
        known = {key for (key,) in self._all("SELECT key FROM cells")}
        return [cell for cell in cells if cell.key not in known]

    def require_settings(self, settings: Mapping[str, Any]) -> None:
        """Compare `settings` with those of the map; it has none before its first cell.

        Raises:
            UsageError: the map has other settings.
        """
        before = self.note("settings") or settings
        for name in sorted(before.keys() | settings.keys()):
            was, now = before.get(name), settings.get(name)
            if was != now:
                raise UsageError(
                    f"{name} {now!r} for store {str(self.path)!r}",
                    f"{was!r}, which its cells were trained with",
                    "give that value, or name another --store",
                )

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Context in which all reads see one snapshot, whatever other processes write."""
        with MAP.in_words(self.path), snapshot(self._connection):
            yield

    def counts(self) -> Counts:
        """Progress of the map."""
        with self.one_moment():
            states = dict(self._all("SELECT state, count(*) FROM cells GROUP BY state"))
            verdicts = dict(self._all("SELECT verdict, count(*) FROM results GROUP BY verdict"))
            whole, behind = self._one(
                "SELECT total(weight), total(weight) FILTER (WHERE state IN ('done', 'crashed')) FROM cells"
            )
            (begun,) = self._one(
                "SELECT total(weight * step / json_extract(config, '$.steps')) "
                "FROM cells JOIN owners ON owners.id = cells.owner WHERE state = 'claimed'"
            )
        return Counts(**states, **verdicts, share=(behind + begun) / whole if whole else 0.0)

    def records(self) -> list[Record]:
        """Every cell, in the order of enrolment."""
        rows = self._all(f"SELECT {COLUMNS} FROM cells LEFT JOIN results USING (key) ORDER BY number")
        return [record_of(row) for row in rows]

    def attempts(self) -> list[tuple[str, str | None]]:
        """Key and outcome of every attempt at a cell; the outcome is None while it is unknown."""
        return self._all("SELECT key, outcome FROM attempts ORDER BY id")

    # Writing ------------------------------------------------------------------------------------------

    def settle(self, name: str, value: Any) -> Any:
        """Write the note `name` if there is none; return the note."""
        with self._writing():
            statement = "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING"
            self._connection.execute(statement, (name, json.dumps(value)))
            return self.note(name)

    def remember(self, name: str, line: str) -> None:
        """Add a line to the note `name` unless it has it."""
        with self._writing():
            lines = (self.note(name) or "").splitlines()
            self._write(name, "\n".join(dict.fromkeys([*lines, line])))

    def enrol(self, crews: Iterable[Sequence[Cell]], settings: Mapping[str, Any] | None = None) -> None:
        """Add cells, crew by crew; cells that the store already has are not changed.

        Args:
            crews: crews of new cells.
            settings: settings of these cells, which must equal those of the map.
        """
        with self._writing():
            if settings is not None:
                self.require_settings(settings)
                self._write("settings", settings)
            (last,) = self._one("SELECT coalesce(max(crew), -1) FROM cells")
            rows = [
                (cell.key, crew, json.dumps(cell.config.to_dict()), cell.depth or 1)
                for crew, cells in enumerate(crews, last + 1)
                for cell in cells
            ]
            self._connection.executemany(
                "INSERT INTO cells (key, number, crew, config, weight, state) "
                "VALUES (?, (SELECT coalesce(max(number) + 1, 0) FROM cells), ?, ?, ?, 'waiting') "
                "ON CONFLICT (key) DO NOTHING",
                rows,
            )

    def claim(self, owner: Owner) -> Crew | None:
        """Claim the next crew for `owner`, after releasing cells of dead owners; None if no crew waits."""
        with self._writing():
            self._free_orphans()
            (crew,) = self._one("SELECT min(crew) FROM cells WHERE state = 'waiting'")
            if crew is None:
                return None
            me, keeper = owner.process, owner.keeper
            self._connection.execute(
                "INSERT INTO owners VALUES (?, ?, ?, ?, ?, ?, ?, 0) "
                "ON CONFLICT (id) DO UPDATE SET heartbeat = excluded.heartbeat, step = 0",
                (owner.id, owner.host, me.pid, me.started, keeper.pid, keeper.started, time.time()),
            )
            claimed = self._all(
                "UPDATE cells SET state = 'claimed', owner = ? WHERE crew = ? AND state = 'waiting' "
                "RETURNING number, key, config",
                owner.id,
                crew,
            )
            self._connection.executemany(
                "INSERT INTO attempts (key, owner, began) VALUES (?, ?, ?)",
                [(key, owner.id, time.time()) for _, key, _ in sorted(claimed)],
            )
            configs = [json.loads(config) for _, _, config in sorted(claimed)]
            return Crew(crew, tuple(Cell(RunConfig.from_dict(config)) for config in configs))

    def beat(self, owner: Owner, step: int = 0) -> None:
        """Record that `owner` is alive, and its current step."""
        with self._writing():
            self._connection.execute(
                "UPDATE owners SET heartbeat = ?, step = ? WHERE id = ?", (time.time(), step, owner.id)
            )

    def finish(self, owner: Owner, crew: Crew, results: Sequence[Result]) -> None:
        """Write the results of a crew, except for cells that are no longer `owner`'s."""
        with self._writing():
            held = self._held(owner)
            for cell, result in zip(crew.cells, results, strict=True):
                if cell.key in held:
                    row = row_of(cell, result)
                    names = f"({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)})"
                    self._connection.execute(f"INSERT INTO results {names}", row)
                    self._leave(cell.key, "done", "done")

    def release(self, owner: Owner, crew: Crew | None = None) -> None:
        """Set the cells of `owner`, or only its `crew`, to waiting."""
        with self._writing():
            for key in self._held(owner, crew):
                self._leave(key, "waiting", "released")

    def recover(self) -> None:
        """Set cells whose holder is gone to waiting."""
        with self._writing():
            self._free_orphans()

    def crash(self, owner: Owner, reason: str, crew: Crew | None = None) -> int:
        """Record that `owner` died or failed, and set its cells, or only its `crew`, to waiting again.

        A crew that crashes twice is split into single cells, to isolate the faulty one. A single cell that
        crashed twice or more is marked as crashed. Returns the number of cells that the owner held.
        """
        with self._writing():
            held = self._held(owner, crew)
            for key in held:
                count = "UPDATE cells SET crashes = crashes + 1, reason = ? WHERE key = ? RETURNING crashes"
                lost = self._one(count, reason, key)[0] >= MOST_CRASHES
                self._leave(key, "crashed" if lost and len(held) == 1 else "waiting", f"crashed: {reason}")
                if lost and len(held) > 1:
                    self._connection.execute(
                        "UPDATE cells SET crew = (SELECT max(crew) + 1 FROM cells) WHERE key = ?", (key,)
                    )
            return len(held)

    def retry_crashed(self) -> None:
        """Set crashed cells to waiting."""
        with self._writing():
            self._connection.execute(
                "UPDATE cells SET state = 'waiting', crashes = 0, reason = NULL WHERE state = 'crashed'"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with MAP.in_words(self.path), transaction(self._connection):
            yield

    # Within a transaction -----------------------------------------------------------------------------

    def _write(self, name: str, value: Any) -> None:
        statement = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        self._connection.execute(statement, (name, json.dumps(value)))

    def _free_orphans(self) -> None:
        holders = "SELECT * FROM owners WHERE id IN (SELECT owner FROM cells WHERE state = 'claimed')"
        for name, host, pid, started, keeper_pid, keeper_started, heartbeat, _ in self._all(holders):
            owner = Owner(Process(pid, started), Process(keeper_pid, keeper_started), host, name)
            if owner.is_gone(heartbeat):
                for key in self._held(owner):
                    self._leave(key, "waiting", "lost")

    def _held(self, owner: Owner, crew: Crew | None = None) -> list[str]:
        keys = self._all("SELECT key FROM cells WHERE owner = ? AND state = 'claimed'", owner.id)
        wanted = None if crew is None else {cell.key for cell in crew.cells}
        return [key for (key,) in keys if wanted is None or key in wanted]

    def _leave(self, key: str, state: str, outcome: str) -> None:
        self._connection.execute("UPDATE cells SET state = ?, owner = NULL WHERE key = ?", (state, key))
        self._connection.execute(
            "UPDATE attempts SET ended = ?, outcome = ? WHERE key = ? AND outcome IS NULL",
            (time.time(), outcome, key),
        )

    def _all(self, statement: str, *values: Any) -> list[Any]:
        with MAP.in_words(self.path):
            return self._connection.execute(statement, values).fetchall()

    def _one(self, statement: str, *values: Any) -> Any:
        return next(iter(self._all(statement, *values)), None)
