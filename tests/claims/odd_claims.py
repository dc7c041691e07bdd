"""Claims of every verdict, and some that break: made up, in a group of their own."""

import math
import multiprocessing
import os
import signal
import time

from normscope.claims import (
    CLAIMS,
    Case,
    Claim,
    Evidence,
    Figure,
    Kind,
    Line,
    NotMeasured,
    Plot,
    Sentence,
    Setup,
    Source,
    claim,
)
from normscope.claims.sentences import Said

HERE = Source("000", "Theorem 2.2", "零空间 <b>")
THERE = Source("004", "§5.3.2", "训练初期不稳定")


def said(
    says: str,
    *sources: Source,
    asks: str = "nothing",
    condition: str = "",
    kind: Kind = Kind.LAW,
    parts: dict[str, Sentence] | None = None,
    of: str = "",
) -> Said:
    """A sentence that no text says."""
    sentence = Sentence(says, condition, of=of)
    return Said(sources=sources, sentence=sentence, asks=asks, kind=kind, parts=parts or {})


def depths(setup: Setup, factor: float = 1.0) -> Plot:
    """Two lines and a level, over seeds."""
    first = {2.0**k: [factor * 2**k + seed for seed in setup.seeds] for k in range(1, 7)}
    second = {x: [100 / y for y in ys] for x, ys in first.items()}
    lines = [Line.over_seeds("Post-LN", first), Line.over_seeds("Pre-LN", second)]
    return Plot("Gradient by depth", "blocks", "norm of the gradient", lines, "xy", {"even": 20.0})


def cases(setup: Setup, holds: bool, met: bool = True, part: str = "") -> list[Case]:
    """One a seed."""
    return [
        Case(seed=seed, where=f"d = {seed}, x < 1 & <i>", value=0.5 + seed, holds=holds, met=met, part=part)
        for seed in setup.seeds
    ]


@claim("Z1", said=said("It holds.", HERE, THERE, asks="1 is 1 & 1 < 2"), has_long=True)
def it_holds(setup: Setup) -> Evidence:
    found = cases(setup, True)
    return Evidence(cases=found, figure=Figure.largest("largest <error>", found), plots=[depths(setup)])


@claim(
    "Z2",
    said=said(
        "It holds under a condition | or two.",
        HERE,
        asks="half of it",
        condition="x < 1",
        parts={"refuted": Sentence("Besides, this <script>."), "nothing": Sentence("Nobody looked.")},
        of="real blocks",
    ),
)
def it_holds_sometimes(setup: Setup) -> Evidence:
    found = [*cases(setup, True), *cases(setup, False, met=False), *cases(setup, False, part="refuted")]
    return Evidence(
        cases=found,
        figure=Figure.largest("size", found),
        plots=[depths(setup), depths(setup, 3.0)],
        notes=["A note <b>of</b> 3.14.", "Another."],
        unmeasured=["On a GPU: there is none."],
    )


@claim("Z3", said=said("It is refuted.", THERE, HERE, asks="30 % or more", kind=Kind.TENDENCY))
def it_is_refuted(setup: Setup) -> Evidence:
    found = [
        Case(seed=seed, where="<b>everywhere</b>", value=float(seed), holds=seed == 1) for seed in setup.seeds
    ]
    return Evidence(cases=found, figure=Figure.largest("steps saved, in %", found))


@claim("Z4", said=said("It cannot be measured.", THERE, asks="10–20 % faster on a GPU"))
def it_is_not_measured(setup: Setup) -> Evidence:
    raise NotMeasured("needs a GPU <here>")


@claim("Z5", said=said("It breaks.", THERE))
def it_breaks(setup: Setup) -> Evidence:
    print("what a claim prints is no answer")
    raise RuntimeError("broken <on purpose>")


@claim("Z6", said=said("It kills its worker.", THERE))
def it_kills(setup: Setup) -> Evidence:
    os.kill(os.getpid(), signal.SIGKILL)
    return Evidence()


@claim("Z7", said=said("It takes for ever.", THERE))
def it_sleeps(setup: Setup) -> Evidence:
    time.sleep(600)
    return Evidence()


@claim("Z8", said=said("Nothing in it is finite.", THERE))
def it_is_not_finite(setup: Setup) -> Evidence:
    found = [
        Case(seed=seed, where="at 0", value=(math.nan, math.inf)[seed % 2], holds=False)
        for seed in setup.seeds
    ]
    line = Line("y", [1.0, 2.0, 3.0], [math.nan, 0.0, -math.inf], [math.nan] * 3, [math.inf] * 3)
    return Evidence(
        cases=found,
        figure=Figure("size", dict.fromkeys(setup.seeds, -math.inf)),
        plots=[
            Plot(
                "Nothing",
                "x",
                "y",
                [line, Line("a range", range(1, 4), (1.0, 2.0, 3.0))],
                "xy",
                {"none": math.nan},
            )
        ],
    )


IDS = [f"Z{number}" for number in range(1, 9)]
ODD: dict[str, Claim] = {id: CLAIMS[id] for id in IDS}
if not multiprocessing.current_process().name.startswith("Spawn"):  # a worker needs them, other tests do not
    for _id in IDS:
        del CLAIMS[_id]
