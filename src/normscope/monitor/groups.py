"""Groups of a model's parameters: the block that each lies in, and its kind."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from torch import nn

from normscope.anatomy import Anatomy
from normscope.probes.parameters import Parameters

OUTSIDE = "outside the blocks"
EMBEDDING, NORM, OTHER = "embedding", "norm", "other"


@dataclass(frozen=True)
class Groups:
    """The trained parameters of a model and the groups that their figures are pooled over.

    Attributes:
        parameters, names: in the model's order, each tensor once.
        blocks, kinds: names of the groups. Kinds are those of the branches ("attention", "feed-forward", …),
            "norm", "embedding" and "other".
        shares: [parameters] factor of each one's number in a sum; None for 1. See `sharded.py`.
        sizes: [parameters] entries of the whole ones where the parameters are shards; None for their own.
    """

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    blocks: tuple[str, ...]
    kinds: tuple[str, ...]
    _block_of: np.ndarray
    _kind_of: np.ndarray
    shares: np.ndarray | None = None
    sizes: np.ndarray | None = None

    def kind(self, number: int) -> str:
        """Kind of a parameter, by its number."""
        return self.kinds[self._kind_of[number]]

    def shared(self, squares: np.ndarray) -> np.ndarray:
        """One number for each parameter, times its share."""
        return squares if self.shares is None else squares * self.shares

    def by_block(self, squares: np.ndarray) -> np.ndarray:
        """Sums of one number for each parameter, by block. Not finite where one of them is not."""
        return _summed(self.shared(squares), self._block_of, len(self.blocks))

    def by_kind(self, squares: np.ndarray) -> np.ndarray:
        """The same by kind."""
        return _summed(self.shared(squares), self._kind_of, len(self.kinds))


def _summed(numbers: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(group, weights=numbers, minlength=count)


def groups_of(model: nn.Module, anatomy: Anatomy) -> Groups:
    """The groups of the parameters that require a gradient; a tied one is of the first group that has it."""
    known = Parameters(model, anatomy)
    trained = [p for p in known.all() if p.requires_grad]
    block_of: dict[int, str] = {}
    kind_of: dict[int, str] = {}
    gains = {norm.weight for branch in anatomy.branches for norm in branch.norms}
    gains |= {stack.final_norm.weight for stack in anatomy.stacks if stack.final_norm is not None}
    for block in anatomy.blocks:
        for parameter in known.of_block(block):
            block_of.setdefault(id(parameter), block.site)
        for branch in block.branches:
            inside = {projection.parameter for projection in branch.projections}
            begin = f"{branch.path}." if branch.path and branch.path != block.path else None
            for name, parameter in known.by_name.items():
                if name in inside or (begin is not None and name.startswith(begin)):
                    kind_of.setdefault(id(parameter), branch.kind)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    norms = {id(p) for name, p in known.by_name.items() if name in gains or _is_norms(name, gains)}
    for parameter in trained:
        key = id(parameter)
        if key in tables:
            kind_of[key] = EMBEDDING
        elif key in norms:
            kind_of[key] = NORM
        block_of.setdefault(key, OUTSIDE)
        kind_of.setdefault(key, OTHER)
    blocks = [block.site for block in anatomy.blocks if block.site in set(block_of.values())]
    return Groups(
        tuple(trained),
        tuple(known.names[id(p)] for p in trained),
        *_numbered(trained, block_of, [*dict.fromkeys(blocks), OUTSIDE], kind_of),
    )


def _is_norms(name: str, gains: set[str | None]) -> bool:
    """Whether a parameter is the bias of a norm whose gain is known."""
    path, _, own = name.rpartition(".")
    return own == "bias" and f"{path}.weight" in gains


def _numbered(
    trained: list[nn.Parameter], block_of: dict[int, str], blocks: list[str], kind_of: dict[int, str]
) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray, np.ndarray]:
    kinds: dict[str, int] = defaultdict(lambda: len(kinds))
    numbers = [kinds[kind_of[id(p)]] for p in trained]
    places = {site: number for number, site in enumerate(blocks)}
    return (
        tuple(blocks),
        tuple(kinds),
        np.array([places[block_of[id(p)]] for p in trained], dtype=np.intp),
        np.array(numbers, dtype=np.intp),
    )
