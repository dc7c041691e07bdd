"""`Cache`: tested claims kept by the code that tested them and the environment it ran in."""

import functools
import hashlib
import json
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import normscope
from normscope.claims.claim import CLAIMS, Claim
from normscope.claims.look import Look
from normscope.claims.runs import Runs
from normscope.claims.tested import Tested
from normscope.train.atomic import write_text

PACKAGE = Path(normscope.__file__).parent
ELSEWHERE = ("cli", "bench", "report", "monitor")
"""Rooms that no figure of a claim depends on."""
SHOWING = ("words.py", "page.py", "draw.py", "markdown.py", "run.py", "worker.py")
"""Files of this room that only show or carry what was measured."""


def default_folder() -> Path:
    """Where tested claims are kept: `$XDG_CACHE_HOME/normscope/claims`, or the same under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normscope" / "claims"


class Cache:
    """Tested claims in a folder, a file each, under a key of code and environment.

    Args:
        folder: made when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, claim: Claim, look: Look) -> Tested | None:
        """The claim as it was tested before, None where it was not."""
        path = self._path(claim, look)
        try:
            return Tested.from_cache(claim, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def write(self, tested: Tested, look: Look) -> None:
        """Keep it, unless it failed or could not be measured: then it is tried again."""
        if tested.error is None and tested.evidence.cases:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self._path(tested.claim, look), json.dumps(tested.to_cache()))

    def runs(self) -> Runs:
        """Where trained runs are kept: those that the same code trained."""
        return Runs(self.folder / f"runs-{_digest([_shared_code(), environment()])}")

    def _path(self, claim: Claim, look: Look) -> Path:
        text = None if look.text is None else hashlib.sha256(look.text.read_bytes()).hexdigest()
        parts = [
            _shared_code(),
            _own_code(claim.measure.__module__),
            environment(),
            list(look.seeds),
            look.long,
            text,
        ]
        return self.folder / f"{claim.id}-{_digest(parts)}.json"


def environment() -> dict[str, str]:
    """What a figure depends on besides our code."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


@functools.cache
def _shared_code() -> str:
    """Of every file of the package that a figure can depend on, but the claims' own modules."""
    own = {Path(str(sys.modules[claim.measure.__module__].__file__)) for claim in CLAIMS.values()}
    files = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE
        and path not in own
        and not (path.parent == Path(__file__).parent and path.name in SHOWING)
    ]
    return _digest([[str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")] for path in files])


@functools.cache
def _own_code(module: str) -> str:
    return Path(str(import_module(module).__file__)).read_text(encoding="utf-8")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
