"""Harm of rounding each place alone: its estimate, its measurement where there is one, and its rank."""

import math
from collections.abc import Iterator, Sequence

from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.next_step import NO_LOSS
from normscope.probes.quantisation.estimate import BACKWARDS, Estimates, estimates
from normscope.probes.quantisation.look import Look, once
from normscope.probes.quantisation.places import Place
from normscope.probes.quantisation.ranking import MEASURED, Ranked, ranking
from normscope.probes.quantisation.rounding import Rounding
from normscope.subjects.memory import is_out_of_memory

STATS = ("estimate", "harm", "loss-change", "rank")
FIRST_ORDER = f"first order, {BACKWARDS} backwards; errors of different tokens are taken as uncorrelated"
NOT_AMONG = f"not among the first {MEASURED} by the estimate; --budget deep measures every place"
NO_GRADIENT = "no gradient of the output reaches it"


def find_estimates(look: Look, roundings: Sequence[Rounding]) -> Estimates:
    """The estimates; none where a backward fails, and then the ranking measures every place."""
    if isinstance(look.before, str):
        return {}
    try:
        return estimates(look.subject, look.parameters, once(look.fit), roundings)
    except (RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        return {}


def alone_rows(
    look: Look, rounding: Rounding, found: Estimates, most: int | None = MEASURED
) -> Iterator[Measurement]:
    """Estimate, harm, change of the loss and rank of every place."""
    order = {} if isinstance(look.before, str) else _order(look, rounding, found, most)
    for place in look.places:
        tensors = look.tensors(place)
        reason = tensors if isinstance(tensors, str) else look.before
        if isinstance(reason, str):
            yield from (not_measured(_quantity(place, rounding, stat), place.site, reason) for stat in STATS)
        else:
            yield from _ranked_rows(place, rounding, *order[place.key])


def _order(
    look: Look, rounding: Rounding, found: Estimates, most: int | None
) -> dict[object, tuple[int, Ranked]]:
    ranks = ranking(once(look.fit), rounding, found, lambda place: look.harm([place], rounding), most)
    return {ranked.place.key: (rank, ranked) for rank, ranked in enumerate(ranks, start=1)}


def _quantity(place: Place, rounding: Rounding, stat: str) -> str:
    return f"quantisation/{place.part}-{rounding.name}-{stat}"


def _ranked_rows(place: Place, rounding: Rounding, rank: int, ranked: Ranked) -> Iterator[Measurement]:
    estimate, harm, loss, rank_ = (_quantity(place, rounding, stat) for stat in STATS)
    if ranked.estimate is None:
        yield not_measured(estimate, place.site, NO_GRADIENT)
    else:
        yield Measurement(estimate, place.site, ranked.estimate, how=FIRST_ORDER)
    if ranked.harm is None:
        yield not_measured(harm, place.site, NOT_AMONG)
        yield not_measured(loss, place.site, NOT_AMONG)
    else:
        how = EXACT if math.isfinite(ranked.harm.change) else "exact; the output is not finite"
        yield Measurement(harm, place.site, ranked.harm.change, how=how)
        if ranked.harm.loss is None:
            yield not_measured(loss, place.site, NO_LOSS)
        else:
            yield Measurement(loss, place.site, ranked.harm.loss)
    how = "by the estimate" if ranked.harm is None else "by the measured harm"
    yield Measurement(rank_, place.site, float(rank), how=how)
