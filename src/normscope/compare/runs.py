"""Stores of runs as sides: structure and recipe as far as a Monitor stores them, and where two runs part."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from normscope.compare.outcome import Outcome
from normscope.compare.types import Compared, Difference, Part, Place
from normscope.compare.words import within
from normscope.monitor.after.opening import opened
from normscope.monitor.against import compare as where_they_part
from normscope.monitor.store import Grid, RunReader

Data = Mapping[str, Any]
SAME = 1e-6
"""Relative difference of two learning rates that is rounding."""
_INPUT, _HIDDEN = ".input", ".hidden"
_LEFT_OUT = "the store of a run has its learning rate, tokens and types of numbers, but no other settings"


def read_run(path: Path) -> Data:
    """Structure and recipe in a store as plain data: sites, learning rate and tokens by step."""
    with opened(path) as reader:
        grids = _grids(reader)
        facts = reader.notes().get("facts") or {}
    return {
        "store": str(path),
        "streams": list(grids["stream/rms"].sites) if "stream/rms" in grids else [],
        "rates": _by_step(grids.get("lr")),
        "tokens": _by_step(grids.get("tokens")),
        "types": {name: facts[name] for name in ("dtype", "weights") if name in facts},
    }


def _grids(reader: RunReader) -> dict[str, Grid]:
    """Every quantity of the first rank."""
    rank = reader.ranks()[0].rank
    return {name: reader.grid(name, rank) for name in reader.columns(rank)}


def _by_step(grid: Grid | None) -> dict[int, float]:
    if grid is None:
        return {}
    values = zip(grid.steps.tolist(), grid.values[:, 0].tolist(), strict=True)
    return {step: value for step, value in values if math.isfinite(value)}


def structure_of_run(held: Data) -> Place | None:
    """Stacks and blocks by name; None where the run stored no stream."""
    stacks: list[tuple[str, list[str]]] = []
    for site in held["streams"]:
        if site.endswith(_INPUT):
            stacks.append((site.removesuffix(_INPUT), []))
        elif stacks and site != f"{stacks[-1][0]}{_HIDDEN}":
            stacks[-1][1].append(site)
    if not any(blocks for _, blocks in stacks):
        return None
    return Place("model", "", {}, tuple(_stack(name, blocks) for name, blocks in stacks))


def _stack(name: str, blocks: Sequence[str]) -> Place:
    found = tuple(Place("block", block) for block in blocks)
    return Place("stack", name, {"role": name.split("-")[0]}, found)


def only_blocks(model: Place) -> Place:
    """The structure without branches, of which a run has no facts."""
    stacks = (
        replace(stack, parts=tuple(replace(block, parts=()) for block in stack.parts))
        for stack in model.parts
    )
    return replace(model, parts=tuple(stacks))


def compare_recipes(a: Data, b: Data) -> Outcome:
    """Differences between the learning rates, tokens and types of numbers of two runs."""
    found = (*_rates(a["rates"], b["rates"]), *_tokens(a, b), *_types(a["types"], b["types"]))
    said = "" if found else "the same learning rate at every step that both have"
    return Outcome(Compared(Part.RECIPE, "partly", (_LEFT_OUT,), said), found)


def _rates(a: Mapping[int, float], b: Mapping[int, float]) -> Iterator[Difference]:
    steps = [step for step in a if step in b]
    apart = [step for step in steps if not math.isclose(a[step], b[step], rel_tol=SAME)]
    if not apart:
        return
    ratios = [b[step] / a[step] for step in steps if a[step]]
    first = apart[0]
    is_factor = all(math.isclose(x, y, rel_tol=1e-3) for x, y in pairwise(ratios))
    name = "learning-rate" if is_factor else "schedule"
    message = f"The learning rate is {a[first]:.4g} in A and {b[first]:.4g} in B at step {first}"
    rest = f"; it differs at {len(apart)} of {len(steps)} common steps."
    yield Difference(Part.RECIPE, name, (("", ""),), a[first], b[first], message + rest)


def _tokens(a: Data, b: Data) -> Iterator[Difference]:
    x, y = (median(each["tokens"].values()) if each["tokens"] else None for each in (a, b))
    if x is not None and y is not None and x != y:
        message = f"The number of tokens per step is {x:g} in A and {y:g} in B."
        yield Difference(Part.RECIPE, "batch-tokens", (("", ""),), x, y, message)


def _types(a: Data, b: Data) -> Iterator[Difference]:
    for name, what in (("dtype", "type of numbers in the forward"), ("weights", "type of the weights")):
        if name in a and name in b and a[name] != b[name]:
            message = f"The {what} is {a[name]} in A and {b[name]} in B."
            yield Difference(Part.RECIPE, "precision", (("", ""),), a[name], b[name], message)


def parting(a: Data, b: Data) -> tuple[Difference, ...]:
    """The first step at which the figures of two runs part; none where they stay together."""
    grids = []
    for each in (a, b):
        with opened(Path(each["store"])) as reader:
            grids.append({name: grid for name, grid in _grids(reader).items() if name != "lr"})
    found = where_they_part(grids[0], grids[1], "B")
    first = next(iter((*found.where, *found.from_start)), None)
    if first is None:
        return ()
    sites, message = ((first.site, first.site),), f"Step by step: {within(found.sentence)}"
    return (Difference(Part.VERDICT, "measurement", sites, first.run, first.good, message),)
