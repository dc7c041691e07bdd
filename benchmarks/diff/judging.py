"""Judgement of a comparison of two models.

The rule was fixed before the first run, but for these: the names of kinds were filled in when the tool had
them (`diff/kinds.py`); that the block may be named for both of its branches, any planted place where only
gradients part, and the role in a recipe were allowed after runs of the seen set. After both runs of the
held-out set, names that follow from a changed head or mask were added; its figures are without them.

The rule:

- The first difference is the one of the function part that `is_first` marks, else the first one of the
  function part. Where that part found none, and for planted starts and recipes, it is the first one of the
  part that must name the kind (see `diff.kinds.KINDS`), and after that of the structure.
- The site is right if the first site of the first difference is, on each side that it names, the module of
  the first planted place, a module inside of it, or a module of the same branch, norms included. What lies
  outside of the layers (embeddings, last norm, head) may be named by the model or by the stack, and what
  concerns both branches of a block by the block. Where only gradients part, it may be any planted place. In
  a recipe the message must name the role instead.
- The reason is right if the name of the first difference is one of the kind's.
- A second plant is found if any difference has one of its names and one of its places.
- A difference is false if no plant has its name, or a name that follows from the plant, together with all of
  its sites. For pairs of one model every difference is false. A part that was not compared is counted apart.
"""

import re
from typing import Any

from benchmarks.diff.families import Places
from benchmarks.diff.kinds import KINDS
from benchmarks.diff.plants import Case, Truth
from normscope.compare.types import Diff, Difference

Site = tuple[str | None, str | None]


def is_at(site: str | None, places: Places) -> bool:
    """Whether a site is one of the places, or inside; a side that is not named agrees with all."""
    if site is None or "*" in places:
        return True
    path = re.match(r"[\w.]*", site.strip()).group().strip(".")  # type: ignore[union-attr]
    is_outside = not any(re.search(r"\d", place) for place in places)
    if is_outside and not re.search(r"\.\d|\d\.", path):
        return True
    return any(path == place or path.startswith(f"{place}.") for place in places)


def is_of(site: Site, pair: tuple[Places, Places]) -> bool:
    """Whether a pair of sites is a planted place."""
    return all(is_at(one, places) for one, places in zip(site, pair, strict=True))


def is_named(found: Difference, truth: Truth) -> bool:
    """Whether a difference has a right name of the plant, at its places."""
    return found.name in KINDS[truth.kind].names and explains(found, truth)


def explains(found: Difference, truth: Truth) -> bool:
    """Whether a difference is the plant or follows from it."""
    kind = KINDS[truth.kind]
    known = found.name in (*kind.names, *kind.also) and truth.says in found.message
    return known and all(any(is_of(site, pair) for pair in truth.sites) for site in found.sites)


def first_of(found: tuple[Difference, ...], truth: Truth) -> Difference | None:
    """The difference that a reader sees first."""
    part = KINDS[truth.kind].part
    marked = [each for each in found if each.part == part and each.is_first]
    ordered = [each for name in (part, "structure") for each in found if each.part == name]
    return next(iter([*marked, *ordered]), None)


def is_first_place(site: Site | None, truth: Truth) -> bool:
    """Whether a site is the first place of a plant; any place where only gradients part."""
    places = truth.sites if KINDS[truth.kind].backwards else truth.sites[:1]
    return site is not None and any(is_of(site, pair) for pair in places)


def judged(case: Case, diff: Diff) -> dict[str, Any]:
    """The record of a pair."""
    found = diff.differences
    false = [each for each in found if not any(explains(each, truth) for truth in case.truths)]
    record: dict[str, Any] = {
        "kinds": [truth.kind for truth in case.truths],
        "false": [f"{each.part}: {each.name}" for each in false],
        "compared": {str(each.part): [each.how, *each.why] for each in diff.parts},
        "said": {str(each.part): each.said for each in diff.parts if each.said},
        "differences": [
            [str(e.part), e.name, [list(site) for site in e.sites[:8]], e.message, e.confirmed, e.is_first]
            for e in found
        ],
        "seconds": diff.cost.get("total"),
        "forwards": next(
            (each.figures["forwards"] for each in diff.parts if "forwards" in each.figures), None
        ),
    }
    if case.truths:
        first, truth = first_of(found, case.truths[0]), case.truths[0]
        site = first.sites[0] if first is not None and first.sites else None
        record |= {
            "site": first is not None and truth.says in first.message and is_first_place(site, truth),
            "reason": first is not None and first.name in KINDS[truth.kind].names,
            "first": None if first is None else [first.name, site],
            "named": [any(is_named(each, truth) for each in found) for truth in case.truths],
        }
    return record
