"""Python files as syntax trees: their classes, calls, assignments and imports of libraries."""

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path

from normscope.errors import UsageError

_SKIPPED = frozenset({"venv", "env", "site-packages", "node_modules", "build", "dist", "__pycache__"})
_MOST_FILES = 2000
_OF_LIBRARIES = re.compile(r"(from|import) (torch|transformers)\b")
_MODULE = re.compile(
    r"(\w+\.)*(Module|LightningModule|\w*PreTrainedModel|\w+LMHeadModel|\w+For[A-Z]\w+)|(torch\.)?nn\.\w+"
)
"""Bases that make a class a module."""


@dataclass(frozen=True)
class Source:
    """A Python file that could be parsed."""

    path: Path
    tree: ast.Module

    @cached_property
    def libraries(self) -> dict[str, str]:
        """Name → the import that binds it, of PyTorch and transformers."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and _OF_LIBRARIES.match(ast.unparse(node)):
                start = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
                for alias in node.names:
                    found[alias.asname or alias.name.split(".")[0]] = start + ast.unparse(alias)
        return found


Call = tuple[Source, ast.Call]
"""A call, and the file in which its names mean something."""


@dataclass(frozen=True)
class Class:
    """A class at the top level of a file; `bases` are as they are written, "nn.Module"."""

    name: str
    bases: list[str]
    source: Source
    node: ast.ClassDef

    def method(self, name: str) -> ast.FunctionDef | None:
        """The method of that name, which is defined here."""
        found = (node for node in self.node.body if isinstance(node, ast.FunctionDef) and node.name == name)
        return next(found, None)

    @cached_property
    def arguments(self) -> list[tuple[ast.arg, ast.expr | None]]:
        """Arguments of the constructor and their defaults; the annotated fields of a class that has none."""
        if (init := self.method("__init__")) is None:
            fields = [node for node in self.node.body if isinstance(node, ast.AnnAssign)]
            return [(ast.arg(ast.unparse(each.target), each.annotation), each.value) for each in fields]
        given = init.args
        named = [*given.posonlyargs, *given.args]
        defaults = [*[None] * (len(named) - len(given.defaults)), *given.defaults, *given.kw_defaults]
        return list(zip([*named, *given.kwonlyargs], defaults, strict=True))[1:]  # without self

    @cached_property
    def calls(self) -> set[str]:
        """Last names of all that its methods call: {"Embedding", "ModuleList", "Block"}."""
        return {called(call) for call in calls_in(self.node)}


class Project:
    """The files of a folder.

    Attributes:
        classes: name → class; of two with the same name the first.
        modules: those that derive from nn.Module, over other classes of the folder too.
        calls: last name of what is called → calls outside of modules: in scripts, functions and trainers.
    """

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources
        self.classes: dict[str, Class] = {}
        self.modules: dict[str, Class] = {}
        self.calls: defaultdict[str, list[Call]] = defaultdict(list)
        statements = [(source, node) for source in sources for node in source.tree.body]
        for source, node in statements:
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                self.classes.setdefault(node.name, Class(node.name, bases, source, node))
        size = -1
        while len(self.modules) > size:  # the base of a module may be found after it
            size = len(self.modules)
            for name, each in self.classes.items():
                if any(_MODULE.fullmatch(base) or base.split(".")[-1] in self.modules for base in each.bases):
                    self.modules[name] = each
        for source, node in statements:
            if not isinstance(node, ast.ClassDef) or node.name not in self.modules:
                for call in calls_in(node):
                    self.calls[called(call)].append((source, call))


def calls_in(tree: ast.AST) -> list[ast.Call]:
    """All calls in a syntax tree."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def called(call: ast.Call) -> str:
    """The last name of what a call calls: "Module" of `nn.Module()`."""
    return ast.unparse(call.func).split(".")[-1]


@cache
def assignments(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """Values of assignments ("n_layer", "config.n_layer") and defaults of argparse ("n_layer") by target."""
    found = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found[ast.unparse(target)].append(node.value)
        elif isinstance(node, ast.Call) and called(node) == "add_argument" and node.args:
            option = ast.unparse(node.args[-1]).strip("'-").replace("-", "_")
            found[option] += [keyword.value for keyword in node.keywords if keyword.arg == "default"]
    return found


def scan(path: Path, *, without: Path) -> Project:
    """All Python files under a folder, or the one file, that can be parsed; the file `without` is left out.

    Raises:
        UsageError: there is no such folder or file, or no Python file in it.
    """
    if not path.exists():
        raise UsageError(f'"{path}" (not found)', "a folder or a Python file", "check the path")
    files = list(islice(_files(path), _MOST_FILES)) if path.is_dir() else [path]
    sources = [source for file in files if (source := _parsed(file)) is not None]
    if not sources:
        found = f"{len(files)} Python files, none of which can be parsed" if files else "no Python files"
        raise UsageError(f'"{path}" ({found})', "a folder with the code of a model", "name that folder")
    return Project([source for source in sources if source.path != without])


def _files(folder: Path) -> Iterator[Path]:
    """Python files, without those that are hidden or installed."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if each[0] != "." and each not in _SKIPPED)
        yield from (Path(place, name) for name in sorted(names) if name.endswith(".py"))


def _parsed(path: Path) -> Source | None:
    try:
        return Source(path, ast.parse(path.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError, RecursionError):  # Python 2, another encoding, no right to read
        return None
