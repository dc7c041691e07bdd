"""Formats that weights and activations can be rounded to, and where a scale applies."""

from collections.abc import Iterable

from normscope.errors import UsageError, suggest

FORMATS = ("int8", "int4", "fp8")
GRANULARITIES = ("tensor", "channel")
"""One scale for the whole tensor, or one for each channel.

A channel is an output feature of a weight, or an index of the last axis of an activation.
"""


def parse_formats(given: str | Iterable[str]) -> tuple[str, ...]:
    """The formats of "int8,fp8" or of a list of names, each once, in the order of `FORMATS`; "" has none.

    Raises:
        UsageError: a name is unknown.
    """
    names = (given.split(",") if given else []) if isinstance(given, str) else list(given)
    names = [str(name).strip() for name in names]
    expected = f"some of {', '.join(FORMATS)}, with commas between them"
    for name in names:
        if name not in FORMATS:
            do = suggest(name, FORMATS, "choose one of these")
            raise UsageError(f'format "{name}" of quantise', expected, do)
    return tuple(name for name in FORMATS if name in names)
