"""The stub: a file with a factory `build()` that `normscope check` takes."""

import re
from dataclasses import dataclass
from pathlib import Path

from normscope.errors import UsageError, suggest
from normscope.starter.construct import Construction
from normscope.starter.rank import candidates
from normscope.starter.scan import scan

NAME = "normscope_model.py"
_STUB = '''\
"""MODEL for normscope: `normscope check {file}:build`. Change it as you like."""
{head}

def build():
    """{name} of {where}."""
    {body}
    # normscope finds an input that the model takes (byte ids, images or noise), and its loss.
    # For your own return (model, batches, loss_fn): batches an iterator, loss_fn(output, batch) a scalar.
    return model
'''
_IMPORTS = """
import sys
from pathlib import Path
"""
_TODO = '''

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
    """

    name: str
    file: Path
    line: int
    others: tuple[str, ...]
    todo: tuple[tuple[int, str], ...]
    path: Path
    text: str


def start(path: Path, name: str | None = None) -> Start:
    """The stub for the model in a folder or a file; nothing is written.

    Args:
        path: a folder, or one Python file.
        name: the class to take; the likeliest by default.

    Raises:
        UsageError: there is no model, or none of that name.
    """
    folder = path if path.is_dir() else path.parent
    project = scan(path, without=folder / NAME)
    found = candidates(project)
    if not found:
        count = f"{len(project.sources)} Python file{'s' * (len(project.sources) != 1)}"
        raise UsageError(
            f'"{path}" ({count}, no class that derives from nn.Module)',
            "a folder with the code of a model",
            "name the folder or the file that has it; for a type of transformers: normscope check hf:gpt2",
        )
    if name is None:
        name = next(iter(found))
    elif name not in found:
        do = suggest(name, found, "choose one")
        raise UsageError(f'--class "{name}" in "{path}"', " or ".join(found), do)
    source, node = found.pop(name)
    where = f"{source.path.relative_to(folder)}, line {node.lineno}"
    text = _written(name, where, Construction(source, node, project, folder))
    lines = enumerate(text.splitlines(), start=1)
    todo = tuple((n, what) for n, line in lines for what in re.findall(r'TODO\("(.*?)"\)', line))
    return Start(name, source.path, node.lineno, tuple(found), todo, folder / NAME, text)


def _written(name: str, where: str, made: Construction) -> str:
    """The file. The user's code is imported in `build`: an error there is one of the factory."""
    body = [*dict.fromkeys(made.imports), "", *made.lines]
    if made.guessed:
        body.append(f"# Neutral values for what the code does not give: {', '.join(made.guessed)}")
    text = "\n    ".join(body).replace("\n    \n", "\n\n")
    has_todo = "TODO(" in text
    head = _IMPORTS * (has_todo or "Path(" in text) + _TODO * has_todo
    return _STUB.format(file=NAME, head=head, name=name, where=where, body=text)
