"""Harm of rounding all places of a part together: what storing the stream, or the weights, so would cost."""

from collections.abc import Iterator

from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.quantisation.look import Look, once
from normscope.probes.quantisation.places import PARTS
from normscope.probes.quantisation.rounding import Rounding


def together_rows(
    look: Look, rounding: Rounding, prefix: str = "", how: str = EXACT
) -> Iterator[Measurement]:
    """The harm of each part, one forward for each."""
    for part in PARTS:
        quantity = f"quantisation/{prefix}{part}-{rounding.name}-together"
        places = once([place for place in look.fit if place.part == part])
        if isinstance(look.before, str):
            yield not_measured(quantity, "", look.before)
        elif not places:
            yield not_measured(quantity, "", f"no place of this part can be rounded: {look.gaps(part)}")
        else:
            yield Measurement(quantity, "", look.harm(places, rounding).change, how=how)
