"""The stub: a file with a factory `build()` that `normscope check` takes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normscope.errors import UsageError, suggest
from normscope.starter.construct import Construction, construct
from normscope.starter.expression import Expression, expressions
from normscope.starter.feed import _NO_BATCH, Feed, feed
from normscope.starter.rank import Candidate, candidates
from normscope.starter.scan import Class, Source, scan

NAME = "normscope_model.py"
_TODO = '''\
def TODO(what):
    """Stop here: normscope init could not read this value from the code."""
    raise NotImplementedError(f"{Path(__file__).name}, line {sys._getframe(1).f_lineno}: TODO: {what}")
'''


@dataclass(frozen=True)
class Start:
    """Result of `start`.

    Attributes:
        name: the class of the model.
        file, line: where it was found.
        others: further candidates, the likeliest first.
        todo: line of the stub and name of each value that is left to write.
        path: the stub.
        text: its text.
        model: what `normscope check` takes.
    """

    name: str
    file: Path
    line: int
    others: tuple[str, ...]
    todo: tuple[tuple[int, str], ...]
    path: Path
    text: str

    @property
    def model(self) -> str:
        """The MODEL of the stub's factory."""
        return f"{self.path}:build"


def start(path: Path, name: str | None = None) -> Start:
    """The stub for the model in a folder or a file; nothing is written.

    Args:
        path: a folder, or one Python file.
        name: the class to take; the likeliest by default.

    Raises:
        UsageError: there is no model, or none of that name.
    """
    sources = scan(path)
    folder = path if path.is_dir() else path.parent
    sources = [source for source in sources if source.path != folder / NAME]
    classes, direct = candidates(sources), expressions(sources)
    names = [each.root.name for each in classes] + [each.name for each in direct]
    if not names:
        count = f"{len(sources)} Python file{'s' * (len(sources) != 1)}"
        raise UsageError(
            f'"{path}" ({count}, no class that derives from nn.Module)',
            "a folder with the code of a model",
            "name the folder or the file that has it; for a type of transformers: normscope check hf:gpt2",
        )
    if name is not None and name not in names:
        raise UsageError(
            f'--class "{name}" in "{path}"', " or ".join(names), suggest(name, names, "choose one")
        )
    wanted = name or names[0]
    others = tuple(dict.fromkeys(each for each in names if each != wanted))
    found = next((each for each in classes if each.root.name == wanted), None)
    if found is not None:
        made = construct(found, sources)
        fed = feed(found, made.vocabulary, made.length)
        text = _of_class(found, made, fed, folder)
        file, line = found.root.source.path, found.root.node.lineno
    else:
        expression = next(each for each in direct if each.name == wanted)
        text = _of_expression(expression, folder)
        file, line = expression.source.path, expression.line
    return Start(wanted, file, line, others, _todo(text), folder / NAME, text)


def _todo(text: str) -> tuple[tuple[int, str], ...]:
    """Line and words of each call of TODO."""
    lines = enumerate(text.splitlines(), start=1)
    return tuple((n, found[2]) for n, line in lines if (found := re.search(r"TODO\((['\"])(.*?)\1\)", line)))


def _of_class(found: Candidate, made: Construction, fed: Feed, folder: Path) -> str:
    imports, folders = _imports(made.classes, folder)
    source = found.root.source
    work = next(
        (each for each in dict.fromkeys(c.source for c in made.classes) if each.work is not None), None
    )
    body = [] if work is None else [_guard(work, folder)]
    body += imports
    where = f"{source.path.relative_to(folder)}, line {found.root.node.lineno}"
    return _written(found.root.name, where, body, made, fed, folders)


def _of_expression(found: Expression, folder: Path) -> str:
    where = f"{found.source.path.relative_to(folder)}, line {found.line}"
    return _written(found.name, where, list(found.imports), found.made, _NO_BATCH, [])


def _guard(source: Source, folder: Path) -> str:
    name = source.path.relative_to(folder)
    do = "under `if __name__ == '__main__':`, then delete this line"
    what = f"put the loop of {name}, line {source.work}, {do}"
    return f'TODO("{what}")'


def _imports(classes: Sequence[Class], folder: Path) -> tuple[list[str], list[str]]:
    """Lines that import the classes, and folders besides the stub's that have to be on the path."""
    lines: dict[str, list[str]] = {}
    folders: list[str] = []
    for each in classes:
        top = each.source.path.parent
        while (top / "__init__.py").is_file() and top != folder and folder in top.parents:
            top = top.parent
        parts = each.source.path.relative_to(top).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        lines.setdefault(module, []).append(each.name)
        if top != folder and str(top.relative_to(folder)) not in folders:
            folders.append(top.relative_to(folder).as_posix())
    return [
        f"from {module} import {', '.join(dict.fromkeys(names))}" for module, names in lines.items()
    ], folders


def _written(
    name: str, where: str, body: Sequence[str], made: Construction, fed: Feed, folders: Sequence[str]
) -> str:
    """The file. The user's code is imported in `build`: an error there is one of the factory."""
    needs_todo = any("TODO(" in line for line in (*body, *made.lines))
    imports = {*fed.imports}
    imports |= {"import sys", "from pathlib import Path"} if needs_todo or folders else set()
    plain = [
        line for line in ("import argparse", "import sys", "from pathlib import Path") if line in imports
    ]
    torch = sorted(imports - set(plain), key=lambda line: (not line.startswith("import"), line))
    paths = [f"sys.path.insert(0, str(Path(__file__).resolve().parent / {each!r}))" for each in folders]
    comments = [f"# {line}" for line in fed.about]
    build = ["def build():", f'    """{name} of {where}."""']
    build += [f"    {line}".rstrip() for line in (*body, *([""] if body else []), *made.lines, *comments)]
    build.append(f"    return {fed.returned}")
    head = f'"""MODEL for normscope: `normscope check {NAME}:build`. Change it as you like."""'
    sections = ["\n".join(plain), "\n".join(torch), "\n".join(paths)]
    parts = ["\n\n".join([head, *filter(None, sections)])]
    parts += [_TODO.rstrip()] if needs_todo else []
    parts += [function.rstrip() for function in fed.functions]
    return "\n\n\n".join([*parts, "\n".join(build)]) + "\n"
