"""What a model of transformers is fed, by its head."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import UsageError, describe
from normscope.subjects.feed import Feed, Portions, placed
from normscope.subjects.hf_heads import HeadKind
from normscope.subjects.masking import masked_batches
from normscope.subjects.subject import Batch, LossFn, Subject, call_model
from normscope.subjects.text import Corpus, Text, encode
from normscope.subjects.untouched import untouched


def hf_subject(model: Any, kind: HeadKind, portions: Portions, text: Text, spec: str) -> Subject:
    feed = _feed(model, kind, portions, text)
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    return Subject(
        model=model,
        batch=placed(feed.first, device, dtype),
        loss_fn=output_loss,
        batches=lambda: (placed(batch, device, dtype) for batch in feed.batches()),
        seed=portions.seed,
        spec=spec,
        input=feed.input,
        unigram_entropy=feed.unigram_entropy,
        notes=feed.notes,
    )


def output_loss(output: Any, batch: Batch) -> Tensor:
    """The loss that a model of transformers computes from the labels in its batch."""
    return output.loss


def _feed(model: Any, kind: HeadKind, portions: Portions, text: Text) -> Feed:
    vocabulary = model.get_input_embeddings().num_embeddings
    mask = vocabulary - 1
    corpus = encode(text, vocabulary, (mask,))
    size = f"{portions.batch_size} sequences of {portions.seq_len} tokens"
    words = f"{text.name} as {corpus.how}, {size}"
    if kind == "masked":
        return Feed(
            lambda: masked_batches(corpus, portions, mask, "input_ids", "labels"),
            words + ", 15 % masked",
            corpus.unigram_entropy,
        )
    return Feed(lambda: _causal(corpus, portions), words + ", next-token loss", corpus.unigram_entropy)


def _causal(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, portions.seq_len, portions.seed):
        yield {"input_ids": ids, "labels": ids.clone()}
