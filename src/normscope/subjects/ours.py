"""`nn:` specs → subjects of our own models."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from normscope.nn import Decoder, Output, build
from normscope.nn.models import MODELS, Transformer
from normscope.subjects.feed import Feed, Portions, placed
from normscope.subjects.masking import masked_batches
from normscope.subjects.spec import Spec
from normscope.subjects.subject import Batch, Subject
from normscope.subjects.text import Corpus, Text, encode


def load_ours(
    spec: Spec, portions: Portions, text: Text, device: torch.device, dtype: torch.dtype | None
) -> Subject:
    """The model `spec` names, on batches of `text`."""
    options: dict[str, Any] = dict(spec.options)
    if spec.name in MODELS and "context" not in options:
        options["context"] = max(1024, portions.seq_len)
    model = build(spec.name, **options).to(device, dtype)
    feed = _feed(model, portions, text)
    return Subject(
        model=model,
        batch=placed(feed.first, device, dtype),
        loss_fn=_loss,
        batches=lambda: (placed(batch, device, dtype) for batch in feed.batches()),
        seed=portions.seed,
        spec=spec.text,
        input=feed.input,
        unigram_entropy=feed.unigram_entropy,
        notes=feed.notes,
    )


def _loss(output: Output, batch: Batch) -> Tensor:
    assert output.loss is not None
    return output.loss


def _feed(model: Transformer, portions: Portions, text: Text) -> Feed:
    size = f"{portions.batch_size} sequences of {portions.seq_len} tokens"
    vocabulary = model.config.vocab
    if isinstance(model, Decoder):
        corpus = encode(text, vocabulary)
        words = f"{text.name} as {corpus.how}, {size}, next-token loss"
        return Feed(lambda: _next_token(corpus, portions), words, corpus.unigram_entropy)
    mask = vocabulary - 1
    corpus = encode(text, vocabulary, reserved=(mask,))
    words = f"{text.name} as {corpus.how}, {size}, 15 % masked"
    return Feed(
        lambda: masked_batches(corpus, portions, mask, "ids", "labels"), words, corpus.unigram_entropy
    )


def _next_token(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, portions.seq_len + 1, portions.seed):
        yield {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
