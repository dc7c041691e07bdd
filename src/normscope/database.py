"""SQLite files of normscope: creation, version, transactions and error messages."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.errors import UsageError

STORES = (".db", ".sqlite", ".sqlite3")
"""Endings of a file that is taken for a store even if it does not exist, or is another file."""


@dataclass(frozen=True)
class Database:
    """One kind of SQLite file.

    Attributes:
        application: SQLite's application_id, which distinguishes the kind from other files.
        format: version of the tables.
        tables: statements that create the tables.
        ours: description of a valid file.
        another: advice for a file that is not one.
        create: advice for a file that does not exist.
        unwritable: advice for a file that cannot be written.
        again: advice after a temporary failure.
        synchronous: SQLite's setting; with "NORMAL" a power cut can lose the last transactions.
        patience_seconds: longest wait for another writer.
    """

    application: int
    format: int
    tables: str
    ours: str
    another: str
    create: str
    unwritable: str
    again: str
    synchronous: str = "FULL"
    patience_seconds: float = 60.0

    def connect(self, path: Path, *, reading: bool = False) -> sqlite3.Connection:
        """Connect to the file at `path`; create it if it does not exist, unless only for `reading`.

        Raises:
            UsageError: the file does not exist (for reading), is of another kind or version, or cannot be
                written.
        """
        with self.in_words(path):
            if reading:
                return self._connect_to_read(path)
            connection = sqlite3.connect(path, **self._how)
            try:
                if not _is_empty(connection):
                    self._require_ours(connection, path)  # never write into another program's file
                self._keep_a_log(connection)
                connection.execute(f"PRAGMA synchronous = {self.synchronous}")
                connection.execute("PRAGMA foreign_keys = ON")
                with transaction(connection):
                    if _is_empty(connection):
                        connection.execute(f"PRAGMA application_id = {self.application}")
                        connection.execute(f"PRAGMA user_version = {self.format}")
                        for statement in filter(str.strip, self.tables.split(";")):
                            connection.execute(statement)
                # A copy of the main file alone, as by scp, is then one of ours, at most a megabyte behind.
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
                connection.execute("PRAGMA wal_autocheckpoint = 256")
                self._require_ours(connection, path)
            except BaseException:
                connection.close()
                raise
            return connection

    def _keep_a_log(self, connection: sqlite3.Connection) -> None:
        """Turn the write-ahead log on.

        SQLite does not wait for another process that does so at the same moment, such as another rank.
        """
        until = time.monotonic() + self.patience_seconds
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > until:
                    raise
            time.sleep(0.01)

    @contextmanager
    def in_words(self, path: Path) -> Iterator[None]:
        """Turn an error of SQLite into a UsageError with advice."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            for code, (expected, do) in self._advice.items():
                if name.startswith(code):
                    raise UsageError(f'store "{path}" ({error})', expected, do) from error
            raise

    @property
    def _how(self) -> dict[str, Any]:
        # A worker writes from the training thread, while the thread that opened the file waits for it.
        return {"timeout": self.patience_seconds, "isolation_level": None, "check_same_thread": False}

    @property
    def _advice(self) -> dict[str, tuple[str, str]]:
        lock = f"the write lock within {self.patience_seconds:.0f} s"
        return {
            "SQLITE_NOTADB": (self.ours, self.another),
            "SQLITE_CORRUPT": (self.ours, self.another),
            "SQLITE_READONLY": ("a file and a folder that can be written", self.unwritable),
            "SQLITE_CANTOPEN": ("a file in a folder that exists and can be written", self.another),
            "SQLITE_PERM": ("a file that can be written", self.another),
            "SQLITE_AUTH": ("a file that can be written", self.another),
            "SQLITE_FULL": ("free space on its disk", f"free space and {self.again}"),
            "SQLITE_IOERR": ("a disk without errors", f"check the disk and {self.again}"),
            "SQLITE_BUSY": (lock, f"{self.again}: another process holds the lock"),
        }

    def _connect_to_read(self, path: Path) -> sqlite3.Connection:
        if not path.is_file():
            raise UsageError(f'store "{path}" (not found)', self.ours, self.create)
        location = path.resolve().as_uri()
        try:
            return self._opened(f"{location}?mode=ro", path)
        except sqlite3.OperationalError:
            if Path(f"{path}-wal").exists():
                raise
            # Without a log file nobody writes; then the file can be read even where no log can be created.
            return self._opened(f"{location}?immutable=1", path)

    def _opened(self, location: str, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(location, uri=True, **self._how)
        try:
            self._require_ours(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_ours(self, connection: sqlite3.Connection, path: Path) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        if application != self.application:
            kind = KINDS.get(application, "another SQLite file")
            raise UsageError(f'store "{path}" ({kind})', self.ours, self.another)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != self.format:
            raise UsageError(
                f'store "{path}" (format {version})',
                f"format {self.format}, which this normscope reads",
                f"{self.another}, or use the normscope that wrote it",
            )


MAGIC = b"SQLite format 3\x00"
"""First bytes of every SQLite file that is not empty."""


LOG_MAGIC = b"\x37\x7f\x06"
"""First bytes of a write-ahead log of SQLite; a fourth byte is its byte order."""


def is_sqlite(path: Path) -> bool:
    """True for a file of SQLite, by its first bytes; its application_id may still be in its log."""
    return _begins(path, MAGIC)


def is_store(model: str) -> bool:
    """True where MODEL is the store of a run: a SQLite file by its content, or a name such as run.db."""
    path = Path(model)
    if is_sqlite(path):
        return True
    return ":" not in model and (path.suffix.lower() in STORES or is_sqlite_log(Path(f"{model}-wal")))


def is_sqlite_log(path: Path) -> bool:
    """True for a write-ahead log of SQLite, by its first bytes."""
    return _begins(path, LOG_MAGIC)


def _begins(path: Path, magic: bytes) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except (OSError, ValueError):  # a name that is too long, or no right to read
        return False


OF_MAP, OF_RUN = 0x6E736D70, 0x6E73726E  # "nsmp", "nsrn"
KINDS = {OF_MAP: "the results of normscope map", OF_RUN: "the record of a run"}
"""The application_id of each kind, and its name in messages."""


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


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
