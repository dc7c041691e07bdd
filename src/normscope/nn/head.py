"""Head that maps the stream to logits.

Shapes: B batch, T tokens, D width, V vocabulary or classes.
"""

import torch
from torch import Tensor, nn

from normscope.nn.config import ModelConfig
from normscope.nn.gain import Gain
from normscope.nn.joins import scaled
from normscope.nn.schemes import scheme_named


class Head(nn.Linear):
    """W x (+ b), soft-capped where `config.output_softcap` says so.

    μP divides W x by width/base_width (Yang et al. 2022, arXiv:2203.03466); nGPT has a learnt scale s_z for
    each logit, from 1 (Loshchilov et al. 2024, arXiv:2410.01131).

    Args:
        config: width, bias and soft cap.
        num_outputs: V.
        tied: the embedding whose weights W is; None for weights of its own.
    """

    def __init__(self, config: ModelConfig, num_outputs: int, tied: nn.Embedding | None = None) -> None:
        super().__init__(config.width, num_outputs, bias=config.output_bias is not False)
        self.softcap = config.output_softcap
        self.scale = 1 / config.width_multiplier
        on_sphere = scheme_named(config.scheme).on_sphere
        self.gain = Gain((num_outputs,), start=1.0, held=config.width**-0.5) if on_sphere else None
        if tied is not None:
            self.weight = tied.weight

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, V)."""
        logits = super().forward(scaled(x, self.scale))
        if self.gain is not None:
            logits = self.gain() * logits
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)
