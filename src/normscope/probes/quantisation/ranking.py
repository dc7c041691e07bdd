"""Rank places by the harm of rounding each alone.

The first-order estimate orders all places. The first few of that order are then rounded, one forward each,
and ordered among themselves by the measured harm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normscope.probes.quantisation.estimate import Estimates
from normscope.probes.quantisation.harm import Harm
from normscope.probes.quantisation.places import Place
from normscope.probes.quantisation.rounding import Rounding

MEASURED = 5
"""Places of each ranking whose harm is measured; `--budget deep` measures all."""


@dataclass(frozen=True)
class Ranked:
    """A place in a ranking, with its harm where that was measured."""

    place: Place
    estimate: float | None
    harm: Harm | None


def ranking(
    places: Sequence[Place],
    rounding: Rounding,
    found: Estimates,
    measure: Callable[[Place], Harm],
    most: int | None = MEASURED,
) -> list[Ranked]:
    """The places, the most harmful first; `most` of them are measured, all where it is None.

    A place without an estimate is measured too, because its rank would be a guess.
    """
    known = [p for p in places if (p.key, rounding) in found]
    known.sort(key=lambda place: -found[place.key, rounding])
    cut = len(known) if most is None else most
    chosen = known[:cut] + [p for p in places if (p.key, rounding) not in found]
    measured = [Ranked(p, found.get((p.key, rounding)), measure(p)) for p in chosen]
    measured.sort(key=lambda ranked: -ranked.harm.change if ranked.harm else 0.0)
    return measured + [Ranked(p, found[p.key, rounding], None) for p in known[cut:]]
