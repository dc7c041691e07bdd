"""Files with the command of a training script, which is run for a few steps and captured."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.capture.folder import Settings as Capturing
from normscope.capture.launch import captured
from normscope.compare.side import SavedSide, Settings
from normscope.errors import UsageError

_EXPECTED = "a line with options of check and the command of a training script: -- python train.py"
_OPTIONS = {"--steps": int, "--budget": str, "--module": str}
_NUMBERED = re.compile(r"(?P<path>.+):(?P<number>[1-9]\d*)")
_LONGEST = 1 << 20
"""Bytes above which a file is not read as commands."""


@dataclass(frozen=True)
class Command:
    """One command of a file.

    Attributes:
        words: the words of the script's command.
        options: options of the check: "steps", "budget" and "module".
    """

    words: tuple[str, ...]
    options: Mapping[str, Any]


def is_commands(text: str) -> bool:
    """Whether `text` is FILE or FILE:NUMBER, with a file that has a command behind `--`."""
    path, _ = _split(text)
    try:
        if not path.is_file() or path.suffix == ".py" or path.stat().st_size > _LONGEST:
            return False
        return any("--" in line.split() for line in _lines(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return False


def of_commands(text: str, settings: Settings) -> SavedSide:
    """Run the command of a file for a few steps, as `check -- COMMAND` does, and take its report.

    Raises:
        UsageError: the file has no command, or several without a number, or the script cannot be followed.
    """
    command = command_of(text)
    known = set(Capturing.__dataclass_fields__)
    given = {name: value for name, value in settings.check.items() if name in known}
    capturing = Capturing(**{"command": shlex.join(command.words), **given, **command.options})
    outcome = captured(command.words, capturing)
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    if outcome.report is None:
        given_words, _, rest = outcome.reason.partition(": expected ")
        expected, _, do = rest.rpartition("; ")
        raise UsageError(
            f'{given_words} (of "{text}")',
            expected or "a script that trains a PyTorch model",
            do.removesuffix(".") or "check the command",
        )
    report = outcome.report.to_dict()
    if outcome.reason:
        report["notes"] = [*report["notes"], outcome.reason]
    return SavedSide(text, report)


def command_of(text: str) -> Command:
    """The command of FILE, or the one at NUMBER of FILE:NUMBER.

    Raises:
        UsageError: the file has no such command, or several without a number, or an unknown option.
    """
    path, number = _split(text)
    lines = [line for line in _lines(path.read_text(encoding="utf-8")) if "--" in line.split()]
    if number is None and len(lines) > 1:
        given = f'"{text}" with {len(lines)} commands'
        raise UsageError(given, "one command", f'write "{path}:1" for the first of them')
    if number is not None and number > len(lines):
        raise UsageError(f'"{text}" of a file with {len(lines)} commands', _EXPECTED, "check the number")
    line = lines[(number or 1) - 1]
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"`{line}` of {path} ({error})", _EXPECTED, "close the quote") from error
    at = words.index("--")
    before, command = words[:at], words[at + 1 :]
    if before[:2] == ["normscope", "check"]:
        before = before[2:]
    if not command:
        raise UsageError(f"`{line}` of {path}", _EXPECTED, "write the command after --")
    return Command(tuple(command), _options(before, line, path))


def _options(words: list[str], line: str, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for name, value in zip(rest[::2], [*rest[1::2], None], strict=False):
        if name not in _OPTIONS or value is None:
            given = f'"{name}" before -- in `{line}` of {path}'
            raise UsageError(given, f"{', '.join(_OPTIONS)} with a value", "leave it out")
        try:
            found[name.removeprefix("--")] = _OPTIONS[name](value)
        except ValueError as error:
            raise UsageError(f"{name} {value} in {path}", "a whole number", "fix that line") from error
    return found


def _lines(text: str) -> list[str]:
    """The lines of a file of commands, without comments, with continued ones joined."""
    joined = re.sub(r"\\\r?\n", " ", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def _split(text: str) -> tuple[Path, int | None]:
    if (found := _NUMBERED.fullmatch(text)) is not None and not Path(text).exists():
        return Path(found["path"]), int(found["number"])
    return Path(text), None
