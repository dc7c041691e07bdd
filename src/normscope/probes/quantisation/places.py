"""Places that can be rounded: weights of a branch, and tensors of the stream, of norms and of branches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from normscope.anatomy import Anatomy, Branch, Site
from normscope.probes.norms import norms_of

PARTS = ("weights", "stream", "norm", "branch")

_LEAF = "it is an input of the model, which no op of the model makes"
_NO_WEIGHTS = "no floating-point weight of a matmul was read in this branch"
_FUSED = "one op computes and adds the term (addmm): it is no tensor of its own"


@dataclass(frozen=True)
class Place:
    """One thing to round.

    Attributes:
        part: "weights" (the matmuls of a branch, together), "stream" (a block's entry or exit), "norm" (the
            output of a norm, after γ and β) or "branch" (the term that a branch adds).
        site: its name in measurements.
        where: the site of an activation; None for weights.
        weights: names of the parameters of a branch's matmuls, each with the axis of its output features.
        gap: why it cannot be rounded; "" where it can.
    """

    part: str
    site: str
    where: Site | None = None
    weights: tuple[tuple[str, int], ...] = ()
    gap: str = ""

    @property
    def key(self) -> object:
        """Equal for places that are one tensor: Post-LN's stream is its norm's output."""
        return self.where or self.weights or (self.part, self.site)

    @property
    def name(self) -> str:
        """The place in words."""
        return f"{self.part} {self.site}"


def places_of(anatomy: Anatomy, parameters: Mapping[str, Tensor]) -> list[Place]:
    """All places, by part, each part in the order of the forward.

    Args:
        anatomy: the reading.
        parameters: the floating-point parameters by name.
    """
    places = [*_weights(anatomy, parameters)]
    for stack in anatomy.stacks:
        places.append(_activation("stream", f"{stack.name}.input", stack.blocks[0].entry))
        places += [_activation("stream", block.site, block.exit) for block in stack.blocks]
    places += [_activation("norm", site, norm.output) for site, norm in norms_of(anatomy).items()]
    for branch in anatomy.branches:
        gap = _FUSED if branch.fused is None else ""
        places.append(Place("branch", branch.site, gap=gap) if gap else _term(branch))
    return places


def _weights(anatomy: Anatomy, parameters: Mapping[str, Tensor]) -> Iterator[Place]:
    first: dict[tuple[tuple[str, int], ...], str] = {}
    for branch in anatomy.branches:
        named = {p.parameter: p.feature_axis for p in branch.projections if p.parameter in parameters}
        weights = tuple((name, axis) for name, axis in named.items() if axis < parameters[name].ndim)
        if not weights:
            yield Place("weights", branch.site, gap=_NO_WEIGHTS)
        elif weights in first:
            yield Place("weights", branch.site, gap=f"they are the weights of {first[weights]}")
        else:
            first[weights] = branch.site
            yield Place("weights", branch.site, weights=weights)


def _term(branch: Branch) -> Place:
    return _activation("branch", branch.site, branch.output)


def _activation(part: str, site: str, where: Site) -> Place:
    return Place(part, site, where) if where.output >= 0 else Place(part, site, gap=_LEAF)
