"""The MODEL grammar: `nn:NAME,key=value…`, `hf:NAME,key=value…`, `file.py:factory`, `package.mod:factory`."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from normscope.errors import UsageError

GRAMMAR = (
    "nn:decoder,key=value…, hf:MODEL_TYPE,key=value…, hf:PATH (config.json or a folder), file.py:factory "
    "or package.module:factory"
)
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Spec:
    """A parsed MODEL.

    Attributes:
        kind: "nn", "hf" or "python".
        name: the text before the options: a model, a model type or path, or a file or module.
        options: key → value, values read as JSON, bare words as text.
        factory: name of the factory of a "python" spec, else "".
        text: the whole, as the user wrote it.
    """

    kind: Literal["nn", "hf", "python"]
    name: str
    options: dict[str, Any]
    text: str
    factory: str = ""


def parse(text: str) -> Spec:
    """Parse a MODEL; UsageError if it is not one."""
    if not isinstance(text, str):  # from Python, whose types nobody checks
        raise UsageError(f"a MODEL of type {type(text).__name__}", GRAMMAR, "give a module to check as it is")
    prefix, colon, rest = text.partition(":")
    if prefix in ("nn", "hf") and colon:
        name, options = _split_options(rest, text)
        if not name:
            raise UsageError(f'MODEL "{text}"', f"a name after {prefix}:", f"write one of {GRAMMAR}")
        return Spec("nn" if prefix == "nn" else "hf", name, options, text)
    head, options = _split_options(text, text)
    path, colon, factory = head.rpartition(":")
    if colon and path and factory:
        return Spec("python", path, options, text, factory)
    raise UsageError(f'MODEL "{text}"', GRAMMAR, _what_was_meant(text))


def _what_was_meant(text: str) -> str:
    path = text.rstrip(":")
    if path.endswith(".py"):
        return (
            f'name the factory too, "{path}:FACTORY", let `normscope init {quote(path)}` write one, '
            f"or check the script as it is: `normscope check -- python {quote(path)}`"
        )
    if path and Path(path).is_dir():
        return f"let `normscope init {quote(path)}` write a factory for the model in that folder"
    if text and ":" not in text:
        return f'for a model type of Hugging Face write "hf:{text}"'
    return "write one of these"


def _split_options(rest: str, text: str) -> tuple[str, dict[str, Any]]:
    name, *parts = _split_commas(rest)
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise UsageError(
                f'option "{part}" of "{text}"', "key=value", "put an = between an option's name and its value"
            )
        if key in options:
            raise UsageError(f'option "{key}" of "{text}"', "each option once", "keep one of them")
        options[key] = _value(value.strip())
    return name.strip(), options


def _value(value: str) -> Any:
    if value in _PYTHON_WORDS:  # as text, "False" would count as true
        return _PYTHON_WORDS[value]
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|.', re.DOTALL)
"""A JSON string, or one character."""


def _split_commas(text: str) -> list[str]:
    """Split at commas outside of JSON brackets and strings."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in "[{") - (token in "]}")
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts
