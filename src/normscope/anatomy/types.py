"""The result of a reading: stacks of blocks of branches, and the sites of their tensors."""

from dataclasses import dataclass
from typing import Any, Literal

Placement = Literal["pre", "post", "res-post", "peri", "none"]
Kind = Literal["attention", "cross-attention", "feed-forward", "other"]
Scale = float | Literal["learnt"] | None
"""A number, "learnt" (a parameter or an activation sets it), or None where nothing scales."""


@dataclass(frozen=True)
class Site:
    """One tensor of a forward, named so that a later forward finds it again.

    An op is counted among the ops of its name that one call of the innermost module runs itself; ops of child
    modules do not count. So a mixture of experts that routes differently does not shift its neighbours.

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
    """A tensor w that a term meets on its way into the sum, with no tensor of the product (addcmul, lerp).

    Attributes:
        site: where w is.
        how: the term comes in as w·F, F/w, or (1 − w)·F.
    """

    site: Site
    how: Literal["times", "over", "rest"]


@dataclass(frozen=True)
class Norm:
    """A normalisation found in the dataflow, whatever it is made of.

    Attributes:
        kind: "layernorm", "rmsnorm", "l2norm", "batchnorm", "groupnorm", or a replacement of norms: "dyt",
            "derf".
        path: module that holds it, wrappers stripped (the enclosing module when it is written inline).
        input, output: the tensor before, and after γ and β.
        eps: the ε added inside the root, None where none was seen; the floor of max(‖x‖, ε) is none.
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
        roles: what it makes: ("q",), ("k",), ("v",), ("o",), ("up",), ("gate",), ("down",), or several when
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
    """The tensors of one attention: q (…, T, d_h), k, v as they meet, logits and probabilities (…, T, S).

    Read under the math backend, so a fused SDPA is here as its matmuls and softmax.
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
        kind: what it does.
        placement: where its norms sit (design: pre, post, res-post, peri, none).
        norm: kind of those norms ("layernorm", "rmsnorm", …), "none" without.
        path: the innermost module that holds the branch's parameterised matmuls; where that is the block
            itself, the last of their modules. Unique in the anatomy together with `call`.
        call: which call of that module (a shared module is called more than once).
        join: "add", "scaled", "learnt", "gate", or "streams" where the branch is added to several.
        stream_scale, branch_scale: α and β of `α·x + β·F(x)`.
        scheme: a catalogue name where the dataflow of the branch or of its stack decides it, else None.
        entry: the stream as the branch reads it (before a branch_in norm); what is made of several for it to
            read (Hyper-Connections' A_mᵀH).
        output: the term that is added, after its own norms and scales but for those in `fused`.
        sum: the result of the add: of several streams the whole state (B, T, n, D), or the stream that has a
            norm behind it (ResiDual's and SiameseNorm's Post-LN one).
        norms: the norms in the slots, those at the entry first, then output, then stream.
        fused: what `output` is multiplied with as it is added; None where it is no tensor of its own and the
            site is that of something else (addmm).
        projections, attention: what the gradient and attention probes look at.
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
        """The branch as plain data, for the report\'s JSON."""
        keys = ("kind", "placement", "norm", "path", "join", "stream_scale", "branch_scale", "scheme")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Block:
    """The smallest repeated module call that holds the adds.

    `entry` is the stream as the block receives it, `exit` as it hands it on (after a stream norm in Post-LN).
    Of several streams it is the one that the branches' `sum` is: so the block's Jacobian keeps its skip.
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
        """The block as plain data, for the report\'s JSON."""
        return {"path": self.path, "call": self.call, "branches": [b.to_dict() for b in self.branches]}


@dataclass(frozen=True)
class LongSkip:
    """An earlier point of the stream, added again between two blocks or behind the last: x ← α·x + β·x_i.

    Attributes:
        into: name of the block that reads the sum, "" behind the last.
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
        """The long skip as plain data, for the report\'s JSON."""
        return {"into": self.into, "stream_scale": self.stream_scale, "skip_scale": self.skip_scale}


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder: blocks in order, and the norm after the last of them.

    Attributes:
        hidden: what leaves the stack (after the final norm where there is one).
        long_skips: the sums that are no branch's, in order.
        complete: whether all of its residual stream was read; else `Anatomy.unread` lists what was not, and
            `final_norm` and the number of blocks describe the part that was read.
    """

    name: str
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    hidden: Site
    long_skips: tuple[LongSkip, ...] = ()
    complete: bool = True

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches of all blocks, in order."""
        return tuple(branch for block in self.blocks for branch in block.branches)

    def to_dict(self) -> dict[str, Any]:
        """The stack as plain data, for the report\'s JSON."""
        return {
            "name": self.name,
            "blocks": [b.to_dict() for b in self.blocks],
            "final_norm": self.final_norm is not None,
            "long_skips": [skip.to_dict() for skip in self.long_skips],
            "complete": self.complete,
        }


@dataclass(frozen=True)
class Anatomy:
    """The whole reading.

    Attributes:
        stacks: encoder before decoder.
        unread: what could not be read, in words; a reading never guesses.
        activation_bytes: bytes that one recorded forward wrote (an upper bound on what training would hold).
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
        """The reading as plain data, for the report\'s JSON."""
        return {
            "stacks": [stack.to_dict() for stack in self.stacks],
            "blocks": [block.to_dict() for block in self.blocks],
            "final_norm": self.final_norm,
            "unread": list(self.unread),
        }

    def __repr__(self) -> str:
        """Each stack in a line, for a prompt: the whole would fill pages."""
        from normscope.anatomy.rows import headline  # it reads Stack

        unread = [f"{len(self.unread)} unread"] if self.unread else []
        return f"<Anatomy: {'; '.join([*map(headline, self.stacks), *unread]) or 'no residual stream'}>"

    def _repr_html_(self) -> str:
        """The reading in a notebook cell."""
        from normscope.anatomy.notebook import anatomy_html  # it reads Anatomy: imported where it is needed

        return anatomy_html(self)


def at_call(path: str, call: int) -> str:
    """`path`, with `@call` behind it from the second call on (ALBERT runs one module twelve times)."""
    return path if call == 0 else f"{path}@{call}"
