"""A block or a stack as a product of maps between states of the stream, with the kernels of its norms.

    x → branch → x′ → branch → x″       J = … J₂ J₁,  J_l from one branch's entry to the next one's

In Post-LN every factor ends in a norm on the stream, whose left kernel γ⁻¹ ⊙ span{1, ẑ}, token by token, is
known in closed form.
"""

from itertools import pairwise

from normscope.anatomy import Block, Site, Stack
from normscope.linalg import Layer, TangentError, TokenProjector, left_kernel
from normscope.probes.jacobian.workspace import Workspace, fits, is_product
from normscope.probes.norms import TOKENWISE, factor, normalised

NULL_GAIN = 1e-3
"""Gain of ẑ, relative to other directions, below which ẑ is deflated; the rest counts as an error."""


def layers_of(workspace: Workspace, part: Block | Stack) -> list[Layer]:
    """The factors of `part` in the order of the forward: branch by branch, else block by block.

    Raises:
        TangentError: their product is not the whole, because branches read more than the stream.
    """
    blocks = part.blocks if isinstance(part, Stack) else (part,)
    by_branch = [b.entry for block in blocks for b in block.branches]
    by_block = [block.entry for block in blocks]
    whole = workspace.graph.operator(blocks[0].entry, blocks[-1].exit)
    for entries in (by_branch, by_block):
        states = list(dict.fromkeys([blocks[0].entry, *entries, blocks[-1].exit]))
        try:
            maps = [workspace.graph.operator(a, b) for a, b in pairwise(states)]
        except TangentError:
            continue
        if fits(whole, maps) and is_product(whole, [each.rmatvec for each in maps]):
            kernels = [_left_kernel(workspace, blocks, state) for state in states[1:]]
            return [Layer(each, kernel) for each, kernel in zip(maps, kernels, strict=True)]
    raise TangentError("its branches are not a chain: they read more than the stream")


def kernel_of(workspace: Workspace, part: Block | Stack) -> TokenProjector | None:
    """The left kernel of the norm on the stream at the end of `part`; None where there is none, or where it
    is larger than the closed form."""
    blocks = part.blocks if isinstance(part, Stack) else (part,)
    try:
        return _left_kernel(workspace, blocks, blocks[-1].exit)
    except TangentError:
        return None


def _left_kernel(workspace: Workspace, blocks: tuple[Block, ...], state: Site) -> TokenProjector | None:
    """Left kernel of the norm on the stream that makes `state`; None where no norm does."""
    branches = [branch for block in blocks for branch in block.branches if branch.placement == "post"]
    found = next((norm for branch in branches for norm in branch.norms if norm.output == state), None)
    if found is None or found.kind not in TOKENWISE or found.input not in workspace.graph.tensors:
        return None
    gamma = factor(found, workspace.parameters)
    entering = workspace.graph.tensors[found.input].detach()
    basis, zeros = left_kernel(normalised(found, entering), gamma, found.kind == "layernorm", NULL_GAIN)
    if bool(zeros.any()):
        raise TangentError("a norm on the stream has zeros in γ: its kernel is wider than the closed form")
    return TokenProjector(basis)
