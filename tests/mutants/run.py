"""Break the code on purpose, one place at a time, and see which breaks the tests notice.

    python tests/mutants/run.py                 # every room
    python tests/mutants/run.py linalg nn       # some rooms
    python tests/mutants/run.py linalg --only 3,17 --verbose

A mutant is an entry of `ROOM.toml`: a file under `src/normscope`, a text that occurs in it once, the text
that takes its place, and the tests that should fail. Each runs in a copy of the checkout, after the tests
have passed on the unbroken code. A mutant that no test kills is listed; one that cannot matter says so under
`survives`, and is not run.
"""

import argparse
import ast
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import pytest
import scipy.linalg  # noqa: F401  (every fork would import it again)
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COPIED = ("src", "tests", "docs", "benchmarks", "pyproject.toml", "README.md", "CONTRIBUTING.md")
TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One break of one file.

    Attributes:
        room: the list that it comes from.
        number: its place in that list, from 1.
        file: the file to change, under `src/normscope`.
        old: a text that occurs in that file once.
        new: the text that takes its place.
        tests: the test files or node ids that should fail.
        survives: why no test can notice it; "" for a mutant that must be killed.
    """

    room: str
    number: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    survives: str = ""

    @property
    def name(self) -> str:
        """Room, number and file, for the list that is printed."""
        return f"{self.room} {self.number:3d}  {self.file}: {self.old.strip().splitlines()[0][:60]}"


def rooms() -> list[str]:
    """The names of all lists."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def mutants_of(room: str) -> list[Mutant]:
    """The mutants of one list, in its order."""
    entries = tomllib.loads((HERE / f"{room}.toml").read_text(encoding="utf-8"))["mutant"]
    return [
        Mutant(room=room, number=number, **{**entry, "tests": tuple(entry.get("tests", ()))})
        for number, entry in enumerate(entries, start=1)
    ]


def broken(mutant: Mutant, source: str) -> str:
    """The source with the mutant's change.

    Raises:
        ValueError: the old text does not occur exactly once, the change changes nothing, or the new code
            cannot be parsed, which would fail every test.
    """
    count = source.count(mutant.old)
    if count != 1 or mutant.old == mutant.new:
        raise ValueError(f"{mutant.name}: the old text occurs {count} times and must occur once")
    changed = source.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ValueError(f"{mutant.name}: the new code cannot be parsed: {error}") from error
    return changed


def is_killed(mutant: Mutant, checkout: Path) -> tuple[bool, str]:
    """Whether the tests fail on the broken code, and what pytest printed. The checkout is left as it was."""
    path = checkout / "src" / "normscope" / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(broken(mutant, source), encoding="utf-8")
    try:
        return _fails(mutant.tests, checkout)
    finally:
        path.write_text(source, encoding="utf-8")


def _fails(tests: tuple[str, ...], checkout: Path) -> tuple[bool, str]:
    """Run pytest in the checkout. A run that hangs counts as failed; one without tests is an error.

    A fork of this process runs it: torch and pytest are imported already, normscope is not.
    """
    output = checkout / "pytest.txt"
    child = os.fork()
    if child == 0:
        os._exit(_pytest(tests, checkout, output))
    code = _wait(child)
    printed = output.read_text(encoding="utf-8", errors="replace")
    if code is None:
        return True, f"longer than {TIMEOUT_S} s\n{printed}"
    if code not in (0, 1, 2):  # 2: the broken code could not even be imported
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {code}:\n{printed}")
    return code != 0, printed


def _pytest(tests: tuple[str, ...], checkout: Path, output: Path) -> int:
    """Run pytest on the checkout's own normscope; what it prints goes to `output`."""
    os.setsid()
    with output.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(checkout)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(checkout / "src"))
    os.environ.update(PYTHONPATH=str(checkout / "src"), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    try:
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _wait(child: int) -> int | None:
    """The exit status of a child, or None where it took too long and was killed with its own children."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return max(1, os.waitstatus_to_exitcode(status)) if status else 0  # a crash counts as failed
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _require_green(mutants: list[Mutant], checkout: Path) -> None:
    """Raise where a test fails on the unbroken code, for then it would kill every mutant."""
    tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
    fails, output = _fails(tests, checkout)
    if fails:
        raise RuntimeError(f"the unbroken code fails:\n{output}")


def _copy(folder: Path) -> Path:
    """A copy of what the tests need of the checkout."""
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _timed(mutant: Mutant, top: Path) -> tuple[bool, str, float]:
    """Whether the mutant is killed, what pytest printed, and the seconds it took."""
    checkout = top / str(os.getpid())
    if not checkout.exists():
        _copy(checkout)
    start = time.perf_counter()
    return *is_killed(mutant, checkout), time.perf_counter() - start


def _run(mutants: list[Mutant], jobs: int, verbose: bool) -> list[Mutant]:
    """Run all; print a line each; return those that no test killed."""
    survivors = []
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        top = Path(name)
        pool.submit(_require_green, mutants, _copy(top / "unbroken")).result()
        results = pool.map(_timed, mutants, repeat(top))
        for mutant, (killed, output, seconds) in zip(mutants, results, strict=True):
            print(f"{'killed  ' if killed else 'SURVIVES'} {seconds:5.1f} s  {mutant.name}", flush=True)
            if verbose:
                print(output)
            if not killed:
                survivors.append(mutant)
    return survivors


def _import_for_forks() -> None:
    """Import what every fork would import again: torch.optim's first step needs `torch._dynamo`.

    It imports Triton, whose functions are made for its interpreter or for a GPU when it is imported.
    """
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as in tests/conftest.py
    importlib.import_module("torch._dynamo")


def main() -> int:
    """Print a table of rooms; exit 1 where under 95 % of a room's mutants are killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(rooms())}; all if none is named"
    )
    parser.add_argument("--only", help="numbers of mutants, with commas: 3,17")
    parser.add_argument("--jobs", type=int, default=1, help="how many to run side by side")
    parser.add_argument("--verbose", action="store_true", help="show what pytest printed")
    options = parser.parse_args()
    if unknown := set(options.rooms) - set(rooms()):
        parser.error(
            f"no list of mutants is called {', '.join(sorted(unknown))}; there are {', '.join(rooms())}"
        )
    _import_for_forks()
    table, ok = [], True
    for room in options.rooms or rooms():
        listed = mutants_of(room)
        numbers = (
            {int(word) for word in options.only.split(",")} if options.only else {m.number for m in listed}
        )
        mutants = [m for m in listed if not m.survives and m.number in numbers]
        survivors = _run(mutants, options.jobs, options.verbose)
        killed = len(mutants) - len(survivors)
        excused = sum(bool(m.survives) for m in listed)
        ok &= killed >= 0.95 * len(mutants)
        table.append(
            f"{room:10s} {killed:4d} of {len(mutants):4d} killed; {excused} listed as without effect"
        )
        table += [f"             survives: {mutant.name}" for mutant in survivors]
    print("\n".join(table))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
