"""The anatomy tests' notation of a reading: "A.pre.layernorm F.pre.layernorm" a block, then the final norm.

A attention, X cross-attention, F feed-forward, O other; then the placement, the kind of norm, and in brackets
how the branch is joined where that is not a plain add.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from normscope.anatomy import Anatomy, Branch

KINDS = {"attention": "A", "cross-attention": "X", "feed-forward": "F", "other": "O"}


@dataclass(frozen=True)
class StackReading:
    """The expected reading of one stack; `norm`, `join` and the scales hold for branches with a placement.

    A branch written "F.pre.layernorm" has that norm; `by_kind` holds (join, α, β) of a kind's branches where
    they differ from the stack's.
    """

    blocks: tuple[str, ...]
    norm: str
    final_norm: bool
    join: str = "add"
    stream_scale: float | str | None = None
    branch_scale: float | str | None = None
    by_kind: Mapping[str, tuple[str, float | None, float | None]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The reading, one line per block, in the form of `lines_of`."""
        blocks = [" ".join(map(self._line, block.split())) for block in self.blocks]
        return [*blocks, f"final_norm={self.final_norm}"]

    def _line(self, branch: str) -> str:
        scales = self.by_kind.get(branch[0], (self.join, self.stream_scale, self.branch_scale))
        norm = "none" if branch.endswith(".none") else self.norm
        return (branch if branch.count(".") > 1 else f"{branch}.{norm}") + _scales(*scales)


def lines_of(anatomy: Anatomy) -> list[list[str]]:
    """An anatomy in the notation of the table: a list of lines for every stack."""
    return [
        [
            *(" ".join(_branch(branch) for branch in block.branches) for block in stack.blocks),
            f"final_norm={stack.final_norm is not None}",
        ]
        for stack in anatomy.stacks
    ]


def _branch(branch: Branch) -> str:
    scales = _scales(branch.join, branch.stream_scale, branch.branch_scale)
    return f"{KINDS[branch.kind]}.{branch.placement}.{branch.norm}{scales}"


def _scales(join: str, stream: float | str | None, branch: float | str | None) -> str:
    def number(scale: float | str) -> str:
        return f"{scale:.4g}" if isinstance(scale, float) else scale

    alpha = "" if stream is None else f" α={number(stream)}"
    beta = "" if branch is None else f" β={number(branch)}"
    return "" if join == "add" and not alpha and not beta else f"({join}{alpha}{beta})"


def stack(*blocks: str, norm: str = "layernorm", final: bool, **scales: Any) -> StackReading:
    """A stack of the given blocks."""
    return StackReading(blocks, norm, final, **scales)


def pre(norm: str = "layernorm", branches: str = "A F", n: int = 2, **scales: Any) -> tuple[StackReading]:
    """One Pre-LN stack of `n` equal blocks, with its final norm."""
    return (stack(*n * [_placed(branches, "pre")], norm=norm, final=True, **scales),)


def post(norm: str = "layernorm", branches: str = "A F", n: int = 2, **scales: Any) -> tuple[StackReading]:
    """One Post-LN stack of `n` equal blocks."""
    return (stack(*n * [_placed(branches, "post")], norm=norm, final=False, **scales),)


def placed(placement: str, norm: str, **scales: Any) -> tuple[StackReading]:
    """One stack of two blocks of attention and feed-forward, with a final norm."""
    return (stack(*2 * [_placed("A F", placement)], norm=norm, final=True, **scales),)


def two_stacks(placement: str, norm: str = "layernorm", **scales: Any) -> tuple[StackReading, StackReading]:
    """Encoder and decoder of two blocks each; final norms where they are Pre-LN."""
    final = placement != "post"
    encoder = stack(*2 * [_placed("A F", placement)], norm=norm, final=final, **scales)
    return encoder, replace(encoder, blocks=tuple(2 * [_placed("A X F", placement)]))


def _placed(branches: str, placement: str) -> str:
    return " ".join(f"{kind}.{placement}" for kind in branches.split())
