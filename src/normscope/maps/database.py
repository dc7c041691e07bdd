"""The SQLite file of a store: tables, version, and error messages."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normscope.errors import UsageError

FORMAT = 1
APPLICATION = 0x6E736D70  # "nsmp": distinguishes stores from other SQLite files
PATIENCE_SECONDS = 60.0  # longest wait for another writer
OURS, ANOTHER = "a store that normscope map wrote", "name another --store"

# A worker writes from the training thread, while the thread that opened the store waits for it.
_HOW: dict[str, Any] = {"timeout": PATIENCE_SECONDS, "isolation_level": None, "check_same_thread": False}

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE owners (
    id TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, started TEXT NOT NULL,
    keeper_pid INTEGER NOT NULL, keeper_started TEXT NOT NULL,
    heartbeat REAL NOT NULL, step INTEGER NOT NULL
);
CREATE TABLE cells (
    key TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, crew INTEGER NOT NULL, config TEXT NOT NULL,
    weight REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'claimed', 'done', 'crashed')),
    owner TEXT REFERENCES owners (id), crashes INTEGER NOT NULL DEFAULT 0, reason TEXT,
    CHECK ((state = 'claimed') = (owner IS NOT NULL))
);
CREATE INDEX cells_by_state ON cells (state, crew);
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL REFERENCES cells (key), owner TEXT NOT NULL,
    began REAL NOT NULL, ended REAL, outcome TEXT
);
CREATE TABLE results (
    key TEXT PRIMARY KEY REFERENCES cells (key), verdict TEXT NOT NULL, losses BLOB NOT NULL,
    unigram_entropy REAL NOT NULL, certain_at INTEGER, certain TEXT, stopped INTEGER NOT NULL,
    seconds REAL NOT NULL, stack INTEGER NOT NULL, versions TEXT NOT NULL, finished REAL NOT NULL
);
"""


def connect(path: Path, *, reading: bool = False) -> sqlite3.Connection:
    """Connect to the store at `path`; create it if it does not exist, unless only for `reading`.

    Raises:
        UsageError: the file does not exist (for reading), is not a store, has another version, or cannot be
            written.
    """
    with in_words(path):
        if reading:
            return _connect_to_read(path)
        connection = sqlite3.connect(path, **_HOW)
        try:
            if not _is_empty(connection):
                _require_ours(connection, path)  # never write into another program's file
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            with transaction(connection):
                if _is_empty(connection):
                    connection.execute(f"PRAGMA application_id = {APPLICATION}")
                    connection.execute(f"PRAGMA user_version = {FORMAT}")
                    for statement in filter(str.strip, TABLES.split(";")):
                        connection.execute(statement)
            _require_ours(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise UsageError(
            f'store "{path}" (not found)',
            OURS,
            "name one, or create it with --schemes, --depths and --lrs",
        )
    location = path.resolve().as_uri()
    try:
        return _opened(f"{location}?mode=ro", path)
    except sqlite3.OperationalError:
        if Path(f"{path}-wal").exists():
            raise
        # Without a log file nobody is writing; then the file can be read even where no log can be created.
        return _opened(f"{location}?immutable=1", path)


def _opened(location: str, path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(location, uri=True, **_HOW)
    try:
        _require_ours(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Transaction that takes the write lock at the start, so that values read in it stay valid."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # on a full disk SQLite itself has rolled back
            connection.execute("ROLLBACK")
        raise


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Context in which all reads see the same state; may be nested."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Turn an error of SQLite into a UsageError with advice."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        for code, (expected, do) in _WORDS.items():
            if name.startswith(code):
                raise UsageError(f'store "{path}" ({error})', expected, do) from error
        raise


_AGAIN = "run the same command again"
_INTACT = "finished cells are safe"
_WORDS = {
    "SQLITE_NOTADB": (OURS, ANOTHER),
    "SQLITE_CORRUPT": (OURS, ANOTHER),
    "SQLITE_READONLY": (
        "a file and a folder that can be written",
        "copy it, or leave the grid out to show the results in it",
    ),
    "SQLITE_CANTOPEN": ("a file in a folder that exists and can be written", ANOTHER),
    "SQLITE_PERM": ("a file that can be written", ANOTHER),
    "SQLITE_AUTH": ("a file that can be written", ANOTHER),
    "SQLITE_FULL": ("free space on its disk", f"free space and {_AGAIN}; {_INTACT}"),
    "SQLITE_IOERR": ("a disk without errors", f"check the disk and {_AGAIN}; {_INTACT}"),
    "SQLITE_BUSY": ("the write lock within a minute", f"{_AGAIN}: another process holds the lock"),
}


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


def _require_ours(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise UsageError(f'store "{path}" (another SQLite file)', OURS, ANOTHER)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT:
        raise UsageError(
            f'store "{path}" (format {version})',
            f"format {FORMAT}, which this normscope reads",
            f"{ANOTHER}, or use the normscope that wrote it",
        )
