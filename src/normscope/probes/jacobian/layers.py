"""A block or a stack as a product of maps between states of the stream, with the kernels that its norms have.

    x → branch → x′ → branch → x″       J = … J₂ J₁,  J_l from one branch's entry to the next one's

In Post-LN every factor ends in a norm on the stream, whose left kernel γ⁻¹ ⊙ span{1, ẑ}, token by token, is
known in closed form.
"""

from itertools import pairwise

from normscope.anatomy import Block, Norm, Site, Stack
from normscope.linalg import JacobianOperator, Layer, TangentError, TokenProjector, left_kernel
from normscope.probes._norms import TOKENWISE, factor, normalised
from normscope.probes.jacobian.look import Look, drawn

NULL_GAIN = 1e-3
"""ẑ is deflated where its gain is under this share of other directions'; its rest counts as an error."""

CHAIN_TOLERANCE = 1e-3
"""Relative distance up to which the product of the factors is the whole map."""


def layers_of(look: Look, part: Block | Stack) -> list[Layer]:
    """The factors of `part`, the first one first: branch by branch, else block by block.

    Raises:
        TangentError: the factors do not make up the whole: branches also read what is not on the stream.
    """
    blocks = part.blocks if isinstance(part, Stack) else (part,)
    by_branch = [b.entry for block in blocks for b in block.branches]
    by_block = [block.entry for block in blocks]
    for entries in (by_branch, by_block):
        states = [blocks[0].entry, *dict.fromkeys(entries), blocks[-1].exit]
        states = [state for i, state in enumerate(states) if state not in states[:i]]
        try:
            maps = [look.graph.operator(a, b) for a, b in pairwise(states)]
        except TangentError:
            continue
        if _is_chain(look.ends(part), maps):
            kernels = [_left_kernel(look, blocks, state) for state in states[1:]]
            return [Layer(each, kernel) for each, kernel in zip(maps, kernels, strict=True)]
    raise TangentError("its branches do not make up a chain: they read more than the stream")


def kernel_of(look: Look, part: Block | Stack) -> TokenProjector | None:
    """The left kernel of the norm on the stream that `part` ends in; None where there is none, or more of it
    than the closed form."""
    blocks = part.blocks if isinstance(part, Stack) else (part,)
    try:
        return _left_kernel(look, blocks, blocks[-1].exit)
    except TangentError:
        return None


def _is_chain(whole: JacobianOperator, maps: list[JacobianOperator]) -> bool:
    """Whether the product of `maps` does to one random cotangent what `whole` does."""
    if maps[0].shape[1] != whole.shape[1] or any(a.shape[0] != b.shape[1] for a, b in pairwise(maps)):
        return False
    (u,) = drawn(whole, 1, whole.shape[0])
    expected, pulled = whole.rmatvec(u), u
    for each in reversed(maps):
        pulled = each.rmatvec(pulled)
    gap = float((pulled - expected).double().norm())
    return gap <= CHAIN_TOLERANCE * float(expected.double().norm())


def _left_kernel(look: Look, blocks: tuple[Block, ...], state: Site) -> TokenProjector | None:
    """Of the norm on the stream that makes `state`; None where no norm does."""
    found = next((norm for block in blocks for norm in _stream_norms(block) if norm.output == state), None)
    if found is None or found.kind not in TOKENWISE or found.input not in look.graph.tensors:
        return None
    gamma = factor(found, look.parameters)
    entering = look.graph.tensors[found.input].detach()
    basis, zeros = left_kernel(normalised(found, entering), gamma, found.kind == "layernorm", NULL_GAIN)
    if bool(zeros.any()):
        raise TangentError("a norm on the stream has zeros in γ: its kernel is wider than the closed form")
    return TokenProjector(basis)


def _stream_norms(block: Block) -> list[Norm]:
    return [norm for branch in block.branches for norm in branch.norms if branch.placement == "post"]
