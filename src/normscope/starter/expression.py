"""A model that a script constructs from a library's classes, as one expression that stands alone."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.starter.construct import Construction
from normscope.starter.scan import Source, called
from normscope.starter.values import UNKNOWN, neutral, value_of

_WANTED = re.compile(
    r"Transformer|TransformerEncoder|TransformerDecoder|\w+(LMHeadModel|For[A-Z]\w+)|\w+Model"
)
_LONGEST = 96  # characters of a line
_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class Expression:
    """A construction in a script.

    Attributes:
        name: the class that is constructed.
        source, line: where.
        imports: the lines that import what it uses.
        made: the line that binds `model`.
    """

    name: str
    source: Source
    line: int
    imports: tuple[str, ...]
    made: Construction


def expressions(sources: Sequence[Source]) -> list[Expression]:
    """Every such construction, in the order of the files."""
    found = []
    for source in sources:
        imported = _imported(source)
        for call in source.calls_outside:
            root = ast.unparse(call.func).split(".")[0]
            if (
                root in imported
                and _WANTED.fullmatch(called(call))
                and "from_pretrained" not in ast.unparse(call.func)
            ):
                made = Construction()
                inlined = _Inline(source, imported, made).visit(
                    ast.parse(ast.unparse(call), mode="eval").body
                )
                names = {
                    node.id for node in ast.walk(inlined) if isinstance(node, ast.Name)
                } & imported.keys()
                made.lines = _in_lines(inlined)
                imports = tuple(sorted({imported[name] for name in names}))
                found.append(Expression(called(call), source, call.lineno, imports, made))
    return found


def _in_lines(call: ast.Call) -> list[str]:
    """The line that binds `model`, an argument on each line where it is long."""
    whole = f"model = {ast.unparse(call)}"
    if len(whole) <= _LONGEST:
        return [whole]
    arguments = [f"    {ast.unparse(each)}," for each in (*call.args, *call.keywords)]
    return [f"model = {ast.unparse(call.func)}(", *arguments, ")"]


def _imported(source: Source) -> dict[str, str]:
    """Name → the import that binds it, of PyTorch and transformers."""
    found = {}
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] in _LIBRARIES
            and not node.level
        ):
            for alias in node.names:
                found[alias.asname or alias.name] = f"from {node.module} import {ast.unparse(alias)}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _LIBRARIES:
                    found[alias.asname or alias.name.split(".")[0]] = f"import {ast.unparse(alias)}"
    return found


class _Inline(ast.NodeTransformer):
    """Puts values and library calls in place of variables, and TODO where the code does not give one."""

    def __init__(self, source: Source, imported: dict[str, str], made: Construction, depth: int = 0) -> None:
        self.source, self.imported, self.made, self.depth = source, imported, made, depth

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        """A keyword argument: its name helps where its value is not known."""
        return ast.keyword(node.arg, self._put(node.value, node.arg or ""))

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """A call of a library: only its arguments are replaced."""
        keywords = [self.visit_keyword(keyword) for keyword in node.keywords]
        return ast.Call(node.func, [self._put(argument, "") for argument in node.args], keywords)

    def _put(self, node: ast.expr, name: str) -> ast.expr:
        value = value_of(node, self.source)
        if value is not UNKNOWN:
            return ast.Constant(value) if isinstance(value, int | float | str | bool | None) else node
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in self.imported:
            return self.visit_Call(node)
        if isinstance(node, ast.Name) and self.depth < 5 and (call := self._assigned(node.id)) is not None:
            return _Inline(self.source, self.imported, self.made, self.depth + 1).visit_Call(call)
        if node in (None,) or ast.unparse(node).split(".")[0] in self.imported:
            return node
        wanted = name or ast.unparse(node)
        if (guess := neutral(wanted)) is not UNKNOWN:
            return ast.Constant(guess)
        self.made.unknown.append(wanted)
        return ast.Call(ast.Name("TODO"), [ast.Constant(f"write {wanted}")], [])

    def _assigned(self, name: str) -> ast.Call | None:
        """The library call that the file assigns to a variable."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
                value = node.value
                if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[0] in self.imported:
                    return value
        return None
