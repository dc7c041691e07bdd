"""Files of a git revision, written into a temporary folder; the repository itself is not changed."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from normscope.atomic import disk_refusals
from normscope.errors import UsageError, suggest

GRAMMAR = "git:REV:path/to/file.py:factory, where REV is a branch, a tag or a commit"


@dataclass(frozen=True)
class Revision:
    """The files of a revision.

    Attributes:
        name: the revision, as the user wrote it.
        commit: its commit.
        top: top folder of the repository.
        root: folder that holds the files; it is removed by `close`.
        here: the folder in `root` that the current folder is in the repository.
        notes: submodules that are missing.
    """

    name: str
    commit: str
    top: Path
    root: Path
    here: Path
    notes: tuple[str, ...] = ()

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.root, ignore_errors=True)


def split(text: str) -> tuple[str, str]:
    """Revision and MODEL of `git:REV:MODEL`.

    Raises:
        UsageError: one of them is missing.
    """
    revision, colon, model = text.removeprefix("git:").partition(":")
    if not revision or not colon or ":" not in model:
        found = model if colon and model else revision
        do = f'write the revision before the file, "git:HEAD:{found}"' if found else "write both"
        if revision.endswith(".py") and model and ":" not in model:
            do = f'write the revision before the file, "git:HEAD:{revision}:{model}"'
        elif model and ":" not in model:
            do = f'name the factory too, "{text.rstrip(":")}:FACTORY"'
        raise UsageError(f'"{text}"', GRAMMAR, do)
    if model.startswith("nn:"):
        do = f'write "{model}" alone'
        raise UsageError(f'"{text}" (nn: models are no files of the repository)', GRAMMAR, do)
    return revision, model


def check_out(revision: str, spec: str) -> Revision:
    """Write the files of `revision` of the current folder's repository into a new temporary folder.

    Submodules are written from their repositories below the current folder, as far as these have the commit.

    Args:
        spec: what the user gave, for errors.

    Raises:
        UsageError: git is not installed, the current folder is in no repository, it has no such revision, or
            the files cannot be written.
    """
    top = Path(_git(spec, "rev-parse", "--show-toplevel"))
    prefix = _git(spec, "rev-parse", "--show-prefix")
    commit = _commit(revision, spec, top)
    with disk_refusals("the folder for temporary files", "set TMPDIR to one"):
        root = Path(tempfile.mkdtemp(prefix="normscope-git-")).resolve()
    try:
        notes = _write_files(spec, top, commit, root / "files")
        here = root / "files" / prefix
        here.mkdir(parents=True, exist_ok=True)  # the current folder may be younger than the revision
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Revision(revision, commit, top, root, here, notes)


def _commit(revision: str, spec: str, top: Path) -> str:
    done = _call("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode == 0:
        return done.stdout.strip()
    names = _call("for-each-ref", "--format=%(refname:short)").stdout.split()
    do = suggest(revision, names, "see `git log --oneline --all`")
    if _call("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        do = "fetch its history first: git fetch --unshallow (in CI: fetch-depth: 0)"
    elif (remote := f"origin/{revision}") in names:
        do = f'write "{spec.replace(revision, remote, 1)}"'
    raise UsageError(f'revision "{revision}" of "{spec}"', f"a branch, tag or commit of {top}", do)


def _write_files(spec: str, folder: Path, commit: str, into: Path) -> tuple[str, ...]:
    """Write the files of a commit of the repository at `folder` and of its submodules; note missing ones.

    An index of our own is used: `git archive` leaves out what .gitattributes marks as export-ignore.
    """
    into.mkdir(parents=True)
    index = {"GIT_INDEX_FILE": str(into.parent / f"{into.name}.index")}
    at = ("-C", str(folder))
    _git(spec, *at, "read-tree", commit, environment=index)
    _git(spec, *at, "checkout-index", "--all", "--force", f"--prefix={into}/", environment=index)
    notes: list[str] = []
    listed = _git(spec, *at, "ls-files", "--stage", "-z", environment=index).split("\0")
    for mode, its_commit, _, path in (re.split(r"[ \t]", line, maxsplit=3) for line in listed if line):
        if mode != "160000":
            continue
        module = folder / path
        there = (module / ".git").exists() and _call("-C", str(module), "cat-file", "-e", its_commit)
        if not there or there.returncode:
            notes.append(f"submodule {path} is missing: its commit {its_commit[:10]} is not in this checkout")
            continue
        shutil.rmtree(into / path, ignore_errors=True)
        notes += _write_files(spec, module, its_commit, into / path)
    return tuple(notes)


def _git(spec: str, *words: str, environment: Mapping[str, str] | None = None) -> str:
    """Call git; return its output without the newline at the end."""
    done = _call(*words, environment=environment)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if line.strip()), f"exit {done.returncode}")
        if "not a git repository" in said:
            do = "run normscope in a folder of the repository"
            raise UsageError(f'"{spec}" in {Path.cwd()}, which is no git repository', GRAMMAR, do)
        do = "see what git says there"
        if "dubious ownership" in done.stderr:
            do = f"git config --global --add safe.directory {Path.cwd()}"
        raise UsageError(f'"{spec}" (git: {said.removeprefix("fatal: ")})', "a revision that git reads", do)
    return done.stdout.removesuffix("\n")


def _call(*words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    # A submodule that is read inside of a git hook must not get the hook's repository.
    inherited = {key: value for key, value in os.environ.items() if key not in _OF_HOOKS}
    try:
        return subprocess.run(
            ["git", *words],
            capture_output=True,
            text=True,
            errors="replace",
            env=inherited | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        do = "install git, or give the file of a checked-out copy, path/to/file.py:factory"
        raise UsageError(
            f"git ({error.strerror or error})", "git, for git:REV:file.py:factory", do
        ) from error


_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
