"""Structure of a model as places with facts, and the differences between two aligned structures."""

from collections.abc import Iterator, Mapping
from typing import Any

from normscope.anatomy import Anatomy
from normscope.anatomy.types import Branch, Norm, Stack, at_call
from normscope.compare.facts import FACTS, differing, name_of, sentence
from normscope.compare.types import Difference, Pair, Part, Place
from normscope.subjects import Subject

Sites = list[tuple[str | None, str | None]]


def structure_of(subject: Subject, anatomy: Anatomy) -> Place:
    """The structure of a model from its reading."""
    return Place("model", "", {}, tuple(_stack(stack) for stack in anatomy.stacks))


def structure_of_report(report: Mapping[str, Any]) -> Place:
    """The structure in a saved report: placements, kinds, joins and scales; the other facts are unknown."""
    stacks = report.get("anatomy", {}).get("stacks", [])
    return Place("model", "", {}, tuple(map(_reported_stack, stacks)))


_REPORTED = ("kind", "placement", "norm", "join", "stream_scale", "branch_scale")


def _reported_stack(stack: Mapping[str, Any]) -> Place:
    name = stack["name"]
    facts = {"role": name.split("-")[0], "long_skips": len(stack.get("long_skips", []))}
    if not stack["final_norm"]:
        facts["final_norm"] = None
    blocks = (
        Place(
            "block",
            at_call(block["path"], block["call"]),
            {},
            tuple(
                Place("branch", branch["path"], {fact: branch[fact] for fact in _REPORTED})
                for branch in block["branches"]
            ),
        )
        for block in stack["blocks"]
    )
    return Place("stack", name, facts, tuple(blocks))


def _stack(stack: Stack) -> Place:
    facts = {"role": stack.name.split("-")[0], "long_skips": len(stack.long_skips)}
    facts |= _norm_facts((stack.final_norm,) if stack.final_norm else (), "final_norm")
    blocks = (
        Place("block", block.site, {}, tuple(Place("branch", b.site, _branch(b)) for b in block.branches))
        for block in stack.blocks
    )
    return Place("stack", stack.name, facts, tuple(blocks))


def _branch(branch: Branch) -> dict[str, Any]:
    facts = {fact: getattr(branch, fact) for fact in _REPORTED}
    return facts | {k: v for k, v in _norm_facts(branch.norms, "norm").items() if k != "norm"}


def _norm_facts(norms: tuple[Norm, ...], name: str) -> dict[str, Any]:
    """Facts of the norms of one place; one value where all agree."""
    if not norms:
        return {name: None}
    return {
        name: _one([norm.kind for norm in norms]),
        f"{name}_eps": _one([norm.eps for norm in norms]),
        f"{name}_gain": _one([norm.weight is not None for norm in norms]),
        f"{name}_offset": _one([norm.weight_offset for norm in norms]),
    }


def _one(values: list[Any]) -> Any:
    """The value that all agree on, else the list of them."""
    return values[0] if all(value == values[0] for value in values) else values


def compare_structures(rows: Pair) -> tuple[Difference, ...]:
    """Differences between two aligned structures, in the order of the forward; one for many sites.

    A fact that differs in the same way at several places is one difference.
    """
    found: dict[tuple[Any, ...], tuple[Any, Sites]] = {}
    for key, difference, site in _differences(rows):
        found.setdefault(key, (difference, []))[1].append(site)
    return tuple(_difference(key, values, sites) for key, (values, sites) in found.items())


def _differences(
    pair: Pair,
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, Any], tuple[str | None, str | None]]]:
    """(key, values, site) of every difference at or inside of a pair."""
    a, b = pair.a, pair.b
    if a is None or b is None:
        here = a or b
        assert here is not None, "one of the two exists"
        key = (here.level, here.facts.get("kind"), a is None)
        yield key, (None, None), (a.name if a else None, b.name if b else None)
        return
    for fact in differing(a.facts, b.facts):
        values = a.facts[fact], b.facts[fact]
        yield (fact, None, repr(values)), values, (a.name, b.name)
    for part in pair.parts:
        yield from _differences(part)


def _difference(key: tuple[Any, ...], values: tuple[Any, Any], sites: Sites) -> Difference:
    if key[0] in FACTS:
        fact = key[0]
        return Difference(Part.STRUCTURE, name_of(fact), tuple(sites), *values, sentence(fact, *values))
    level, kind, only_b = key
    name = {"block": "blocks"}.get(level, level)
    number, what = len(sites), level if kind is None else f"{kind} branch"
    plural = {"branch": "branches"}.get(level, f"{what}s") if kind is None else f"{kind} branches"
    who = ("B", "A") if only_b else ("A", "B")
    words = f"{who[0]} has {number} {what if number == 1 else plural} that {who[1]} lacks."
    a, b = (None, number) if only_b else (number, None)
    return Difference(Part.STRUCTURE, name, tuple(sites), a, b, words)
