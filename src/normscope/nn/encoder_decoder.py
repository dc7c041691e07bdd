"""`EncoderDecoder`: an encoder, and a decoder that attends to its output.

Shapes: B batch, S tokens read, T tokens written, D width, V vocabulary.
"""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.nn.config import ModelConfig
from normscope.nn.context import Cache
from normscope.nn.embedding import Embedding, require_ids
from normscope.nn.generate import resting, write_on
from normscope.nn.head import Head
from normscope.nn.output import Output
from normscope.nn.placement import Where
from normscope.nn.sphere import WholeModel
from normscope.nn.stack import Stack

START = 0
"""The id that the decoder starts from: 0, as in T5."""


class EncoderDecoder(WholeModel):
    """An encoder of `config.encoder_depth` blocks and a decoder of `config.depth` that attends to its output.

    Both share one token table (Vaswani et al. 2017, arXiv:1706.03762, §3.4), which with `config.tie` is also
    the head's. Each stack has its own learnt positions.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        depth, encoder_depth = config.num_blocks, config.encoder_depth or config.num_blocks
        given = config.depth is not None  # else schemes that depend on the depths raise an error

        def stack(half: Literal["encoder", "decoder"], own: int, other: int) -> Stack:
            place: dict[str, Any] = {"stack": half, "other_depth": other, "base_depth": config.base_depth}
            first = Where(1, own if given else None, **place)
            writes = half == "decoder"
            return Stack(dataclasses.replace(config, depth=own), first, causal=writes, cross=writes)

        self.config = dataclasses.replace(config, depth=depth, encoder_depth=encoder_depth)
        self.embedding = Embedding(config)
        self.encoder = stack("encoder", encoder_depth, depth)
        self.decoder_embedding = Embedding(config, self.embedding.tokens)
        self.decoder = stack("decoder", depth, encoder_depth)
        self.head = Head(config, config.vocab, self.embedding.tokens if config.tie else None)
        self._finish(config, self.encoder.first)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        decoder_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Output:
        """Logits for each token of the decoder, and with labels the loss.

        Args:
            ids: (B, S) int64, input of the encoder.
            labels: (B, T), targets of the decoder; −100 at positions that do not count.
            decoder_ids: (B, T), input of the decoder; by default the labels shifted by one, after the id
                `START`.
            attention_mask, decoder_attention_mask: (B, S) and (B, T), zero at padding.

        Raises:
            UsageError: neither labels nor decoder_ids are given; otherwise as for `Decoder`.
        """
        if decoder_ids is None:
            if labels is None:
                raise UsageError(
                    "an encoder-decoder with ids alone", "labels or decoder_ids", "give one of them"
                )
            decoder_ids = shifted(labels)
        memory_BSD = self.encode(ids, attention_mask)
        logits_BTV = self.decode(decoder_ids, memory_BSD, attention_mask, decoder_attention_mask)
        return self._output(logits_BTV, labels)

    def encode(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, S) ids → the memory (B, S, D) that the decoder attends to."""
        context, position_BS = self.embedding.context(ids, attention_mask)
        return self.encoder.run(self.embedding(ids, position_BS), context)

    def decode(
        self,
        decoder_ids: Tensor,
        memory_BSD: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """(B, T) ids → logits (B, T, V).

        Args:
            memory_BSD: output of `encode`, with its `attention_mask`.
            cache: keys and values of earlier tokens and of the memory.
        """
        context, position_BT = self.decoder_embedding.context(decoder_ids, decoder_attention_mask, cache)
        memory_mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        context = context._replace(memory=memory_BSD, memory_mask=memory_mask)
        x_BTD = self.decoder.run(self.decoder_embedding(decoder_ids, position_BT), context)
        if cache is not None:
            cache.length += decoder_ids.shape[1]
        return self.head(x_BTD)

    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        attention_mask: Tensor | None = None,
        decoder_ids: Tensor | None = None,
    ) -> Tensor:
        """Generate from `ids` with the decoder: (B, 1 + max_new_tokens), the id `START` first.

        Runs in eval mode, without gradients; the encoder runs once, the decoder with a cache.

        Args:
            ids: (B, S), padded on either side.
            temperature, top_k, generator: as for `Decoder.generate`.
            attention_mask: (B, S), zero at padding.
            decoder_ids: (B, T), ids that the decoder continues instead of `START`.

        Raises:
            UsageError: there are more tokens than learnt positions, or the mask has another shape or a row
                without a token.
        """
        if decoder_ids is None:
            decoder_ids = ids.new_full((ids.shape[0], 1), START)
        require_ids(decoder_ids)
        self.decoder_embedding.require_room(decoder_ids.shape[1] + max_new_tokens)
        cache = Cache()
        with resting(self), torch.no_grad():
            memory_BSD = self.encode(ids, attention_mask)
            return write_on(
                lambda unseen: self.decode(unseen, memory_BSD, attention_mask, cache=cache),
                decoder_ids,
                max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                generator=generator,
            )


def shifted(labels_BT: Tensor) -> Tensor:
    """The labels shifted by one, with `START` first and at labels that do not count."""
    ids_BT = labels_BT.roll(1, dims=1)
    ids_BT[:, 0] = START
    return ids_BT.clamp(min=START)
