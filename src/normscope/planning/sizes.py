"""Numbers of bytes: read from "16GB", written as "14.9 GiB"."""

import math
import re

from normscope.errors import UsageError

_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(given: str | float, name: str = "memory") -> int:
    """The bytes of "16GB", "500MB" or "24GiB"; a number that is no text is in bytes.

    GB is 10⁹ bytes and GiB 2³⁰, as PyTorch and nvidia-smi (there "MiB") count.

    Raises:
        UsageError: the text is no size or has no unit, or the size is not positive.
    """
    text = f"{given}B" if isinstance(given, int | float) and not isinstance(given, bool) else str(given)
    found = _SIZE.fullmatch(text)
    unit = None if found is None else _UNITS.get(found[2].upper())
    count = 0.0 if found is None or unit is None else float(found[1]) * unit
    if not (math.isfinite(count) and count >= 1):
        raise UsageError(
            f'{name} "{given}"', "a size such as 16GB, 500MB or 24GiB", "write a number and its unit"
        )
    return int(count)


def in_words(count: float) -> str:
    """A number of bytes in the largest binary unit in which it is at least 1: "1.5 GiB"."""
    size = abs(count)
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= one:
            return f"{count / one:,.1f} {unit}"
    return f"{count:,.0f} B"
