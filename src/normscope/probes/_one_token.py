"""∂(token t out)/∂(token t in) of a block or of a stack, the other tokens' entries fixed.

The whole sequence runs once, and the way of one token through it is written down (`_token_follow`): its own
features, and the keys and values of the others. Run again for that token alone it costs 1/T of a forward, and
so does each VJP through it.

    d features of one token, T tokens

That is the whole derivative where nothing of token t comes back to it through another token: in one sublayer
of attention always, in a stack where attention is causal. It is seen from the attention weights, which are
exact zeros there. What is refused says why.
"""

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Block, Stack
from normscope.linalg import JacobianOperator, TangentError, dense
from normscope.linalg.function import held_off
from normscope.probes._feeding import Feed, shape_of
from normscope.probes._held import HeldGraph
from normscope.probes._token_follow import Ends, TokenMap, follow

VALUE_TOLERANCE = 1e-4
"""Relative distance from which the token run alone is not the token of the sequence; float32 gathers less."""

TOLERANCE = 1e-3
"""Relative distance of a row of the Jacobian from the VJP of the whole sequence."""

CHUNK = 256
"""VJPs that run at once: each is as long as one token's features."""


class OneToken:
    """Jacobians of one token, from one forward for all blocks and one for all stacks.

    Call it inside `measuring` and `untouched`.

    Args:
        model: the model.
        anatomy: where blocks and stacks begin and end.
        feed: one sequence.
        held: the graph of the same sequence: one VJP over it is what each figure is checked with.
        token: position in the stream, counted from the end where negative.

    Attributes:
        forwards: what was spent, in forwards of the whole sequence; a VJP counts as one, of the part that it
            goes through, of 1/T where it is of the token alone.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, feed: Feed, held: HeldGraph, *, token: int = -1
    ) -> None:
        self.forwards = 0.0
        self._model, self._anatomy, self._feed, self._held = model, anatomy, feed, held
        self._token = token
        self._followed: dict[Ends, TokenMap | str] = {}

    def block(self, block: Block) -> Tensor:
        """∂(token out)/∂(token in) [d, d] of one block.

        Costs d/T forwards of the block, and one more for the check; the first block also one of the model.

        Raises:
            TangentError: where the token cannot be followed, or what was found does not hold; it says why.
        """
        return self._jacobian(block, [(b.entry, b.exit) for b in self._anatomy.blocks])

    def stack(self, stack: Stack) -> Tensor:
        """∂(token out)/∂(token in) [d, d] from the stack's entry to its last block's exit.

        Costs d/T forwards of the stack, and one more for the check; the first stack also one of the model.

        Raises:
            TangentError: where the token cannot be followed, or what was found does not hold; it says why.
                Attention that is not causal is such a case.
        """
        stacks = [s for s in self._anatomy.stacks if s.blocks]
        return self._jacobian(stack, [(s.blocks[0].entry, s.blocks[-1].exit) for s in stacks])

    def _jacobian(self, part: Block | Stack, all_ends: list[Ends]) -> Tensor:
        blocks = part.blocks if isinstance(part, Stack) else (part,)
        ends = (blocks[0].entry, blocks[-1].exit)
        found = self._map(ends, all_ends)
        share = len(blocks) / len(self._anatomy.blocks)
        with held_off(list(self._model.parameters())):
            op = _operator(found)
        jacobian = dense(op, chunk=CHUNK)
        self.forwards += share * (1 + op.products) / found.tokens
        self._check(jacobian, found, ends)
        self.forwards += share
        return jacobian

    def _map(self, ends: Ends, all_ends: list[Ends]) -> TokenMap:
        if ends not in self._followed:
            self._follow(all_ends)
        found = self._followed[ends]
        if isinstance(found, str):
            raise TangentError(found)
        return found

    def _follow(self, all_ends: list[Ends]) -> None:
        sizes, axis = shape_of(self._feed.batch), self._feed.axis
        if sizes[axis] != 1:
            raise TangentError(f"one token of {sizes[axis]} sequences at once is not followed")
        names = self._feed.names
        here = {ends: (names[ends[0]], names[ends[1]]) for ends in all_ends}
        tokens = sizes[1 - axis] if len(sizes) > 1 else 1
        parts = list(here.values())
        found = follow(self._model, self._feed.batch, parts, token=self._token, tokens=tokens)
        self.forwards += 1
        self._followed |= {ends: found[part] for ends, part in here.items()}

    def _check(self, jacobian: Tensor, found: TokenMap, ends: Ends) -> None:
        """uᵀJ of one random u, against the VJP of the whole sequence."""
        whole = self._held.operator(*ends)
        target = self._held.tensors[ends[1]]
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(len(jacobian), generator=generator, dtype=torch.float64).to(jacobian)
        cotangent = torch.zeros(target.shape, dtype=u.dtype, device=u.device)
        cotangent.narrow(found.axes[1], found.tape.token, 1).copy_(u.reshape(found.exit.shape))
        pulled = whole.rmatvec(cotangent.reshape(-1)).reshape(self._held.tensors[ends[0]].shape)
        expected = pulled.narrow(found.axes[0], found.tape.token, 1).reshape(-1).double()
        gap, size = float((u @ jacobian - expected).norm()), float(expected.norm())
        if not gap <= TOLERANCE * size:
            raise TangentError(
                "one token's Jacobian is not that of the VJP of the whole sequence: they differ by "
                f"{gap:.2g} at size {size:.2g}"
            )


def _operator(found: TokenMap) -> JacobianOperator:
    """J [d, d] on a graph of one token, whose value is that of the whole sequence."""
    with torch.enable_grad():
        entry = found.entry.clone().requires_grad_()
        out = found.tape.run(entry)
    seen = found.exit.double()
    gap, size = float((out.detach().double() - seen).norm()), float(seen.norm())
    if not gap <= VALUE_TOLERANCE * size:
        raise TangentError(
            f"the token run alone comes out otherwise than in the sequence: by {gap:.2g} at size {size:.2g}"
        )
    return JacobianOperator.on_graph(out, entry)
