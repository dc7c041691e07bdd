"""`Stack`: blocks of one scheme, from the embedding to the head's input.

Shapes: B batch, T tokens, D width.
"""

import dataclasses

import torch
from torch import Tensor, nn

from normscope.nn.block import Block
from normscope.nn.config import ModelConfig
from normscope.nn.context import NOTHING, Context, First
from normscope.nn.fused import can_read_ahead, make_read_ahead
from normscope.nn.joins import State, WeightedSum
from normscope.nn.norms import NoNorm
from normscope.nn.placement import Slot, Where
from normscope.nn.recompute import run_again_later
from normscope.nn.residual import norm_maker
from normscope.nn.scheme import Scheme
from normscope.nn.schemes import scheme_named


class Stack(nn.Module):
    """`config.depth` blocks, with the norms before the first and after the last one.

    Args:
        config: configuration of the blocks.
        first: place of the first block; all blocks share its stack and depths.
        causal, cross: as for `Block`.
    """

    def __init__(self, config: ModelConfig, first: Where, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        scheme = scheme_named(config.scheme)
        # Without a depth in `first`, a scheme that depends on it raises an error.
        first = dataclasses.replace(first, default_depth=config.num_blocks)
        places = [dataclasses.replace(first, block=index) for index in range(1, config.num_blocks + 1)]
        self.blocks = nn.ModuleList(Block(config, where, causal=causal, cross=cross) for where in places)
        make_norm = norm_maker(scheme, config.norm, config.eps)

        def end(slot: Slot, where: Where, asked: bool | None) -> nn.Module:
            held = slot in scheme.placement_at(where) if asked is None else asked
            return make_norm(config.width) if held else NoNorm()

        self.entry_norm = end(Slot.ENTRY, places[0], config.entry_norm)
        self.final_norm = end(Slot.FINAL, places[-1], config.final_norm)
        self.scheme_name, self.first, self.checkpointed = config.scheme, first, config.checkpoint
        if config.fused:
            self._fuse()

    @property
    def scheme(self) -> Scheme:
        """The scheme of the blocks, looked up by name, so that a stack can be copied and pickled."""
        return scheme_named(self.scheme_name)

    def _fuse(self) -> None:
        """Let each plain or scaled sum compute the norm that reads it.

        With checkpointing, a block's last sum does not: the next block would read what its second run does
        not compute.
        """
        blocks = [
            [residual for _, residual in block.sublayers().values()]
            for block in self.blocks
            if isinstance(block, Block)
        ]
        residuals = [residual for block in blocks for residual in block]
        lasts = {block[-1] for block in blocks} if self.checkpointed else set()
        entries = [residual.norms["branch_in"] for residual in residuals[1:]]
        for residual, after in zip(residuals, [*entries, self.final_norm], strict=True):
            on_stream = residual.norms["stream"]
            norm = after if isinstance(on_stream, NoNorm) else on_stream
            join, follows = residual.join, norm is on_stream or residual not in lasts
            if isinstance(join, WeightedSum) and join.stream_scale != 0 and follows and can_read_ahead(norm):
                make_read_ahead(norm)
                join.read_by = [norm]

    def run(self, x_BTD: Tensor, context: Context = NOTHING) -> Tensor:
        """(B, T, D) → (B, T, D), through the norms at both ends.

        With `config.checkpoint` each block keeps only its input and runs again in the backward pass.
        """
        context = context._replace(first=First())
        state: State = self.scheme.join.enter(x_BTD, lambda x: self.entry_norm(x, context.real))
        for block in self.blocks:
            if self.checkpointed and self.training and torch.is_grad_enabled() and context.cache is None:
                state = run_again_later(block, block, state, context)
            else:
                state = block(state, context)
        return self.scheme.join.leave(state, lambda x: self.final_norm(x, context.real))
