"""The result of a reading: stacks of blocks of branches, and the sites of their tensors."""

from dataclasses import dataclass
from typing import Any, Literal

Placement = Literal["pre", "post", "res-post", "peri", "none"]
Kind = Literal["attention", "cross-attention", "feed-forward", "other"]
Scale = float | Literal["learnt"] | None
"""A number, "learnt" (set by a parameter or an activation), or None without a scale."""
Reader = Literal["norm", "nothing", "weights"]
"""The reader of the size of a stack's last state: a norm that hides it, nothing at all, or weights."""


@dataclass(frozen=True)
class Site:
    """Name of one tensor of a forward, by which a later forward finds it again.

    An op is counted among the ops of its name that one call of the innermost module runs itself; ops of child
    modules do not count. So a mixture of experts that routes differently does not change other sites.

    Attributes:
        module: path of the innermost running module, wrappers stripped; "" is the root.
        call: which call of that module in this forward, 0 first.
        op: the ATen overload, "aten.add.Tensor".
        nth: which op of that name in that call, 0 first.
        output: which output of the op, 0 for most; -1 - i names the op's i-th tensor *input* instead.
    """

    module: str
    call: int
    op: str
    nth: int
    output: int = 0


@dataclass(frozen=True)
class Fused:
    """A tensor w that multiplies a term inside the sum, without a tensor of the product (addcmul, lerp).

    Attributes:
        site: site of w.
        how: form of the added term: w·F, F/w, or (1 − w)·F.
    """

    site: Site
    how: Literal["times", "over", "rest"]


@dataclass(frozen=True)
class Norm:
    """A normalisation found in the dataflow, as an op or written out.

    Attributes:
        kind: "layernorm", "rmsnorm", "l2norm", "batchnorm", "groupnorm", or a replacement of norms: "dyt",
            "derf", "seednorm", "bhyt".
        path: module that holds it, wrappers stripped (the enclosing module when it is written inline).
        input, output: the tensor before, and after γ and β.
        eps: the ε added inside the root, None where there is none; the floor in max(‖x‖, ε) does not count.
        weight: parameter name of γ, None without one.
        weight_offset: 1.0 where the factor is (1 + γ), as in Gemma, else 0.0.
    """

    kind: str
    path: str
    input: Site
    output: Site
    eps: float | None
    weight: str | None
    weight_offset: float = 0.0


@dataclass(frozen=True)
class Projection:
    """A parameterised matmul of a branch.

    Attributes:
        parameter: name of the weight, as in `named_parameters()` with wrappers stripped.
        roles: its outputs: ("q",), ("k",), ("v",), ("o",), ("up",), ("gate",), ("down",), or several when
            fused, ("q", "k", "v") in GPT-2; ("other",) where none fits.
        output: its output, with the features last.
        feature_axis: which axis of the weight counts the output features (0 for nn.Linear, 1 for Conv1D).
    """

    parameter: str
    roles: tuple[str, ...]
    output: Site
    feature_axis: int


@dataclass(frozen=True)
class AttentionSites:
    """The tensors of one attention: q (…, T, d_h), k, v as multiplied, logits and probabilities (…, T, S).

    Read under the math backend, so a fused SDPA appears as its matmuls and softmax.
    """

    query: Site
    key: Site
    value: Site
    logits: Site
    probabilities: Site


@dataclass(frozen=True)
class Branch:
    """One sublayer that reads the stream and is added back to it.

    Attributes:
        kind: attention, cross-attention, feed-forward or other.
        placement: position of its norms: pre, post, res-post, peri or none.
        norm: kind of those norms ("layernorm", "rmsnorm", …), "none" without.
        path: the innermost module that holds the branch's parameterised matmuls; where that is the block
            itself, the last of their modules. Unique in the anatomy together with `call`.
        call: which call of that module (a shared module is called more than once).
        join: "add", "scaled", "learnt", "gate", or "streams" where the branch is added to several.
        stream_scale, branch_scale: α and β of `α·x + β·F(x)`.
        scheme: a catalogue name where the dataflow of the branch or of its stack decides it, else None.
        entry: the stream as the branch reads it (before a branch_in norm); with several streams, the value
            computed from them (Hyper-Connections' A_mᵀH).
        output: the added term, after its own norms and scales except those in `fused`.
        sum: the result of the add; with several streams, the whole state (B, T, n, D), or the stream with a
            norm after it (ResiDual's and SiameseNorm's Post-LN one).
        norms: the norms in the slots: at the entry first, then output, then stream.
        fused: factors that the add applies to `output`; None where the term is no tensor of its own and the
            site is that of another tensor (addmm).
        projections, attention: used by the gradient and attention probes.
    """

    kind: Kind
    placement: Placement
    norm: str
    path: str
    call: int
    join: str
    stream_scale: Scale
    branch_scale: Scale
    scheme: str | None
    entry: Site
    output: Site
    sum: Site
    norms: tuple[Norm, ...] = ()
    fused: tuple[float | Fused, ...] | None = ()
    projections: tuple[Projection, ...] = ()
    attention: tuple[AttentionSites, ...] = ()

    @property
    def site(self) -> str:
        """Name of the branch in measurements and findings."""
        return at_call(self.path, self.call)

    def to_dict(self) -> dict[str, Any]:
        """The branch as plain data, for the report's JSON."""
        keys = ("kind", "placement", "norm", "path", "join", "stream_scale", "branch_scale", "scheme")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Block:
    """The smallest repeated module call that holds the adds.

    `entry` is the stream that the block receives, `exit` the one that it returns (after a stream norm in
    Post-LN). With several streams it is the one of the branches' `sum`, so the block's Jacobian keeps its
    skip.
    """

    path: str
    call: int
    branches: tuple[Branch, ...]
    entry: Site
    exit: Site

    @property
    def site(self) -> str:
        """Name of the block in measurements and findings."""
        return at_call(self.path, self.call)

    def to_dict(self) -> dict[str, Any]:
        """The block as plain data, for the report's JSON."""
        return {"path": self.path, "call": self.call, "branches": [b.to_dict() for b in self.branches]}


@dataclass(frozen=True)
class LongSkip:
    """An earlier point of the stream, added again between two blocks or after the last: x ← α·x + β·x_i.

    Attributes:
        into: name of the block that reads the sum, "" after the last.
        source: the earlier point, x_i.
        sum: the result.
        stream_scale, skip_scale: α and β.
    """

    into: str
    source: Site
    sum: Site
    stream_scale: Scale
    skip_scale: Scale

    def to_dict(self) -> dict[str, Any]:
        """The long skip as plain data, for the report's JSON."""
        return {"into": self.into, "stream_scale": self.stream_scale, "skip_scale": self.skip_scale}


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder: blocks in order, and the norm after the last of them.

    Attributes:
        hidden: the output of the stack (after the final norm where there is one).
        long_skips: the sums without a branch, in order.
        complete: whether its whole residual stream was read. Otherwise `Anatomy.unread` lists the gaps, and
            `final_norm` and the number of blocks describe the part that was read.
        read_by: what reads the size of the last state; "norm" also where the norm comes after linear maps.
    """

    name: str
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    hidden: Site
    long_skips: tuple[LongSkip, ...] = ()
    complete: bool = True
    read_by: Reader = "weights"

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches of all blocks, in order."""
        return tuple(branch for block in self.blocks for branch in block.branches)

    def to_dict(self) -> dict[str, Any]:
        """The stack as plain data, for the report's JSON."""
        return {
            "name": self.name,
            "blocks": [b.to_dict() for b in self.blocks],
            "final_norm": self.final_norm is not None,
            "long_skips": [skip.to_dict() for skip in self.long_skips],
            "complete": self.complete,
        }


@dataclass(frozen=True)
class Anatomy:
    """The reading of a whole model.

    Attributes:
        stacks: the stacks, encoder before decoder.
        unread: messages on parts that could not be read; a reading never guesses.
        activation_bytes: bytes written by one recorded forward, an upper bound of a training step's
            activations.
    """

    stacks: tuple[Stack, ...]
    unread: tuple[str, ...] = ()
    activation_bytes: int = 0

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks of all stacks, in order."""
        return tuple(block for stack in self.stacks for block in stack.blocks)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches of all blocks, in order."""
        return tuple(branch for stack in self.stacks for branch in stack.branches)

    @property
    def final_norm(self) -> bool:
        """True where every stack ends in a norm."""
        return bool(self.stacks) and all(stack.final_norm is not None for stack in self.stacks)

    def to_dict(self) -> dict[str, Any]:
        """The reading as plain data, for the report's JSON."""
        return {
            "stacks": [stack.to_dict() for stack in self.stacks],
            "blocks": [block.to_dict() for block in self.blocks],
            "final_norm": self.final_norm,
            "unread": list(self.unread),
        }

    def __repr__(self) -> str:
        """One line per stack."""
        from normscope.anatomy.rows import headline  # it reads Stack

        unread = [f"{len(self.unread)} unread"] if self.unread else []
        return f"<Anatomy: {'; '.join([*map(headline, self.stacks), *unread]) or 'no residual stream'}>"

    def _repr_html_(self) -> str:
        """The reading in a notebook cell."""
        from normscope.anatomy.notebook import anatomy_html  # it reads Anatomy: imported where it is needed

        return anatomy_html(self)


def at_call(path: str, call: int) -> str:
    """`path`, followed by `@call` from the second call on (ALBERT runs one module twelve times)."""
    return path if call == 0 else f"{path}@{call}"
