"""Output of the command line: text in any encoding, and files."""

import codecs
import contextlib
import errno
import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path
from typing import TypeGuard, TypeVar

from typer import Context

from normscope.errors import UsageError

ERRORS = "normscope"
"""Name of the codec error handler that spells out characters which the terminal's encoding lacks."""
_SPELLED = {
    **dict.fromkeys("‐‑‒–—―−", "-"), **dict.fromkeys("‘’‚′", "'"), **dict.fromkeys("“”„″«»", '"'),
    **dict.fromkeys("●•·⋅", "*"), **dict.fromkeys("━─═", "-"), **dict.fromkeys("│┃", "|"),
    "…": "...", "⋮": ":", "→": "->", "←": "<-", "↦": "->", "×": "x", "÷": "/", "±": "+-", "√": "sqrt",
    "∞": "inf", "≤": "<=", "≥": ">=", "≈": "~", "≪": "<<", "≫": ">>", "∂": "d", "Π": "prod ", "Σ": "sum ",
    "⊙": "*", "‖": "||", "∈": " in ", "◐": "+", "○": "o", "ᵀ": "^T", "ẑ": "z^", "⁻": "^-",
}  # fmt: skip
_ENDINGS: dict[str, tuple[str, ...]] = {
    ".json": ("json",),
    **dict.fromkeys((".html", ".htm"), ("html",)),
    **dict.fromkeys((".md", ".markdown"), ("markdown", "markdown-zh")),
    ".png": ("png",),
    ".parquet": ("parquet",),
    **dict.fromkeys((".pdf", ".svg", ".jpg", ".jpeg", ".csv", ".tsv", ".yaml", ".yml", ".xml", ".ipynb"), ()),
}
"""Ending of a file's name → formats that it may hold; other endings may hold any."""
FormatT = TypeVar("FormatT", bound=StrEnum)


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that cannot be encoded: "->" for an arrow, "sigma" for σ, "?" for the rest."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_spelled, error.object[error.start : error.end])), error.end


def _spelled(character: str) -> str:
    if (known := _SPELLED.get(character)) is not None:
        return known
    name = unicodedata.name(character, "")
    if name.startswith("GREEK") and len(words := name.split()) == 4 and words[2] == "LETTER":
        return words[3].lower()
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return plain or "?"


codecs.register_error(ERRORS, _spell)


def spell_out() -> None:
    """Let stdout and stderr take any character in any encoding; a closed one (`>&-`) takes it nowhere."""
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a caller's own stream may have none
            reconfigure(errors=ERRORS)


_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def is_of_output(error: BaseException) -> TypeGuard[OSError]:
    """True for an error of stdout: a full disk, or a reader that has gone. Errors of files name the file."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _OF_OUTPUT


def unwritten(error: OSError) -> str:
    """One line for an error of stdout. The rest of the output is dropped, so that Python can exit."""
    with contextlib.suppress(OSError, ValueError):  # a caller's own stream has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return str(
        UsageError(f"stdout ({error.strerror})", "an output that can be written", "write to another place")
    )


def format_for(
    path: Path | None, offered: Collection[str], given: str | None = None, option: str = "--output"
) -> str | None:
    """The format to write into `path`: `given`, else the one that the ending of its name says.

    Args:
        path: the file; None for stdout.
        offered: the command's formats.
        given: the format that the user asked for; None if they did not.
        option: the option that named the file, for the error.

    Returns:
        None if neither says one; "report", "report.txt" and "report.v2" say none.

    Raises:
        UsageError: the name ends as that of another format.
    """
    named = None if path is None else _ENDINGS.get(path.suffix.lower())
    if named is None:
        return given
    fitting = [name for name in offered if name in named and given in (None, name)]
    if fitting:
        return fitting[0]
    asked = [given] if given is not None else list(offered)
    endings = [next((e for e, names in _ENDINGS.items() if name in names), ".txt") for name in asked]
    said = f" with --format {given}" if given is not None else ""
    do = "change the name, or leave --format out" if said else "change the name"
    raise UsageError(
        f"{option} {path}{said}", f"a name that ends in {' or '.join(dict.fromkeys(endings))}", do
    )


def chosen_format(context: Context, formats: type[FormatT]) -> FormatT:
    """The command's format: --format, else what the name of --output ends in, else the default."""
    params, source = context.params, context.get_parameter_source("format")
    is_typed = source is not None and source.name == "COMMANDLINE"
    name = format_for(params["output"], [*formats], params["format"] if is_typed else None)
    return params["format"] if name is None else formats(name)


def require_writable(path: Path | None, option: str = "--output") -> None:
    """Raise UsageError if `path` cannot be written, by opening it; call this before the long work."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise UsageError(f"{option} {path} (a folder)", "a file", "name a file in it")
        if not path.resolve().parent.is_dir():
            raise UsageError(
                f"{option} {path}", "a file in a folder that exists", f"create {path.parent} first"
            )
        existed = path.exists()
        if path.is_file() or not existed:  # opening a pipe would wait for its reader
            path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, option, error, "choose another path") from error


def emit(
    rendered: str | bytes,
    output: Path | None,
    *,
    option: str = "--output",
    instead: Callable[[], str] | None = None,
) -> None:
    """Write to the file `output`, or to stdout if it is None.

    Args:
        rendered: the text, or the bytes of a file.
        output: the file.
        option: the option that named the file, for the error.
        instead: makes the text for stdout if the file cannot be written; `rendered` by default.

    Raises:
        UsageError: the file could not be written; the text went to stdout.
    """
    if output is None:
        _to_stdout(rendered)
        return
    content = rendered.encode("utf-8", "backslashreplace") if isinstance(rendered, str) else rendered
    try:
        output.write_bytes(content)
    except OSError as error:
        if instead is not None or isinstance(rendered, str):
            _to_stdout(rendered if instead is None else instead())
            raise _unwritable(output, option, error, "see stdout, where it was written instead") from error
        raise _unwritable(output, option, error, "choose another path") from error


def _unwritable(path: Path, option: str, error: OSError, do: str) -> UsageError:
    return UsageError(f"{option} {path} ({error.strerror or error})", "a file that can be written", do)


def _to_stdout(text: str | bytes) -> None:
    """Write to stdout. JSON escapes characters that the encoding lacks; a page is written as UTF-8."""
    assert isinstance(text, str)
    encoding = codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name
    if encoding == "utf-8" or text.isascii():
        sys.stdout.write(text)
    elif text.startswith(("{", "[")) and _is_json(text):
        sys.stdout.write(re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text))
    elif text.lstrip().startswith("<!") and hasattr(sys.stdout, "buffer"):
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
    else:
        sys.stdout.write(text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
