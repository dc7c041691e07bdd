"""`Decoder` and `Encoder`: one stack from ids to logits.

Shapes: B batch, T tokens, S tokens including those in the cache, V vocabulary.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from normscope.nn.config import ModelConfig
from normscope.nn.context import Cache
from normscope.nn.embedding import Embedding, require_ids, require_left_padding, require_mask
from normscope.nn.generate import resting, write_on
from normscope.nn.head import Head
from normscope.nn.output import Output
from normscope.nn.placement import Where
from normscope.nn.sphere import WholeModel
from normscope.nn.stack import Stack


class LanguageModel(Stack, WholeModel):
    """Embedding, blocks, final norm, head. Use `Decoder` or `Encoder`."""

    causal: ClassVar[bool]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Where(1, config.depth, base_depth=config.base_depth), causal=self.causal)
        self.config = dataclasses.replace(config, depth=config.num_blocks)
        self.embedding = Embedding(config)
        self.head = Head(config, config.vocab, self.embedding.tokens if config.tie else None)
        self._finish(config, self.first)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """Logits for each token, and with labels the loss.

        Args:
            ids: (B, T) int64.
            labels: (B, T), target of each position; −100 at positions that do not count. A decoder's labels
                are the next ids: unlike Hugging Face's, they are not shifted here.
            attention_mask: (B, S), zero at padding; positions count the real tokens.
            cache: keys and values of the S − T earlier tokens, which `ids` continue.

        Raises:
            UsageError: there are more tokens than learnt positions, a mask or labels have another shape, or a
                row has no token.
        """
        context, position_BT = self.embedding.context(ids, attention_mask, cache)
        logits_BTV = self.head(self.run(self.embedding(ids, position_BT), context))
        if cache is not None:
            cache.length += ids.shape[1]
        return self._output(logits_BTV, labels)


class Decoder(LanguageModel):
    """Causal language model: labels are the next ids."""

    causal = True

    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Continue `ids` by `max_new_tokens` tokens: (B, T + max_new_tokens).

        Runs in eval mode, without gradients, with a cache of keys and values.

        Args:
            ids: (B, T), the prompts; shorter ones are padded on the left.
            max_new_tokens: number of tokens to generate.
            temperature: temperature of the draws; 0 takes the likeliest token.
            top_k: number of likeliest tokens to draw from; None draws from all.
            generator: random generator of the draws; the global one by default.
            attention_mask: (B, T), zero at padding.

        Raises:
            UsageError: there are more tokens than learnt positions, a prompt is empty, or padding is on the
                right.
        """
        require_ids(ids)
        self.embedding.require_room(ids.shape[1] + max_new_tokens)
        cache, mask = Cache(), attention_mask
        if mask is not None:
            require_mask(mask, ids)
            require_left_padding(mask)

        def step(unseen: Tensor) -> Tensor:
            nonlocal mask
            if mask is not None and cache.length:
                mask = torch.cat([mask, mask.new_ones(unseen.shape)], dim=1)
            return self(unseen, attention_mask=mask, cache=cache).logits

        with resting(self):
            return write_on(
                step, ids, max_new_tokens, temperature=temperature, top_k=top_k, generator=generator
            )


class Encoder(LanguageModel):
    """Masked language model: every token sees all others; labels are the masked ids."""

    causal = False
