"""Griffe extension: an entry `a, b: words` of a docstring stands for two arguments with the same words."""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^( *)(Args|Attributes):$")
_ENTRY = re.compile(r"^( *)(\w+(?:, \w+)+): (.*)$")


class GroupedArguments(griffe.Extension):
    """Gives each argument of a shared entry an entry of its own, so that each shows its type."""

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = ungrouped(obj.docstring.value)


def ungrouped(text: str) -> str:
    """`text` with the shared entries of its Args and Attributes written out."""
    lines, out, inside = text.splitlines(), [], None
    while lines:
        line = lines.pop(0)
        if found := _SECTION.match(line):
            inside = len(found[1]) + 4
        elif line.strip() and inside is not None and len(line) - len(line.lstrip()) < inside:
            inside = None
        entry = _ENTRY.match(line) if inside is not None else None
        if entry is None or len(entry[1]) != inside:
            out.append(line)
            continue
        more = []
        while lines and lines[0].startswith(" " * (inside + 1)):
            more.append(lines.pop(0))
        for name in entry[2].split(", "):
            out += [f"{entry[1]}{name}: {entry[3]}", *more]
    return "\n".join(out)
