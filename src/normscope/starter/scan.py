"""Python files as syntax trees: the classes they define, and what importing them would run."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from normscope.errors import UsageError

_SKIPPED = frozenset({"venv", "env", "site-packages", "node_modules", "build", "dist", "__pycache__"})
MOST_FILES = 2000
MOST_BYTES = 1_000_000
_STARTERS = frozenset({"main", "train", "run", "fit", "backward", "step"})
"""Names of calls that start the work of a script."""


@dataclass(frozen=True)
class Argument:
    """One argument of a function, or one field of a dataclass.

    Attributes:
        name: its name.
        default: source of its default; None where it has none.
        annotation: source of its annotation; "" without one.
    """

    name: str
    default: str | None
    annotation: str


@dataclass(frozen=True)
class Class:
    """A class of a file."""

    node: ast.ClassDef
    source: "Source"

    @property
    def name(self) -> str:
        """Its name."""
        return self.node.name

    @property
    def bases(self) -> list[str]:
        """Its bases as they are written, "nn.Module"."""
        return [ast.unparse(base) for base in self.node.bases]

    @property
    def is_dataclass(self) -> bool:
        """True with a decorator that makes the constructor from the fields."""
        return any("dataclass" in ast.unparse(each) for each in self.node.decorator_list)

    def method(self, name: str) -> ast.FunctionDef | None:
        """The method of that name, which is defined here."""
        found = (node for node in self.node.body if isinstance(node, ast.FunctionDef) and node.name == name)
        return next(found, None)

    @cached_property
    def arguments(self) -> list[Argument]:
        """Arguments of the constructor, without `self`; the fields of a dataclass."""
        if (init := self.method("__init__")) is not None:
            return arguments_of(init)
        if not (
            self.is_dataclass or {"NamedTuple", "BaseModel"} & {base.split(".")[-1] for base in self.bases}
        ):
            return []
        return [
            Argument(
                node.target.id,
                None if node.value is None else ast.unparse(node.value),
                ast.unparse(node.annotation),
            )
            for node in self.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]

    @cached_property
    def calls(self) -> set[str]:
        """Last names of all that its methods call: {"Embedding", "ModuleList", "Block"}."""
        return {called(node) for node in ast.walk(self.node) if isinstance(node, ast.Call)}


@dataclass(frozen=True)
class Source:
    """A Python file that could be parsed."""

    path: Path
    tree: ast.Module

    @cached_property
    def classes(self) -> list[Class]:
        """Classes at its top level."""
        return [Class(node, self) for node in self.tree.body if isinstance(node, ast.ClassDef)]

    @cached_property
    def work(self) -> int | None:
        """The line of the first loop or call that would start work on import; None where nothing would."""
        for node in self.tree.body:
            call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            if isinstance(node, ast.For | ast.While) or (call is not None and called(call) in _STARTERS):
                return node.lineno
        return None

    @cached_property
    def calls_outside(self) -> list[ast.Call]:
        """Calls that are not in a class."""
        found: list[ast.Call] = []
        waiting: list[ast.AST] = [node for node in self.tree.body if not isinstance(node, ast.ClassDef)]
        while waiting:
            node = waiting.pop(0)
            found += [node] if isinstance(node, ast.Call) else []
            waiting += ast.iter_child_nodes(node)
        return found


def called(call: ast.expr) -> str:
    """The last name of what a call calls: "Module" of `nn.Module()`; "" where it has none."""
    function = call.func if isinstance(call, ast.Call) else call
    return {ast.Name: "id", ast.Attribute: "attr"}.get(type(function), "") and ast.unparse(function).split(
        "."
    )[-1]


def arguments_of(function: ast.FunctionDef) -> list[Argument]:
    """Named arguments of a method, without the first."""
    given = function.args
    named = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(named) - len(given.defaults)) + list(given.defaults)
    pairs = [
        *list(zip(named, defaults, strict=True))[1:],
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    return [
        Argument(
            a.arg,
            None if d is None else ast.unparse(d),
            "" if a.annotation is None else ast.unparse(a.annotation),
        )
        for a, d in pairs
    ]


def scan(path: Path) -> list[Source]:
    """All Python files under a folder, or the one file, that can be parsed.

    Raises:
        UsageError: there is no such folder or file, or no Python file in it.
    """
    if not path.exists():
        raise UsageError(f'"{path}" (not found)', "a folder or a Python file", "check the path")
    files = list(_files(path)) if path.is_dir() else [path]
    sources = [source for file in files if (source := _parsed(file)) is not None]
    if not sources:
        found = f"{len(files)} Python files, none of which can be parsed" if files else "no Python files"
        raise UsageError(f'"{path}" ({found})', "a folder with the code of a model", "name that folder")
    return sources


def _files(folder: Path) -> Iterator[Path]:
    """Python files, those near the top first."""
    waiting, count = [folder], 0
    while waiting and count < MOST_FILES:
        place = waiting.pop(0)
        for entry in sorted(place.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir() and not entry.is_symlink():
                if not entry.name.startswith(".") and entry.name not in _SKIPPED:
                    waiting.append(entry)
            elif entry.suffix == ".py" and entry.is_file() and entry.stat().st_size <= MOST_BYTES:
                count += 1
                yield entry


def _parsed(path: Path) -> Source | None:
    try:
        return Source(path, ast.parse(path.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError, RecursionError):  # Python 2, another encoding, no right to read
        return None
