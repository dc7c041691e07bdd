"""Many sites in few words: "layers.3…layers.9"."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

Parts = tuple[str, ...]
_WIDE = 72
"""Columns of a list of ranges from which on families of sites in the same blocks are counted instead."""
_LONG = 24
"""Columns of a site from which on the end of a range is only what changes: "encoder.layers.3.attn…9.attn"."""


def compress(sites: Iterable[str], most: int = 4) -> str:
    """Sites that differ by one running number as ranges, the rest as they are; after `most` ranges the count.

    The running number is the one, of the numbers in a path, that takes the most values: the block's in
    "encoder.block.3.layer.0", the inner one in Swin's "layers.2.blocks.17", the call in ALBERT's "layer@3".

    >>> compress(["layers.3.attn", "layers.4.attn", "layers.5.attn", "layers.7.attn"])
    'layers.3.attn…layers.5.attn, layers.7.attn'

    Where that is long and several families of sites stand in the same blocks, the blocks are named and the
    sites counted: "blocks.0…blocks.3 (16 places)".
    """
    unique = list(dict.fromkeys(sites))
    called = any("@" in site for site in unique)
    split = {site: _parts(site, called) for site in unique}
    place = _running(list(split.values()))
    families: dict[tuple[Parts, Parts], list[str]] = {}
    for site, parts in split.items():
        counted = place is not None and place < len(parts) and parts[place].isdecimal()
        key = (parts[:place], parts[place + 1 :]) if counted and place is not None else (parts, ())
        families.setdefault(key, []).append(site)
    ranges = [r for family in families.values() for r in _ranges(family, split, place)]
    more = f" and {len(ranges) - most} more" if len(ranges) > most else ""
    listed = ", ".join(ranges[:most]) + more
    return (_counted(families, split, place) or listed) if len(listed) > _WIDE else listed


def number_runs(numbers: Iterable[int]) -> str:
    """Ascending numbers with their runs folded.

    >>> number_runs([0, 1, 2, 5])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def shorten(name: str, width: int) -> str:
    """`name` in at most `width` columns, its end kept: that is where the block's number is."""
    return name if len(name) <= width else "…" + name[len(name) - width + 1 :]


def in_lines(sites: str, width: int) -> str:
    """`sites` in lines of at most `width` columns, ended after a range's "…" or a comma, else after a dot.

    >>> print(in_lines("transformer.h.0…transformer.h.11", 20))
    transformer.h.0…
    transformer.h.11
    """
    lines = [""]
    for site in re.findall(r"[^…,]+(?:…|, ?|$)", sites):
        for part in [site] if len(site.rstrip()) <= width else re.findall(r"[^.]+\.?", site):
            if lines[-1] and len((lines[-1] + part).rstrip()) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _parts(site: str, called: bool) -> Parts:
    """The site at its dots and its "@"; where any site names a call, the others are the call 0."""
    path, _, call = site.partition("@")
    return (*path.split("."), call or "0") if called else tuple(path.split("."))


def _running(paths: Sequence[Parts]) -> int | None:
    """Place of the number that takes the most values; the first of equals; None where there is no number."""
    values: dict[int, set[str]] = {}
    for parts in paths:
        for place, part in enumerate(parts):
            if part.isdecimal():
                values.setdefault(place, set()).add(part)
    return max(values, key=lambda place: (len(values[place]), -place), default=None)


def _ranges(family: list[str], split: dict[str, Parts], place: int | None) -> list[str]:
    if len(family) == 1 or place is None:
        return family
    numbered = sorted((int(split[site][place]), site) for site in family)
    runs = groupby(enumerate(numbered), key=lambda item: item[1][0] - item[0])
    return [_range([site for _, (_, site) in run]) for _, run in runs]


def _counted(
    families: dict[tuple[Parts, Parts], list[str]], split: dict[str, Parts], place: int | None
) -> str:
    """ "blocks.0…blocks.3 (16 places)" for families that share prefix and numbers, "" where they do not."""
    if place is None or len(families) < 2 or any(len(parts) <= place for parts in split.values()):
        return ""
    of_family = [{split[site][: place + 1] for site in family} for family in families.values()]
    if any(parts != of_family[0] or "@" in site for parts in of_family for site in split):
        return ""
    named = {".".join(parts): parts for parts in of_family[0]}
    blocks = ", ".join(_ranges(list(named), named, place))
    return f"{blocks} ({sum(map(len, families.values()))} places)"


def _range(sites: list[str]) -> str:
    first, last = sites[0], sites[-1]
    if len(sites) == 1:
        return first
    if len(first) <= _LONG:
        return f"{first}…{last}"
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    start = max(last.rfind(".", 0, same), last.rfind("@", 0, same + 1) - 1) + 1
    return f"{first}…{last[start:]}"
