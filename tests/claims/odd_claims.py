"""Claims of every verdict, and some that break: made up, in a group of their own."""

import math
import os
import signal
import sys
import time

from normscope.claims import (
    CLAIMS,
    Case,
    Claim,
    Evidence,
    Figure,
    Kind,
    Line,
    Look,
    NotMeasured,
    Plot,
    Sentence,
    Source,
    claim,
)

HERE = Source("000", "Theorem 2.2", "零空间 <b>")
THERE = Source("004", "§5.3.2", "训练初期不稳定")


def depths(look: Look, factor: float = 1.0) -> Plot:
    """Two lines and a level, over seeds."""
    first = {2.0**k: [factor * 2**k + seed for seed in look.seeds] for k in range(1, 7)}
    second = {x: [100 / y for y in ys] for x, ys in first.items()}
    lines = [Line.over_seeds("Post-LN", first), Line.over_seeds("Pre-LN", second)]
    return Plot("Gradient by depth", "blocks", "norm of the gradient", lines, "xy", {"even": 20.0})


def cases(look: Look, holds: bool, met: bool = True, part: str = "") -> list[Case]:
    """One a seed."""
    return [
        Case(seed=seed, where=f"d = {seed}, x < 1 & <i>", value=0.5 + seed, holds=holds, met=met, part=part)
        for seed in look.seeds
    ]


@claim("Z1", HERE, THERE, says="It holds.", hypothesis="1 is 1 & 1 < 2", has_long=True)
def it_holds(look: Look) -> Evidence:
    found = cases(look, True)
    return Evidence(cases=found, figure=Figure.largest("largest <error>", found), plots=[depths(look)])


@claim(
    "Z2",
    HERE,
    says="It holds under a condition | or two.",
    hypothesis="half of it",
    condition="x < 1",
    parts={"refuted": Sentence("Besides, this <script>."), "nothing": Sentence("Nobody looked.")},
)
def it_holds_sometimes(look: Look) -> Evidence:
    found = [*cases(look, True), *cases(look, False, met=False), *cases(look, False, part="refuted")]
    return Evidence(
        cases=found,
        figure=Figure.largest("size", found),
        plots=[depths(look), depths(look, 3.0)],
        notes=["A note <b>of</b> 3.14.", "Another."],
        unmeasured=["On a GPU: there is none."],
        of="real blocks",
    )


@claim("Z3", THERE, HERE, says="It is refuted.", hypothesis="30 % or more", kind=Kind.TENDENCY)
def it_is_refuted(look: Look) -> Evidence:
    found = [
        Case(seed=seed, where="<b>everywhere</b>", value=float(seed), holds=seed == 1) for seed in look.seeds
    ]
    return Evidence(cases=found, figure=Figure.largest("steps saved, in %", found))


@claim("Z4", THERE, says="It cannot be measured.", hypothesis="10–20 % faster on a GPU")
def it_is_not_measured(look: Look) -> Evidence:
    raise NotMeasured("needs a GPU <here>")


@claim("Z5", THERE, says="It breaks.", hypothesis="nothing")
def it_breaks(look: Look) -> Evidence:
    print("what a claim prints is no answer")
    raise RuntimeError("broken <on purpose>")


@claim("Z6", THERE, says="It kills its worker.", hypothesis="nothing")
def it_kills(look: Look) -> Evidence:
    os.kill(os.getpid(), signal.SIGKILL)
    return Evidence()


@claim("Z7", THERE, says="It takes for ever.", hypothesis="nothing")
def it_sleeps(look: Look) -> Evidence:
    time.sleep(600)
    return Evidence()


@claim("Z8", THERE, says="Nothing in it is finite.", hypothesis="nothing")
def it_is_not_finite(look: Look) -> Evidence:
    found = [
        Case(seed=seed, where="at 0", value=(math.nan, math.inf)[seed % 2], holds=False)
        for seed in look.seeds
    ]
    line = Line("y", [1.0, 2.0, 3.0], [math.nan, 0.0, -math.inf], [math.nan] * 3, [math.inf] * 3)
    return Evidence(
        cases=found,
        figure=Figure("size", dict.fromkeys(look.seeds, -math.inf)),
        plots=[Plot("Nothing", "x", "y", [line], "xy", {"none": math.nan})],
    )


IDS = [f"Z{number}" for number in range(1, 9)]
ODD: dict[str, Claim] = {id: CLAIMS[id] for id in IDS}
if "pytest" in sys.modules:  # other tests look at all claims; a worker needs them
    for _id in IDS:
        del CLAIMS[_id]
