"""Sides of a comparison from what the user gives: texts, modules, runs and reports."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from normscope.compare.commands import is_commands, of_commands
from normscope.compare.remote import RemoteSide
from normscope.compare.revisions import Revision, check_out, split
from normscope.compare.saved import saved_report, saved_run
from normscope.compare.side import LiveSide, SavedSide, Settings, Side
from normscope.database import is_store
from normscope.errors import UsageError, suggest
from normscope.interrupts import postponed
from normscope.recording.intake import as_run
from normscope.report import Report
from normscope.subjects import Run, Subject, load, load_to_read, make_subject
from normscope.subjects.again import build_again
from normscope.subjects.memory import NoRoomError
from normscope.subjects.rng import seeded
from normscope.subjects.spec import parse

_SHORT = 16
"""Tokens per sequence for models that do not fit into memory."""
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npz", ".gguf")
"""Endings of files of weights."""
Given = Any
"""One side, as it is given: str | Path | nn.Module | Subject | Run | Report | Callable[[], nn.Module]."""


@contextmanager
def opened(a: Given, b: Given, settings: Settings, batch: Any = None) -> Iterator[tuple[Side, Side]]:
    """The two sides; their processes and temporary files end with the context.

    Code of the user's that both sides would import gets a process of its own: two files may each have their
    own `blocks.py` beside them, and an import can change classes that the other side uses.

    Raises:
        UsageError: one of them cannot be used.
    """
    a, b = (str(each) if isinstance(each, Path) else each for each in (a, b))
    is_apart_b = _is_code(b) and not _is_alone(a) and _code(a) != _code(b)
    is_apart_a = _is_code(a) and not _is_alone(b) and not _is_code(b)
    with ExitStack() as held:
        sides: list[Side] = []
        for given, is_apart in ((a, is_apart_a), (b, is_apart_b)):  # processes load while others do
            is_revision = isinstance(given, str) and given.startswith("git:")
            with postponed(lambda: None) if is_revision else nullcontext():  # its folder must not stay
                side = side_of(given, settings, batch, is_apart=is_apart)
                held.callback(side.close)
            sides.append(side)
        for side in sides:
            if isinstance(side, RemoteSide):
                side.load()
        yield sides[0], sides[1]


def side_of(given: Given, settings: Settings, batch: Any = None, *, is_apart: bool = False) -> Side:
    """The side that `given` names; `is_apart` loads a MODEL in a process of its own."""
    if not isinstance(given, str):
        return _of_object(as_run(given), settings, batch)
    if given.startswith("git:"):
        return _of_revision(given, settings)
    if is_store(given):
        return saved_run(Path(given))
    if is_commands(given):
        return of_commands(given, settings)
    if ":" not in given and (given.endswith(".json") or Path(given).is_file()):
        _require_no_source(given)
        return saved_report(Path(given))
    _require_no_folder(given)
    return RemoteSide(given, given, settings) if is_apart else live_side(given, settings)


def live_side(spec: str, settings: Settings) -> LiveSide:
    """The side of a MODEL, in this process."""
    loading = settings.loading()
    try:
        subject = load(spec, **loading)
    except NoRoomError:  # only its shapes are read, for which a short batch will do
        short = {"batch_size": 1, "seq_len": min(settings.seq_len, _SHORT)}
        subject = load_to_read(spec, **loading | short)

    def build(seed: int) -> nn.Module:
        return build_again(spec, subject.model, seed, device=settings.device, dtype=loading["dtype"])

    return LiveSide(subject, build, lambda seed: load(spec, **loading | {"seed": seed}))


def _of_revision(text: str, settings: Settings) -> RemoteSide:
    name, model = split(text)
    revision = check_out(name, text)
    try:
        return RemoteSide(text, _below(revision, model, text), settings, revision)
    except BaseException:
        revision.close()
        raise


def _below(revision: Revision, model: str, text: str) -> str:
    """The MODEL with a path that holds in the folder of the revision.

    Raises:
        UsageError: the revision has no such file.
    """
    path, colon, rest = model.partition(":")
    if not path.endswith(".py") and "/" not in path:
        parse(model)
        return model
    place = Path(path).expanduser()
    files = revision.root / "files"
    if place.is_absolute() and place.is_relative_to(revision.top):
        place = files / place.relative_to(revision.top)
    if not (revision.here / place).is_file():
        same = [f.relative_to(files).as_posix() for f in sorted(files.rglob(place.name))]
        do = f"its files of that name: {', '.join(same[:3])}" if same else ""
        names = [each.relative_to(revision.here).as_posix() for each in revision.here.rglob("*.py")]
        raise UsageError(
            f'"{path}" of "{text}" (not found)',
            f"a Python file of revision {revision.name}, from the current folder",
            do or suggest(path, names, f"see `git ls-tree -r --name-only {revision.name}`"),
        )
    return f"{place}{colon}{rest}"


def _require_no_source(given: str) -> None:
    """Raise UsageError for a file that only needs another spelling."""
    if given.endswith(".py"):
        parse(given)
    if Path(given).suffix.lower() in _WEIGHTS and Path(given).is_file():
        do = "write a factory that builds the model and loads these weights, and name it: file.py:factory"
        raise UsageError(f'"{given}" (weights without a model)', "a MODEL", do)
    if given.endswith((".html", ".htm")):
        do = "give the JSON of the same check: --format json"
        raise UsageError(f'"{given}" (a page)', "report.json, run.db or a MODEL", do)


def _require_no_folder(given: str) -> None:
    """Raise UsageError for a bare folder of weights, with the MODEL that reads it."""
    if ":" not in given and Path(given).is_dir():
        if (Path(given) / "config.json").is_file():
            kind = "nn" if _is_ours(Path(given) / "config.json") else "hf"
            raise UsageError(f'"{given}" (a folder)', "a MODEL", f'write "{kind}:{given}"')
        parse(given)


def _is_ours(config: Path) -> bool:
    """Whether `normscope.nn.save_model` wrote the folder of `config`."""
    with suppress(OSError, UnicodeDecodeError):  # such a file is none of ours; the loader will say why
        return '"normscope.model/' in config.read_text(encoding="utf-8")
    return False


def _is_code(given: Given) -> bool:
    """Whether a side is code of the user's that this process would import."""
    if not isinstance(given, str) or given.startswith(("git:", "nn:", "hf:")) or ":" not in given:
        return False
    return not is_commands(given) and not is_store(given)


def _is_alone(given: Given) -> bool:
    """Whether a side shares no code with this process: a revision or a report."""
    if not isinstance(given, str):
        return isinstance(given, Report)
    return given.startswith("git:") or (not _is_code(given) and not given.startswith(("nn:", "hf:")))


def _code(given: Given) -> str:
    """File or module of a side that is code of the user's; "" of others."""
    if not _is_code(given):
        return ""
    name = str(given).partition(",")[0].rpartition(":")[0]
    return str(Path(name).resolve()) if name.endswith(".py") or "/" in name else name


def _of_object(given: Any, settings: Settings, batch: Any) -> Side:
    from normscope.monitor.after import RunReport

    if isinstance(given, Report):
        return SavedSide(given.model, given.to_dict())
    if isinstance(given, RunReport):
        return SavedSide(str(given.scene.path), given.to_dict())
    if isinstance(given, Subject):
        return LiveSide(given)
    if isinstance(given, nn.Module | Run) or _is_fed(given):
        return LiveSide(_made(given, settings, batch))
    if not callable(given):
        raise UsageError(
            f"a {type(given).__name__} to compare",
            "a MODEL, a module, (module, batch), a function that builds one, a Subject, a Run or a Report",
            "pass one of these",
        )

    def made(seed: int) -> Any:
        with seeded(seed):
            found = given()
        if not isinstance(found, nn.Module | Run) and not _is_fed(found):
            expected = "a function that returns a module, (module, batch), (module, batch, loss_fn) or a Run"
            raise UsageError(f"a function that returned a {type(found).__name__}", expected, "change it")
        return found

    def build(seed: int) -> nn.Module:
        found = made(seed)
        model: nn.Module = (
            found[0] if isinstance(found, tuple) else found.model if isinstance(found, Run) else found
        )
        return model

    def subject(seed: int) -> Subject:
        return _made(made(seed), replace(settings, seed=seed), batch)

    return LiveSide(subject(settings.seed), build, subject)


def _is_fed(given: Any) -> bool:
    """Whether `given` is (module, batch) or (module, batch, loss_fn)."""
    return isinstance(given, tuple) and len(given) in (2, 3) and isinstance(given[0], nn.Module)


def _made(given: Any, settings: Settings, batch: Any) -> Subject:
    """The subject of a module, of a module with its batch, or of a Run, which is built already."""
    loss_fn = None
    if isinstance(given, tuple):
        given, batch, loss_fn = (*given, None)[:3]
    return make_subject(
        given,
        None if isinstance(given, Run) else batch,
        loss_fn,
        seed=settings.seed,
        batch_size=settings.batch_size,
        seq_len=settings.seq_len,
        text=settings.text,
        find_loss=settings.find_loss,
    )
