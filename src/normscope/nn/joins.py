"""Joins of a branch with the stream.

`Join` is the type; `Scaled`, the plain sum, is here, the modules of the others beside their schemes.

Shapes: B batch, T tokens, D width. A State is what travels between sublayers: the stream (B, T, D), or, where
a scheme keeps several, a tuple of such or one tensor (B, T, streams, D).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.placement import Rule, Where, one, zero

State = Tensor | tuple[Tensor, ...]
Update = Callable[[Tensor], Tensor]
"""The branch with its own norms, F of the formulas: (B, T, D) → (B, T, D)."""
Norm = Callable[[Tensor], Tensor]
"""The norm on the stream, the identity where the placement has none."""


@dataclass(frozen=True)
class Site:
    """Data that a join may need to build its module: its place, D, and how norms are made."""

    where: Where
    width: int
    make_norm: Callable[[int], nn.Module]


class Join(ABC):
    """Join of a branch with the stream, as data; `build` makes the module.

    A join with several streams also defines how the embedding becomes the first state (`enter`) and how the
    last state becomes what the head reads (`leave`).
    """

    kind: str
    """One word for the catalogue: "add", "none", "scaled", "learnt", "gate", "streams"."""

    @abstractmethod
    def build(self, site: Site) -> nn.Module:
        """A module whose `forward(state, update, norm)` gives the next state."""

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """The first state of a stack, from what the embedding gives."""
        return entry_norm(x_BTD)

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """(B, T, D) of the last state, through the final norm."""
        return final_norm(one_stream(state))


@dataclass(frozen=True)
class Built(Join):
    """A join of one stream, whose module `make(site)` gives."""

    kind: str
    make: Callable[[Site], nn.Module]

    def build(self, site: Site) -> nn.Module:
        """The module."""
        return self.make(site)


@dataclass(frozen=True)
class TwoStreams(Built):
    """A join of two streams (B, T, D), which both start at the embedding; the head reads x + N(y).

    Attributes:
        normed: whether the entry norm is on the second one too.
    """

    normed: bool

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """(x, y) = (N(x_0), N(x_0) or x_0)."""
        first_BTD = entry_norm(x_BTD)
        return first_BTD, first_BTD if self.normed else x_BTD

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """x + N(y)."""
        x_BTD, y_BTD = two_streams(state)
        return x_BTD + final_norm(y_BTD)


@dataclass(frozen=True)
class Copies(Join):
    """A join of n streams in one state (B, T, n, D), at first n copies of the embedding.

    Attributes:
        make: maker of the module, from its site and n.
        mean: whether the head reads the mean of the streams, not their sum.
        num_streams: n.
    """

    make: Callable[[Site, int], nn.Module]
    mean: bool = False
    num_streams: int = 4
    kind = "streams"

    def build(self, site: Site) -> nn.Module:
        """The module."""
        return self.make(site, self.num_streams)

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """n copies."""
        return entry_norm(x_BTD).unsqueeze(-2).expand(-1, -1, self.num_streams, -1)

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """The norm of the streams' sum or mean."""
        streams = one_stream(state)
        return final_norm(streams.mean(dim=-2) if self.mean else streams.sum(dim=-2))


def one_stream(state: State) -> Tensor:
    """The stream of a state that has only one; a TypeError tells that a join forgot its `leave`."""
    if not isinstance(state, Tensor):
        raise TypeError(f"one stream expected, got {len(state)}")
    return state


def two_streams(state: State) -> tuple[Tensor, Tensor]:
    """Both streams of a state that has two.

    Raises:
        UsageError: a single tensor, which a batch of two would unpack into its sequences.
    """
    if isinstance(state, Tensor):
        raise _not_entered(state)
    first, second = state
    return first, second


def streams_in_one(state: State, num_streams: int) -> Tensor:
    """(B, T, n, D) of a state that is one tensor of n streams; UsageError for the stream alone."""
    stacked = one_stream(state)
    if stacked.dim() != 4 or stacked.shape[2] != num_streams:
        raise _not_entered(stacked)
    return stacked


def _not_entered(state: Tensor) -> UsageError:
    return UsageError(
        f"a stream of shape {tuple(state.shape)} for a scheme whose state is more than that",
        "the state of the sublayer before, at first scheme.join.enter(x, entry_norm)",
        "end with scheme.join.leave(state, final_norm)",
    )


@dataclass(frozen=True)
class Scaled(Join):
    """x ← N(stream_scale·x + branch_scale·F(x)); both 1 unless a rule says otherwise.

    `stream_scale` 0 is a plain stack without residual. `entry_scale` multiplies what the branch reads after
    its norm (LayerNorm Scaling's 1/√l).
    """

    stream_scale: Rule = one
    branch_scale: Rule = one

    @property
    def kind(self) -> str:  # type: ignore[override]  # read-only here: it follows from the rules
        """ "add" where neither side is scaled, "none" where the stream does not come through."""
        if self.stream_scale is zero:
            return "none"
        return "add" if self.stream_scale is one and self.branch_scale is one else "scaled"

    def build(self, site: Site) -> nn.Module:
        """The module, with its two numbers settled."""
        return WeightedSum(self.stream_scale(site.where), self.branch_scale(site.where))


class WeightedSum(nn.Module):
    """N(α·x + β·F(x)) with fixed α and β."""

    def __init__(self, stream_scale: float, branch_scale: float) -> None:
        super().__init__()
        self.stream_scale, self.branch_scale = stream_scale, branch_scale

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        f_BTD = update(x_BTD)
        if self.stream_scale == 0:
            return norm(scaled(f_BTD, self.branch_scale))
        if self.stream_scale == 1:
            if self.branch_scale == 1:
                return norm(x_BTD + f_BTD)
            return norm(torch.add(x_BTD, f_BTD, alpha=self.branch_scale))
        return norm(torch.add(scaled(f_BTD, self.branch_scale), x_BTD, alpha=self.stream_scale))


def scaled(x: Tensor, scale: float) -> Tensor:
    """scale·x, without the multiplication by 1."""
    return x if scale == 1 else scale * x
