"""`Cache`: tested claims kept by the code that tested them and the environment it ran in."""

import ast
import fcntl
import functools
import hashlib
import json
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import normscope
from normscope.claims.claim import CLAIMS, Claim
from normscope.claims.look import Look
from normscope.claims.runs import Runs
from normscope.claims.tested import Tested
from normscope.errors import describe
from normscope.subjects.text import load_text
from normscope.train.atomic import write_text

PACKAGE = Path(normscope.__file__).parent
ELSEWHERE = ("cli", "bench", "report", "monitor")
"""Rooms that no figure of a claim depends on."""
ROOM = Path(__file__).parent
SHOWING = (
    "words.py",
    "page.py",
    "draw.py",
    "markdown.py",
    "kept.py",
    "run.py",
    "worker.py",
    "hand.py",
)
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
        """The claim as it was tested before, None where it was not or where its file cannot be read."""
        try:
            text = self._path(claim, look).read_text(encoding="utf-8")
            return Tested.from_cache(claim, json.loads(text))
        except (OSError, ValueError, KeyError, TypeError):  # not there, half there, or another layout
            return None

    def write(self, tested: Tested, look: Look) -> None:
        """Keep it, unless it failed or could not be measured: then it is tried again.

        Raises:
            OSError: the disk is full or read-only.
        """
        if tested.error is None and tested.evidence.cases:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two commands may write the same claim
                write_text(self._path(tested.claim, look), json.dumps(tested.to_cache()))

    def runs(self, look: Look) -> Runs:
        """Where trained runs are kept: those that the same code trained, on the same text."""
        return Runs(self.folder / f"runs-{_digest([_training_code(), environment(), _text(look)])}")

    @property
    def refusal(self) -> str | None:
        """Why nothing can be kept here, None where it can."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / f"try-{os.getpid()}", "")
            (self.folder / f"try-{os.getpid()}").unlink()
        except OSError as error:
            return error.strerror or describe(error)
        return None

    def _path(self, claim: Claim, look: Look) -> Path:
        parts = [
            _shared_code(),
            own_code(claim),
            environment(),
            list(look.seeds),
            look.long,
            _text(look),
        ]
        return self.folder / f"{claim.id}-{_digest(parts)}.json"


def environment() -> dict[str, str]:
    """What a figure depends on besides our code."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def own_code(claim: Claim) -> str:
    """Digest of the module that measures `claim`, and of the claims' modules that it borrows from.

    Comments, layout and docstrings do not count.
    """
    return _digest([[name, _meaning(_file(name))] for name in _borrowed(claim.measure.__module__)])


@functools.cache
def _borrowed(module: str) -> tuple[str, ...]:
    """`module`, and all modules of claims that it imports, directly or not."""
    own = {claim.measure.__module__ for claim in CLAIMS.values()}
    found = {module}
    waiting = [module]
    while waiting:
        new = (_imported(_file(waiting.pop())) & own) - found
        found |= new
        waiting += new
    return tuple(sorted(found))


def _imported(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@functools.cache
def _meaning(file: Path) -> str:
    """The syntax tree of a file, without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            del body[0]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@functools.cache
def _shared_code() -> str:
    """Of every file of the package that a figure can depend on, but the claims' own modules."""
    own = {_file(claim.measure.__module__) for claim in CLAIMS.values()}
    shown = {ROOM / name for name in SHOWING}
    return _code_digest([path for path in _measuring() if path not in own | shown])


@functools.cache
def _training_code() -> str:
    """Of every file that a trained run can depend on: not those of the claims that ask for it."""
    return _code_digest([path for path in _measuring() if path.parent != ROOM or path.name == "runs.py"])


def _measuring() -> list[Path]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [path for path in files if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE]


def _code_digest(files: list[Path]) -> str:
    return _digest([[str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")] for path in files])


def _file(module: str) -> Path:
    return Path(str((sys.modules.get(module) or import_module(module)).__file__))


def _text(look: Look) -> str | None:
    return None if look.text is None else _text_digest(look.text)


@functools.cache
def _text_digest(path: Path) -> str:
    """Of all bytes of a text, a file or a folder."""
    text = load_text(path)
    digest = hashlib.sha256()
    for start in range(0, len(text), 2**20):
        digest.update(text.read(start, min(start + 2**20, len(text))).tobytes())
    return digest.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
