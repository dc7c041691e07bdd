"""Base class of the models, with nGPT's unit sphere (Loshchilov et al. 2024, arXiv:2410.01131)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normscope.nn.block import Block
from normscope.nn.config import ModelConfig
from normscope.nn.drawn import remember
from normscope.nn.embedding import Embedding
from normscope.nn.head import Head
from normscope.nn.initialise import ROLES, initialise_ends
from normscope.nn.output import Output, with_loss
from normscope.nn.placement import Where
from normscope.nn.qk_clip import clip_queries_and_keys
from normscope.nn.residual import Residual
from normscope.nn.schemes import scheme_named
from normscope.nn.stack import Stack
from normscope.nn.tensors import unit, wide


class WholeModel(nn.Module):
    """Base class of the models: blocks, and the modules outside them."""

    config: ModelConfig

    def _finish(self, config: ModelConfig, first: Where) -> None:
        """Draw the weights outside the blocks, with embeddings for the place `first`; ends a constructor."""
        initialise_ends(self, first, scheme_named(config.scheme).initialisation, config.init)
        onto_sphere(self)
        remember(self)

    def _output(self, logits: Tensor, labels: Tensor | None) -> Output:
        """The output with its loss; z-loss counts in train mode only, so that losses of eval mode compare."""
        return with_loss(logits, labels, self.config.z_loss if self.training else 0.0)

    def settle(self) -> None:
        """Normalise nGPT's matrices; call this after weights were changed other than by training."""
        onto_sphere(self)

    def after_step(self) -> None:
        """Normalise nGPT's matrices, apply QK-clip, count the step; call this after each optimiser step."""
        modules = list(self.modules())  # a walk over a deep model takes a tenth of a forward
        _onto_sphere(modules)
        for module in modules:
            if isinstance(module, Residual):
                module.advance()
        if self.config.qk_clip is not None:
            clip_queries_and_keys(self, self.config.qk_clip)


def onto_sphere(model: nn.Module) -> None:
    """Give every vector along the width unit length, if the model's scheme is `on_sphere`.

    These vectors are the rows of the embedding, of the head and of the maps that read the stream, and the
    columns of the maps that write to it.
    """
    _onto_sphere(list(model.modules()))


@torch.no_grad()
def _onto_sphere(modules: Sequence[nn.Module]) -> None:
    stacks = [module for module in modules if isinstance(module, Stack)]
    if not any(stack.scheme.on_sphere for stack in stacks):
        return
    for module in modules:
        if isinstance(module, Embedding):
            _normalise(module.tokens.weight, rows=True)
        elif isinstance(module, Head):
            _normalise(module.weight, rows=True)
    for stack in stacks:
        for block in stack.blocks:
            assert isinstance(block, Block)
            for branch, _ in block.sublayers().values():
                for role in ROLES:
                    if getattr(branch, role, None) is not None:
                        _normalise(getattr(branch, role).weight, rows=role not in ("o", "down"))


def _normalise(weight: Tensor, *, rows: bool) -> None:
    weight.copy_(unit(wide(weight)) if rows else unit(wide(weight).mT).mT)
