"""Source lines: the user's line that runs now."""

import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

import torch

import normscope

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(normscope.__file__).parent)
_MODELS = tuple(f"{_OURS}/{room}/" for room in ("nn", "kernels"))
_MODULES = f"{_TORCH}/nn/modules/"
_CALLERS = ("module.py", "container.py")
_STANDARD = sysconfig.get_path("stdlib")
_ENTRIES: set[CodeType] = set()

Function = TypeVar("Function", bound=Callable)


def entry(function: Function) -> Function:
    """Mark a function of ours as the outermost of the user's code that is run again."""
    _ENTRIES.add(function.__code__)
    return function


def frames() -> Iterator[FrameType]:
    """The Python frames of the code that is run again, innermost first, with PyTorch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _ENTRIES:
        yield frame
        frame = frame.f_back


def users_frame() -> FrameType | None:
    """The innermost frame outside of PyTorch, the standard library and normscope, but in a model."""
    return next((frame for frame in frames() if _is_users(frame.f_code.co_filename)), None)


def source_line() -> str:
    """The user's line that runs now, as "file.py:123: code"; that of PyTorch's module if there is none."""
    frame = users_frame()
    if frame is None:
        frame = next((f for f in frames() if _is_module(f.f_code.co_filename)), None)
    return "" if frame is None else line_of(frame)


def line_of(frame: FrameType) -> str:
    """The line of a frame, as "file.py:123: code"."""
    file, number = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, number).strip()
    where = f"{Path(file).name}:{number}"
    return f"{where}: {code}" if code else where


def _is_users(file: str) -> bool:
    if file.startswith(_MODELS):
        return True
    is_library = file.startswith(_STANDARD) and "-packages" not in file
    return not (is_library or file.startswith((f"{_TORCH}/", f"{_OURS}/", "<")))


def _is_module(file: str) -> bool:
    return file.startswith(_MODULES) and not file.endswith(_CALLERS)
