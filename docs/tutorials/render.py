"""Make the page of a tutorial from its script: prose, code, printed output and pictures.

    python docs/tutorials/render.py 01_null_space_of_layernorm [FOLDER]

runs the script in FOLDER (default: its own folder) and writes the page and its pictures there.

A script is plain Python. A run of comment lines with an empty line before and after it is prose, in Markdown;
everything else is code. `plt.savefig("NAME.png")  # WORDS` puts the picture into the page, with WORDS as its
description.
"""

import contextlib
import io
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_PICTURE = re.compile(r'^plt\.savefig\("([^"]+)".*?\)  # (.+)$', flags=re.MULTILINE)


@dataclass(frozen=True)
class Piece:
    """Prose, or code with the number of its first line."""

    text: str
    line: int
    is_code: bool


def pieces(script: str) -> list[Piece]:
    """Prose and code in turn."""
    found: list[Piece] = []
    line = 1
    for part in re.split(r"(\n{2,})", script.strip("\n")):
        if part.strip("\n"):
            is_code = not all(each.startswith("#") for each in part.splitlines())
            if is_code and found and found[-1].is_code:
                gap = "\n" * (line - found[-1].line - found[-1].text.count("\n"))
                found[-1] = Piece(found[-1].text + gap + part, found[-1].line, True)
            else:
                found.append(Piece(part, line, is_code))
        line += part.count("\n")
    return found


def page(script: str, name: str) -> str:
    """Run the script here, piece by piece, and write it as Markdown."""
    names: dict[str, object] = {"__name__": "__main__"}
    version = ".".join(map(str, sys.version_info[:2]))  # models train on the source of its library
    parts = [f"<!-- made by render.py from {name}.py, with Python {version} -->"]
    for piece in pieces(script):
        if not piece.is_code:
            parts.append("\n".join(line[1:].removeprefix(" ") for line in piece.text.splitlines()))
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (piece.line - 1) + piece.text, f"{name}.py", "exec"), names)
        parts.append(f"```python\n{piece.text}\n```")
        if printed.getvalue().strip():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
        parts += [f"![{words}]({picture})" for picture, words in _PICTURE.findall(piece.text)]
    return "\n\n".join(parts) + "\n"


def main(name: str, folder: Path = HERE) -> None:
    """Write the page of a script."""
    os.environ["MPLBACKEND"] = "Agg"
    script = (HERE / f"{name}.py").read_text(encoding="utf-8")
    os.chdir(folder)
    Path(f"{name}.md").write_text(page(script, name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1].removesuffix(".py"), *(Path(each) for each in sys.argv[2:3]))
