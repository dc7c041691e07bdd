"""Recognition of a run's store among the words of a command line, and clear messages where it is none."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normscope.database import is_sqlite
from normscope.errors import UsageError, suggest
from normscope.monitor.store import RunReader

EXPECTED = "the store of a run, which a normscope.Monitor wrote"


@contextmanager
def opened(path: Path) -> Iterator[RunReader]:
    """Reader of the run at `path`, all of whose reads see one state.

    Raises:
        UsageError: the file is missing, empty, damaged or of another kind, or holds no run.
    """
    _require_file(path)
    with _reader(path) as reader:
        try:
            _require_sound(reader, path)  # before: it reads the whole file, and the run goes on
            with reader.one_moment():
                yield reader
        except (sqlite3.Error, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise _damaged(path, str(error)) from error


def _reader(path: Path) -> RunReader:
    try:
        return RunReader(path)
    except UsageError as error:
        code = getattr(error.__cause__, "sqlite_errorname", "") or ""
        if code.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")) and _log(path).exists():
            raise UsageError(
                f'store "{path}" (its folder cannot be written)',
                f"a folder that can be written, because the last steps are still in {_log(path).name}",
                f"copy {path.name} and {_log(path).name} to another folder",
            ) from error
        raise


def _require_file(path: Path) -> None:
    """Raise UsageError unless there is a file of SQLite at `path`."""
    if path.is_dir():
        raise UsageError(f'store "{path}" (a folder)', EXPECTED, "name a file in it")
    if not path.exists():
        if _log(path).exists():
            given = f'store "{path}" (missing; only its log {_log(path).name} is there)'
            raise UsageError(given, "the file and its log together", f"copy {path.name} here as well")
        others = [each.name for each in path.parent.glob("*") if each.suffix == path.suffix and each != path]
        do = suggest(path.name, others, "name the file that the Monitor was given as store")
        raise UsageError(f'store "{path}" (not found)', EXPECTED, do)
    if path.is_file() and not path.stat().st_size:
        raise UsageError(f'store "{path}" (an empty file)', EXPECTED, "name another file")
    if not is_sqlite(path):
        raise UsageError(f'store "{path}" (no SQLite file)', EXPECTED, "name another file")


def _require_sound(reader: RunReader, path: Path) -> None:
    if (broken := reader.damage()) is not None:
        raise _damaged(path, broken)
    if not reader.ranks():
        raise UsageError(f'store "{path}" (it holds no run)', EXPECTED, "name another file")


def _damaged(path: Path, why: str) -> UsageError:
    words = " ".join(why.split())
    return UsageError(
        f'store "{path}" (damaged: {words})',
        "a whole file",
        f"copy it again from its machine, together with {_log(path).name} if that exists",
    )


def _log(path: Path) -> Path:
    return Path(f"{path}-wal")
