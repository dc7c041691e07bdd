"""`Cache`: measured claims kept by the code that measured them and the environment it ran in."""

import ast
import fcntl
import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import normscope
from normscope.atomic import write_text
from normscope.claims.claim import CLAIMS, Claim
from normscope.claims.result import ClaimResult
from normscope.claims.runs import Runs
from normscope.claims.setup import Setup
from normscope.errors import describe
from normscope.subjects.text import load_text

PACKAGE = Path(normscope.__file__).parent
ELSEWHERE = (
    *("capture", "cli", "completion.py", "demo", "doctor", "pipeline.py", "recording", "report", "rules"),
    *("starter", "testing"),
)
"""Rooms that no figure of a claim depends on."""
ROOM = Path(__file__).parent
SHOWING = ("words.py", "page.py", "plots.py", "kept.py", "run.py", "worker.py", "sentences.py")
"""Files of this room that only show or carry what was measured."""


def default_folder() -> Path:
    """Folder of the kept results: `$XDG_CACHE_HOME/normscope/claims`, or the same under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normscope" / "claims"


class Cache:
    """Results in a folder, a file each, under a key of code and environment.

    Args:
        folder: made when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, claim: Claim, setup: Setup) -> ClaimResult | None:
        """The claim's result of an earlier run, None where there is none or its file cannot be read."""
        try:
            return ClaimResult.from_cache(claim, json.loads(_text_of(self._path(claim, setup))))
        except (OSError, ValueError, KeyError, TypeError):  # not there, half there, or another layout
            return None

    def write(self, result: ClaimResult, setup: Setup) -> None:
        """Keep it, unless it failed or could not be measured: then it is measured again.

        Raises:
            OSError: the disk is full or read-only.
        """
        if result.error is None and result.evidence.cases:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two commands may write the same claim
                write_text(self._path(result.claim, setup), json.dumps(result.to_cache()))

    def runs(self, setup: Setup) -> Runs:
        """Runs that the same code trained on the same text."""
        return Runs(
            self.folder / f"runs-{_digest([_training_code(), environment(), _text_digest(setup.text)])}"
        )

    @property
    def refusal(self) -> str | None:
        """Reason why nothing can be kept here, None where it can."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trial = self.folder / f"try-{os.getpid()}"
            write_text(trial, "")
            trial.unlink()
        except OSError as error:
            return error.strerror or describe(error)
        return None

    def _path(self, claim: Claim, setup: Setup) -> Path:
        code = [_shared_code(), own_code(claim)]
        parts = [*code, environment(), list(setup.seeds), setup.long, _text_digest(setup.text)]
        return self.folder / f"{claim.id}-{_digest(parts)}.json"


def environment() -> dict[str, str]:
    """Facts that a figure depends on besides our code."""
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
    except PackageNotFoundError:  # a folder of that name can be imported without being installed
        return "none"


def own_code(claim: Claim) -> str:
    """Digest of what measures `claim`: its module, claims' modules that this imports, and its criteria."""
    own, found = _claim_files(), set[Path]()
    waiting = [_file(claim)]
    while waiting:
        file = waiting.pop()
        if file not in found and (file in own or not found):
            found.add(file)
            waiting += [ROOM / f"{name}.py" for name in _imports(file)]
    criteria = [[name, bool(each.condition), each.smallest] for name, each in claim.sentences.items()]
    return _digest([_code_digest(found), criteria])


def _imports(file: Path) -> Iterator[str]:
    """Names that `file` imports from this room: modules, `from normscope.claims import masks` too."""
    for node in ast.walk(ast.parse(_text_of(file))):
        if isinstance(node, ast.ImportFrom) and node.module == "normscope.claims":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("normscope.claims."):
            yield str(node.module).rpartition(".")[2]


def _claim_files() -> set[Path]:
    """Files of this room that hold claims."""
    return {_file(claim) for claim in CLAIMS.values()}


def _file(claim: Claim) -> Path:
    return Path(str(sys.modules[claim.measure.__module__].__file__))


@functools.cache
def _shared_code() -> str:
    """Digest of every file of the package that a figure can depend on, but those that hold claims."""
    shown = {ROOM / name for name in SHOWING}
    return _code_digest(set(_measuring()) - _claim_files() - shown)


@functools.cache
def _training_code() -> str:
    """Digest of every file that a trained run can depend on: not those of the claims that ask for it."""
    return _code_digest({path for path in _measuring() if path.parent != ROOM or path.name == "runs.py"})


def _measuring() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE]


def _code_digest(files: set[Path]) -> str:
    """Digest of what the files do: comments, layout and docstrings do not count."""
    return _digest([[file.name, _without_prose(ast.parse(_text_of(file)))] for file in sorted(files)])


def _without_prose(tree: ast.Module) -> str:
    """The tree as text, without the strings that stand as statements of their own."""
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not _is_string(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@functools.cache
def _text_digest(path: Path | None) -> str | None:
    """Digest of all bytes of a text, a file or a folder; None for the usual text."""
    if path is None:
        return None
    text = load_text(path)
    digest = hashlib.sha256()
    for start in range(0, len(text), 2**20):
        digest.update(text.read(start, min(start + 2**20, len(text))).tobytes())
    return digest.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
