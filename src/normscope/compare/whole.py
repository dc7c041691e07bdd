"""Agreement of two models as a whole: in their outputs and in the gradients of all weights.

The streams are compared at places that the reading of each model names, and a model may be written so that
these are not the same tensors. Where A's weights in B give the same outputs and gradients of the same size,
the two compute the same function for almost all weights (both are analytic in them), wherever their insides
are said to be.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from normscope.compare.holdings import Holdings
from normscope.compare.keys import OUTPUT, WEIGHT
from normscope.compare.parting import FLOOR, Walked
from normscope.compare.types import Step, Weights


def uses_same_weights(steps_a: Sequence[Step], steps_b: Sequence[Step], weights: Weights) -> bool:
    """Whether each weight that one side uses has a partner, and none had to be filled in.

    A weight is used where the loss has a gradient in it.
    """
    used_a, used_b = _gradients(steps_a), _gradients(steps_b)
    return not (used_a.keys() & set(weights.only_a) or used_b.keys() & set(weights.only_b) or weights.filled)


def has_as_many(steps_a: Sequence[Step], steps_b: Sequence[Step]) -> bool:
    """Whether the weights that are used have as many elements on both sides: none is tied on one alone."""
    sizes = [sum(each.numel() for each in _gradients(steps).values()) for steps in (steps_a, steps_b)]
    return sizes[0] == sizes[1]


def parts_at_end(found: Walked) -> bool:
    """Whether the outputs differ, or cannot be compared."""
    ends = [each for each in found.pairs if each.key[3] == OUTPUT]
    return not ends or ends[0].relative is None or ends[0].parts


def agrees(
    found: Walked,
    steps_a: Sequence[Step],
    steps_b: Sequence[Step],
    weights: Weights,
    a: Holdings,
    b: Holdings,
) -> bool:
    """Whether the outputs agree, and the gradients of all weights in size.

    Args:
        found: the two walks, compared; the rounding that it measured decides here too.
        weights: A's weights in B's layout, with which both walked.
        a, b: the holdings of both sides.
    """
    if parts_at_end(found) or not uses_same_weights(steps_a, steps_b, weights):
        return False
    tolerance = _tolerance(found)
    sizes = _sizes(_gradients(steps_a), _gradients(steps_b), weights, a, b)
    largest = max((max(pair) for pair in sizes), default=0.0)
    return all(abs(x - y) <= tolerance * largest for x, y in sizes)


def without_partings(found: Walked) -> Walked:
    """The walks without the tensors that part: for two that agree as a whole, these are not the same ones."""
    pairs = (
        replace(each, relative=None, gradient=None) if each.parts or each.gradient_parts else each
        for each in found.pairs
    )
    return replace(found, pairs=tuple(pairs))


def _tolerance(found: Walked) -> float:
    """Relative difference of two gradients that rounding explains."""
    known = (each.gradient_tolerance for each in found.pairs)
    return max((each for each in known if math.isfinite(each)), default=FLOOR)


def _gradients(steps: Sequence[Step]) -> dict[str, Tensor]:
    return {s.site: s.gradient for s in steps if s.key[3].startswith(WEIGHT) and s.gradient is not None}


def cut_weights(
    found: Walked,
    steps_a: Sequence[Step],
    steps_b: Sequence[Step],
    weights: Weights,
    a: Holdings,
    b: Holdings,
) -> list[tuple[set[str], set[str], str]]:
    """Weights of A, those of B that are made of them, and the side in which alone their gradient is cut.

    The arguments are those of `agrees`. A weight that is frozen, or a buffer, has no gradient to cut.
    """
    tolerance = _tolerance(found)
    grads = _gradients(steps_a), _gradients(steps_b)
    learnt = [{s.site for s in steps if s.key[3].startswith(WEIGHT)} for steps in (steps_a, steps_b)]
    pairs = list(_partners(weights, a, b))
    sizes = [(_norm(grads[0], ours), _norm(grads[1], theirs)) for ours, theirs in pairs]
    largest = max((max(pair) for pair in sizes), default=0.0)
    cuts = []
    for (ours, theirs), (x, y) in zip(pairs, sizes, strict=True):
        is_cut = (x == 0.0) != (y == 0.0) and max(x, y) > tolerance * largest
        if is_cut and ours <= learnt[0] and theirs <= learnt[1]:
            cuts.append((ours, theirs, "A" if x == 0.0 else "B"))
    return cuts


def _sizes(
    grads_a: Mapping[str, Tensor], grads_b: Mapping[str, Tensor], weights: Weights, a: Holdings, b: Holdings
) -> list[tuple[float, float]]:
    """Norms of the gradients in A and in B, of each set of weights that are made of each other."""
    partners = _partners(weights, a, b)
    return [(_norm(grads_a, ours), _norm(grads_b, theirs)) for ours, theirs in partners]


def _partners(weights: Weights, a: Holdings, b: Holdings) -> Iterator[tuple[set[str], set[str]]]:
    """Each set of weights that are made of each other: their names in A and in B.

    Sets with a computed weight are left out: what is put in its place has no gradient in its parameters.
    """
    made_a, made_b = ({held.name for held in side.held if held.made_of} for side in (a, b))
    inside = {
        name for held in b.held if held.made_of and held.name in weights.made_from for name in held.made_of
    }
    found: list[tuple[set[str], set[str]]] = []
    for name, (sources, _) in weights.made_from.items():
        joined = (set(sources), {name})
        for other in [each for each in found if each[0] & joined[0]]:
            found.remove(other)
            joined = (joined[0] | other[0], joined[1] | other[1])
        found.append(joined)
    return ((ours, theirs) for ours, theirs in found if not (ours & made_a or theirs & (made_b | inside)))


def _norm(gradients: Mapping[str, Tensor], names: set[str]) -> float:
    return math.sqrt(sum(float((gradients[name] ** 2).sum()) for name in names if name in gradients))
