"""`make_subject`: a bare module, with or without a batch → a Subject."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.subjects.feed import Feed, Portions, Replay, placed
from normscope.subjects.subject import Batch, LossFn, Subject
from normscope.subjects.text import encode, load_text


def make_subject(
    model: nn.Module,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    *,
    seed: int = 0,
    batch_size: int = 4,
    seq_len: int = 64,
    text: Path | None = None,
    spec: str | None = None,
) -> Subject:
    """A Subject of a module that is already built."""
    notes: tuple[str, ...] = ()
    if batch is None:
        vocabulary = next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
        corpus = encode(load_text(text), vocabulary)
        portions = Portions(batch_size, seq_len, seed)
        feed = Feed(
            lambda: corpus.windows(batch_size, seq_len, seed),
            f"{corpus.text.name} as {corpus.how}, {batch_size} sequences of {seq_len} tokens",
            corpus.unigram_entropy,
        )
        loss_fn = loss_fn or next_token_loss
    elif isinstance(batch, Tensor | tuple | dict):
        feed = Feed(Replay([batch]), "the batch given")
        notes = ("a single batch is repeated",)
    else:
        feed = Feed(Replay(batch), "the batches given")
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    return Subject(
        model=model,
        batch=placed(feed.first, device, dtype),
        loss_fn=loss_fn,
        batches=lambda: (placed(b, device, dtype) for b in feed.batches()),
        seed=seed,
        spec=spec or type(model).__name__,
        input=feed.input,
        unigram_entropy=feed.unigram_entropy,
        notes=notes,
    )


def next_token_loss(output: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy of each token given those before it, in nats."""
    logits = output if isinstance(output, Tensor) else output[0]
    assert isinstance(batch, Tensor)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
