"""Joins of a branch with the stream.

`Join` is the base class. `Scaled`, the plain sum, is here; the other joins are next to their schemes.

Shapes: B batch, T tokens, D width. A State is passed from sublayer to sublayer: the stream (B, T, D), or, for
schemes with several streams, a tuple of them or one tensor (B, T, streams, D).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.fused import summed_for
from normscope.nn.placement import Rule, Where, one, zero

State = Tensor | tuple[Tensor, ...]
Update = Callable[[Tensor], Tensor]
"""The branch with its own norms, F in the formulas: (B, T, D) → (B, T, D)."""
Norm = Callable[[Tensor], Tensor]
"""The norm on the stream; the identity if the placement has none."""


@dataclass(frozen=True)
class Site:
    """Inputs for building a join's module: its place, D, and a maker of norms."""

    where: Where
    width: int
    make_norm: Callable[[int], nn.Module]


class Join(ABC):
    """Description of how a branch joins the stream; `build` makes the module.

    A join with several streams also defines how the embedding becomes the first state (`enter`) and how the
    last state becomes the input of the head (`leave`).
    """

    kind: str
    """One word for the catalogue: "add", "none", "scaled", "learnt", "gate", "streams"."""

    @abstractmethod
    def build(self, site: Site) -> nn.Module:
        """Make a module whose `forward(state, update, norm)` returns the next state."""

    def enter(self, x_BTD: Tensor, entry_norm: Norm) -> State:
        """The first state of a stack, from the embedding's output."""
        return entry_norm(x_BTD)

    def leave(self, state: State, final_norm: Norm) -> Tensor:
        """The last state after the final norm, (B, T, D)."""
        return final_norm(one_stream(state))


@dataclass(frozen=True)
class Built(Join):
    """A join of one stream, whose module is `make(site)`."""

    kind: str
    make: Callable[[Site], nn.Module]

    def build(self, site: Site) -> nn.Module:
        """The module."""
        return self.make(site)


@dataclass(frozen=True)
class TwoStreams(Built):
    """A join of two streams x and y (B, T, D), which both start at the embedding; the head reads x + N(y).

    Attributes:
        normed: whether the entry norm also applies to y.
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
    """A join of n streams in one state (B, T, n, D), which starts as n copies of the embedding.

    Attributes:
        make: maker of the module, called with its site and n.
        mean: whether the head reads the mean of the streams instead of their sum.
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
    """The stream of a state that has only one; TypeError if a join with several lacks its `leave`."""
    if not isinstance(state, Tensor):
        raise TypeError(f"one stream expected, got {len(state)}")
    return state


def two_streams(state: State) -> tuple[Tensor, Tensor]:
    """Both streams of a state that has two.

    Raises:
        UsageError: the state is a single tensor; with a batch of two it would unpack into sequences.
    """
    first, second = several_streams(state)
    return first, second


def several_streams(state: State) -> tuple[Tensor, ...]:
    """The tensors of a state that is a tuple of them; UsageError for the stream alone."""
    if isinstance(state, Tensor):
        raise _not_entered(state)
    return state


def streams_in_one(state: State, num_streams: int) -> Tensor:
    """(B, T, n, D) of a state that is one tensor of n streams; UsageError for the stream alone."""
    stacked = one_stream(state)
    if stacked.dim() != 4 or stacked.shape[2] != num_streams:
        raise _not_entered(stacked)
    return stacked


def _not_entered(state: Tensor) -> UsageError:
    return UsageError(
        f"a stream of shape {tuple(state.shape)} for a scheme with several streams",
        "the state that the sublayer before returned, at first scheme.join.enter(x, entry_norm)",
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
        """ "add" if neither side is scaled, "none" if the stream is dropped, else "scaled"."""
        if self.stream_scale is zero:
            return "none"
        return "add" if self.stream_scale is one and self.branch_scale is one else "scaled"

    def build(self, site: Site) -> nn.Module:
        """The module, with both scales computed for its place."""
        return WeightedSum(self.stream_scale(site.where), self.branch_scale(site.where))


class WeightedSum(nn.Module):
    """N(α·x + β·F(x)) with fixed α and β."""

    def __init__(self, stream_scale: float, branch_scale: float) -> None:
        super().__init__()
        self.stream_scale, self.branch_scale = stream_scale, branch_scale
        # The norm that reads the sum, if both are fused. A list, so that it is no child of this module.
        self.read_by: list[nn.Module] = []

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        f_BTD = update(x_BTD)
        if self.read_by and not torch.compiler.is_compiling():  # the compiler fuses by itself
            add = scaled(f_BTD, self.branch_scale), self.stream_scale
            return norm(summed_for(self.read_by[0], x_BTD, *add))
        if self.stream_scale == 0:
            return norm(scaled(f_BTD, self.branch_scale))
        if self.stream_scale == 1:
            if self.branch_scale == 1:
                return norm(x_BTD + f_BTD)
            return norm(torch.add(x_BTD, f_BTD, alpha=self.branch_scale))
        return norm(torch.add(scaled(f_BTD, self.branch_scale), x_BTD, alpha=self.stream_scale))


def scaled(x: Tensor, scale: float) -> Tensor:
    """scale·x; x itself if `scale` is 1."""
    return x if scale == 1 else scale * x
