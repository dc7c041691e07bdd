"""The diagnosis: packages and machine together, and what is wrong."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import normscope
from normscope.doctor import machine
from normscope.doctor.packages import NEEDED, OPTIONAL, Found, look_up
from normscope.errors import describe

SCHEMA = "normscope.doctor/1"
LEAST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Diagnosis:
    """All that `normscope doctor` says.

    Attributes:
        python: version, executable and platform.
        packages: those that are needed first, then the optional ones.
        devices: processors and accelerators; None where PyTorch cannot be imported.
        flush_denormal: whether the processor can flush denormals; None as above.
        terminal: encoding of the output.
        fonts: font of the pictures; None where matplotlib cannot be imported.
        folders: folders that are written to.
        problems: needed things that are missing or broken, each with what to do.
    """

    python: dict[str, Any]
    packages: tuple[Found, ...]
    devices: dict[str, Any] | None
    flush_denormal: bool | None
    terminal: dict[str, Any]
    fonts: dict[str, Any] | None
    folders: list[dict[str, Any]]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data, in the schema "normscope.doctor/1"."""
        return {
            "schema": SCHEMA,
            "normscope": normscope.__version__,
            **vars(self),
            "packages": [found.to_dict() for found in self.packages],
            "problems": list(self.problems),
        }


def diagnose() -> Diagnosis:
    """Look at this machine. Nothing is installed, downloaded or changed."""
    found = tuple(map(look_up, (*NEEDED, *OPTIONAL)))
    works = {each.package.name for each in found if each.status == "ok"}
    problems = [
        *_of_python(),
        *(_in_words(each) for each in found if each.status != "ok" and not each.package.extra),
    ]
    folders = machine.folders()
    for folder in folders:
        if folder["use"] == "temporary files" and not folder["writable"]:
            problems.append(
                f"temporary files cannot be written to {folder['path']}: set TMPDIR to another folder"
            )
    return Diagnosis(
        python=machine.python(),
        packages=found,
        devices=_asked(machine.devices, "torch" in works, problems),
        flush_denormal=_asked(machine.flushes_denormals, "torch" in works, problems),
        terminal=machine.terminal(),
        fonts=_asked(machine.fonts, "matplotlib" in works, problems),
        folders=folders,
        problems=tuple(problems),
    )


def _of_python() -> list[str]:
    if sys.version_info >= LEAST_PYTHON:
        return []
    wanted = ".".join(map(str, LEAST_PYTHON))
    return [
        f"Python {sys.version.split()[0]}: expected {wanted} or newer; make an environment with a newer one"
    ]


def _in_words(found: Found) -> str:
    package = found.package
    given = f"{package.name} {found.version or 'is missing'}"
    wrong = {
        "too old": f": expected {package.minimum} or newer",
        "broken": f" cannot be imported ({found.reason})",
    }
    return f"{given}{wrong.get(found.status, '')}: {package.install}"


def _asked(question: Callable[[], Any], can_be_asked: bool, problems: list[str]) -> Any:
    """The answer of a library, or None and a problem where it breaks on the question."""
    if not can_be_asked:
        return None
    try:
        return question()
    except Exception as error:  # a driver that does not fit, a device that is gone
        problems.append(
            f"{question.__name__.replace('_', ' ')} cannot be read ({describe(error)}): check the drivers"
        )
        return None
