"""Masked language modelling: 15 % of the tokens hidden, the loss on them alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from normscope.nn.output import IGNORED
from normscope.subjects.corpus import Corpus
from normscope.subjects.feed import Portions
from normscope.subjects.subject import Batch

MASKED_SHARE = 0.15


def masked_batches(
    corpus: Corpus, portions: Portions, mask_id: int, ids_name: str, labels_name: str
) -> Iterator[Batch]:
    """Endless batches {ids_name: (B, T), labels_name: (B, T)} with labels −100 where nothing is hidden."""
    generator = torch.Generator().manual_seed(portions.seed)
    for ids in corpus.windows(portions.batch_size, portions.seq_len, portions.seed):
        hidden = _choose(ids, generator)
        yield {
            ids_name: ids.masked_fill(hidden, mask_id),
            labels_name: ids.masked_fill(~hidden, IGNORED),
        }


def _choose(ids: Tensor, generator: torch.Generator) -> Tensor:
    """A mask (B, T) with the same number of tokens hidden, at least one, in each sequence."""
    num_hidden = max(1, round(MASKED_SHARE * ids.shape[1]))
    order = torch.rand(ids.shape, generator=generator).argsort(dim=1)
    return order < num_hidden
