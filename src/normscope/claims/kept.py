"""Long results kept in docs/claims-long.json: what `normscope claims --long --format json` wrote, no plots.

The file is in the repository and not in the wheel: an installed package shows no long results.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import normscope
from normscope.claims.cache import own_code
from normscope.claims.claim import Claim

PATH = Path(normscope.__file__).parents[2] / "docs" / "claims-long.json"


@dataclass(frozen=True)
class Kept:
    """The long result of a claim.

    Attributes:
        result: as `ClaimResult.to_dict` has it.
        command, date: what was typed, and when.
        machine: where, in words.
        is_current: whether it was measured by the claim's present code.
    """

    result: Mapping[str, Any]
    command: str
    date: str
    machine: str
    is_current: bool

    @property
    def where(self) -> str:
        """`2026-11-21, AMD EPYC, 2 cores, torch 2.13.0: normscope claims --long`."""
        return f"{self.date}, {self.machine}: {self.command}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the verdict, the figure, and where they are from."""
        names = ("verdict", "condition", "figure", "counterexample", "stable", "seconds")
        return {name: self.result.get(name) for name in names} | {
            "command": self.command,
            "date": self.date,
            "machine": self.machine,
            "current": self.is_current,
        }


def kept_long(claim: Claim) -> Kept | None:
    """The kept long result of `claim`, None where there is none."""
    given = kept_document()
    result = next((each for each in given.get("claims", ()) if each["id"] == claim.id), None)
    if result is None or not result.get("long") or result["verdict"] == "not measured":
        return None
    return Kept(
        result=result,
        command=given["command"],
        date=given["date"],
        machine=machine_words(given["machine"]),
        is_current=result.get("digest") == own_code(claim),
    )


@functools.cache
def kept_document() -> Mapping[str, Any]:
    """All of the file, empty where it is not there."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}


def machine_words(machine: Mapping[str, str]) -> str:
    """`AMD EPYC, 2 cores, Python 3.11.7, torch 2.13.0`, and the GPU where there is one."""
    words = [
        machine["processor"],
        f"{machine['cores']} core{'' if machine['cores'] == '1' else 's'}",
        f"Python {machine['python']}",
        f"torch {machine['torch'].partition('+')[0]}",
    ]
    return ", ".join(words + [machine["cuda"]] * (machine["cuda"] != "none"))
