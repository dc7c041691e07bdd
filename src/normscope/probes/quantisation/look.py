"""One look at a model: the tensors at every place, and the harm of rounding some of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from normscope.anatomy import Anatomy, Site
from normscope.probes.norms import norms_of
from normscope.probes.parameters import Parameters
from normscope.probes.quantisation.harm import Harm, Seen, harm, see
from normscope.probes.quantisation.places import Place, places_of
from normscope.probes.quantisation.rounding import Rounding, rounded
from normscope.probes.rows import NOT_FINITE, UNDEFINED, at, captured_without_graph
from normscope.probes.sums import energy, exact, is_finite, largest
from normscope.subjects import Subject

BEYOND = "its values are beyond float32, in which torchao rounds"
_FLOAT32_MAX = 3.4e38

Tensors = list[tuple[Tensor, int]]
"""Tensors of a place, each with the axis of its channels."""


@dataclass(frozen=True)
class Look:
    """A model, its reading and the tensors of one forward.

    Attributes:
        parameters: floating-point parameters by name.
        captured: tensors of the forward, by site.
        places: everything that could be rounded.
    """

    subject: Subject
    anatomy: Anatomy
    parameters: Mapping[str, Tensor]
    captured: Mapping[Site, Tensor]
    places: Sequence[Place]

    @classmethod
    def at(cls, subject: Subject, anatomy: Anatomy) -> "Look":
        """Look at a model in one forward of its fixed batch."""
        parameters = Parameters(subject.model, anatomy).by_name
        places = places_of(anatomy, parameters)
        sites = [place.where for place in places if place.where is not None]
        sites += [norm.input for norm in norms_of(anatomy).values()]
        return cls(subject, anatomy, parameters, captured_without_graph(subject, sites), places)

    @cached_property
    def before(self) -> Seen | str:
        """The forward as it is, or why nothing can be compared with it."""
        try:
            seen = see(self.subject, self.parameters)
        except ValueError as error:
            return str(error)
        if not is_finite(seen.output):
            return NOT_FINITE
        return seen if energy(seen.output) else UNDEFINED

    def tensors(self, place: Place) -> Tensors | str:
        """The place's tensors; or why it cannot be rounded."""
        if place.gap:
            return place.gap
        held = [(self.parameters[name].detach(), axis) for name, axis in place.weights]
        if place.where is not None:
            found = at(self.captured, place.where)
            if isinstance(found, str):
                return found
            held = [(found, -1)]
        reasons = (unfit(tensor) for tensor, _ in held)
        return next(filter(None, reasons), held)

    @cached_property
    def fit(self) -> list[Place]:
        """Places that can be rounded."""
        return [place for place in self.places if not isinstance(self.tensors(place), str)]

    def gaps(self, part: str) -> str:
        """The reasons why places of a part cannot be rounded."""
        found = [self.tensors(place) for place in self.places if place.part == part]
        reasons = dict.fromkeys(reason for reason in found if isinstance(reason, str))
        return "; ".join(reasons) or "the model has none"

    def harm(self, places: Sequence[Place], rounding: Rounding) -> Harm:
        """Harm of rounding these places together."""
        assert isinstance(self.before, Seen), "there is an output to compare with"
        return harm(self.before, see(self.subject, self.parameters, places, rounding))


def once(places: Sequence[Place]) -> list[Place]:
    """The places, each tensor once: in Post-LN a block's exit is the output of its norm."""
    return list({place.key: place for place in reversed(places)}.values())[::-1]


def unfit(tensor: Tensor) -> str:
    """Why a tensor cannot be rounded; "" where it can."""
    if not tensor.is_floating_point():
        return f"its values are {tensor.dtype}, not floating point"
    if not tensor.numel():
        return "it has no elements"
    if not is_finite(tensor):
        return NOT_FINITE
    return BEYOND if largest(tensor) > _FLOAT32_MAX else ""


def sqnr(tensors: Tensors, rounding: Rounding) -> float | None:
    """Signal-to-quantisation-noise ratio in dB, of all tensors together; None where all values are zero.

    inf where the rounded tensors equal the tensors.
    """
    signal = sum(energy(tensor) for tensor, _ in tensors)
    noise = sum(energy(exact(rounded(x, rounding, axis)) - exact(x)) for x, axis in tensors)
    if not signal:
        return None
    return 10 * math.log10(signal / noise) if noise else math.inf
