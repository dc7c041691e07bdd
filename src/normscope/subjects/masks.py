"""Masks for a bare module whose forward requires them."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normscope.subjects.assemble import looking, where_and_what
from normscope.subjects.corpus import Corpus
from normscope.subjects.feed import Feed, Portions, placed
from normscope.subjects.found_loss import TIME_FIRST
from normscope.subjects.loss import Ids, is_causal, time_axis_of
from normscope.subjects.subject import Batch


def masked_feeds(
    model: nn.Module, names: tuple[str, ...], corpus: Corpus, portions: Portions
) -> Iterator[Feed]:
    """Feeds of ids (B, T) or (T, B) for a `forward(src, src_mask)`, those that make it causal first.

    A mask (T, T) is added to the scores (−∞ above the diagonal), or is true where a token may look. A model
    that is causal by itself may take (B, T): 1 at every token, or false where it is called padding.
    """
    size, length = portions.batch_size, portions.seq_len
    may_look = torch.ones(length, length, dtype=torch.bool).tril()
    added = torch.zeros(length, length).masked_fill(~may_look, float("-inf"))
    forms = {
        "a causal mask that is added to the scores": added,
        "a causal mask that is true where a token may look": may_look,
        "ones, because nothing is padded": torch.ones(size, length, dtype=torch.int64),
    }
    padding = torch.zeros(size, length, dtype=torch.bool)
    feeds: list[tuple[bool, Feed]] = []
    for (form, mask), axis in itertools.product(forms.items(), (1, 0)):
        masks = tuple(padding if "pad" in name else mask for name in names)

        def batches(
            corpus: Corpus, portions: Portions, axis: int = axis, masks: Any = masks
        ) -> Iterator[Batch]:
            for ids in corpus.windows(portions.batch_size, portions.seq_len, portions.seed):
                yield (ids if axis == 1 else ids.T.contiguous(), *masks)

        words = f"{corpus}, {portions}, {' and '.join(names)}: {form}"
        feed = Feed.of(corpus, portions, batches, words)
        if axis == 0:
            feed = feed.noting(TIME_FIRST)
        feeds.append((_makes_causal(model, next(feed.batches()), axis), feed))
    yield from (feed for _, feed in sorted(feeds, key=lambda pair: not pair[0]))


def _makes_causal(model: nn.Module, batch: Batch, axis: int) -> bool:
    """True if the model is causal on such batches, with time on that axis of the ids."""
    ids = Ids(0, axis)
    with looking(model):
        try:
            batch = placed(batch, *where_and_what(model))
            return time_axis_of(model, batch, ids) == axis and is_causal(model, batch, ids)
        except Exception:  # the model does not take such masks
            return False
