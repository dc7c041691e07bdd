"""Completions for the shell: MODEL, codes of findings, names of schemes.

A completion has to be there before the user's next key: names are read from the text of the sources that
define them, and neither PyTorch nor transformers is imported.
"""

import ast
import re
from collections.abc import Iterable, Iterator, MutableMapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from normscope.database import is_sqlite
from normscope.option_values import FORMATS

MODELS = ("decoder", "encoder", "encoder-decoder", "vision")
OPTIONS = ("scheme=", "depth=", "width=", "heads=", "norm=", "hidden=", "vocab=", "context=", "positions=")
"""The options of `nn:` that are typed most; `normscope check` names all of them where one is wrong."""
_RULE = re.compile(r'^@rule\(\s*"(NS\d{3})".*?^def (\w+)\(', re.MULTILINE | re.DOTALL)
_ALARM = re.compile(r'^[A-Z_]+ = alarm\(\s*"(NS\d{3})",\s*"([\w-]+)"', re.MULTILINE)
_SCHEME = re.compile(
    r'^(?:[A-Z][A-Z\d_]* = (?!Initialisation)\w+|    return Scheme)\(\s*"([a-z][\w-]*)"', re.MULTILINE
)
_HF_TYPE = re.compile(r'^\s*\("([\w.-]+)", "\w+Config"\)', re.MULTILINE)
_HF_TABLES = ("auto_mappings.py", "configuration_auto.py")
_BREAKS = (":", "=")
"""Characters at which bash splits a word that is completed."""


def complete_model(incomplete: str) -> list[str]:
    """Completions of a MODEL: its kind, then its name, then its options; factories of a Python file.

    SQLite files of this folder are offered too, because `check` takes the store of a run.
    """
    kind, colon, rest = incomplete.partition(":")
    if not colon:
        return _beginning(incomplete, ["nn:", "hf:", *_python_files(), *_stores()])
    if kind == "nn":
        return _beginning(incomplete, _of_ours(rest))
    if kind == "hf":
        return _beginning(incomplete, (f"hf:{name}" for name in hf_types()))
    path = Path(kind)
    return _beginning(incomplete, (f"{kind}:{name}" for name in _factories(path))) if path.is_file() else []


def complete_side(incomplete: str) -> list[str]:
    """Completions of one side of `diff`: a MODEL, a saved report, or `git:` with a branch or tag."""
    kind, colon, rest = incomplete.partition(":")
    if not colon:
        return _beginning(incomplete, [*complete_model(incomplete), "git:", *_reports()])
    if kind != "git":
        return complete_model(incomplete)
    revision, colon, model = rest.partition(":")
    if not colon:
        return _beginning(incomplete, (f"git:{name}:" for name in ("HEAD", *_revisions())))
    return [
        f"git:{revision}:{each}" for each in complete_model(model) if each.endswith(".py:") or ":" in model
    ]


def complete_codes(incomplete: str) -> list[str]:
    """Completions of findings and alarms with commas between them: each code, then its name."""
    return _in_list(incomplete, [name for pair in (findings() | alarms()).items() for name in pair])


def complete_code(incomplete: str) -> list[str]:
    """Completions of one finding, or of an alarm of the monitor."""
    return _beginning(incomplete, [name for pair in (findings() | alarms()).items() for name in pair])


def complete_scheme(incomplete: str) -> list[str]:
    """Completions of one scheme of the catalogue."""
    return _beginning(incomplete, schemes())


def complete_schemes(incomplete: str) -> list[str]:
    """Completions of schemes with commas between them."""
    return _in_list(incomplete, schemes())


def complete_formats(incomplete: str) -> list[str]:
    """Completions of number formats with commas between them."""
    return _in_list(incomplete, FORMATS)


@cache
def findings() -> dict[str, str]:
    """Code → name of every finding."""
    found = (pair for text in _texts("normscope.rules") for pair in _RULE.findall(text))
    return {code: name.replace("_", "-") for code, name in sorted(found)}


@cache
def alarms() -> dict[str, str]:
    """Code → name of every alarm of the monitor."""
    return dict(sorted(pair for text in _texts("normscope.monitor.alarms") for pair in _ALARM.findall(text)))


@cache
def schemes() -> tuple[str, ...]:
    """Names of the catalogue."""
    return tuple(sorted(name for text in _texts("normscope.nn.schemes") for name in _SCHEME.findall(text)))


@cache
def hf_types() -> tuple[str, ...]:
    """Model types of transformers; none where it is not installed."""
    spec = find_spec("transformers")
    places = (spec.submodule_search_locations or []) if spec is not None else []
    paths = (Path(place) / "models" / "auto" / name for place in places for name in _HF_TABLES)
    return tuple(
        sorted({name for p in paths if p.is_file() for name in _HF_TYPE.findall(p.read_text("utf-8"))})
    )


def glue_bash_words(environment: MutableMapping[str, str]) -> str:
    """Join the words that bash split at colons and equals signs; the part of the last one that bash keeps.

    For `check nn:dec`, bash hands over "nn", ":" and "dec", and replaces only "dec": completions must not
    repeat "nn:". `environment` holds COMP_WORDS and COMP_CWORD, and is changed.
    """
    words = environment.get("COMP_WORDS", "").split("\n")
    count = environment.get("COMP_CWORD", "")
    if not count.isdigit():
        return ""
    current = words[: int(count) + 1] + [""] * (int(count) + 1 - len(words))
    glued: list[str] = []
    for word in current:
        joins = glued and (word in _BREAKS or glued[-1].endswith(_BREAKS)) and len(glued) > 1
        if joins:
            glued[-1] += word
        else:
            glued.append(word)
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "\n".join(glued), str(len(glued) - 1)
    last = glued[-1] if glued else ""
    return last[: max(last.rfind(mark) for mark in _BREAKS) + 1]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _in_list(incomplete: str, names: Iterable[str]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    matching = (name for name in names if name.lower().startswith(last.lower()) and name not in given)
    return [f"{before}{comma}{name}" for name in matching]


def _of_ours(rest: str) -> Iterator[str]:
    """Completions of `nn:` with what is typed behind it."""
    head, comma, last = rest.rpartition(",")
    if not comma:
        yield from (f"nn:{name}" for name in MODELS)
    elif last.startswith("scheme="):
        yield from (f"nn:{head},scheme={name}" for name in schemes())
    else:
        yield from (f"nn:{head},{option}" for option in OPTIONS if f"{option}" not in f"{head},")


def _python_files() -> list[str]:
    """Python files of this folder, as the beginning of file.py:factory."""
    try:
        return sorted(f"{path.name}:" for path in Path().glob("*.py"))
    except OSError:
        return []


def _stores() -> list[str]:
    """SQLite files of this folder."""
    try:
        found = [path for path in Path().iterdir() if path.suffix in (".db", ".sqlite", ".sqlite3")]
        return sorted(path.name for path in found if is_sqlite(path))
    except OSError:
        return []


def _reports() -> list[str]:
    """JSON files of this folder that begin as a report does."""
    try:
        return sorted(path.name for path in Path().glob("*.json") if b"normscope.report/" in _head(path))
    except OSError:
        return []


def _head(path: Path) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as file:
        return file.read(200)


def _revisions() -> list[str]:
    """Branches and tags of this folder's repository, read from its files."""
    folder = next((p / ".git" for p in (Path.cwd(), *Path.cwd().parents) if (p / ".git").is_dir()), None)
    if folder is None:
        return []
    found = set()
    for kind in ("heads", "tags"):
        place = folder / "refs" / kind
        found |= {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    packed = folder / "packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    found |= set(re.findall(r"refs/(?:heads|tags)/(\S+)$", "\n".join(lines), re.MULTILINE))
    return sorted(found)


def _factories(path: Path) -> list[str]:
    """Functions of a file that can be called without arguments; the file is not run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    factories = (each.name for each in functions if len(each.args.args) == len(each.args.defaults))
    return [name for name in factories if not name.startswith("_")]


def _texts(package: str) -> Iterator[str]:
    """Texts of the sources of a package, which is not imported."""
    folder = files("normscope").joinpath(*package.split(".")[1:])
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            yield entry.read_text(encoding="utf-8")
