"""Atomic writes of files and folders: a kill or a power cut leaves a whole one or none."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from normscope.errors import UsageError, describe


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`."""
    write_file(path, lambda half: half.write_text(text, encoding="utf-8"))


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by the file that `write` writes, in one rename."""
    half = _half(path)
    try:
        write(half)
        _sync(half)
        half.replace(path)
        _sync(path.parent)
    finally:
        half.unlink(missing_ok=True)


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Replace `path` by the folder that `fill` fills.

    A new folder appears in one rename. While an old one is replaced, there is a moment without either.
    """
    half = _half(path)
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir(parents=True)
        fill(half)
        for file in half.iterdir():
            _sync(file)
        _sync(half)
        if path.exists():
            shutil.rmtree(path)
        half.replace(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def remove_halves(folder: Path) -> None:
    """Remove unfinished files and folders that killed writers left in `folder`."""
    for path in folder.glob(".half-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def disk_refusals(what: str, do: str) -> Iterator[None]:
    """Turn errors of the disk (full, read-only or gone) in the block into a UsageError about `what`."""
    from safetensors import SafetensorError  # here, as `normscope --help` imports this module

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else describe(error)
        raise UsageError(f"{what} ({reason})", "a folder that can be written, with room in it", do) from error


def _half(path: Path) -> Path:
    return path.with_name(f".half-{os.getpid()}-{path.name}")


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
