"""Feeds for normscope's and transformers' models: masked, continued and parallel texts, and images."""

import dataclasses
import functools
from collections.abc import Iterator

import torch

from normscope.nn.output import IGNORED
from normscope.subjects.corpus import Corpus
from normscope.subjects.digits import Images, resized
from normscope.subjects.feed import Feed, Portions, in_blocks, noise
from normscope.subjects.loss import output_loss
from normscope.subjects.parallel import ParallelCorpus, masked_pairs
from normscope.subjects.subject import Batch

MASKED_SHARE = 0.15


def masked_feed(corpus: Corpus, portions: Portions, name: str, mask_id: int) -> Feed:
    """Masked language modelling: 15 % of the tokens are hidden, and only they count in the loss."""
    batches = functools.partial(masked_batches, mask_id=mask_id, ids_name=name, labels_name="labels")
    return Feed.of(corpus, portions, batches, f"{corpus}, {portions}, 15 % masked", output_loss)


def masked_batches(
    corpus: Corpus, portions: Portions, mask_id: int, ids_name: str, labels_name: str
) -> Iterator[Batch]:
    """Endless batches {ids_name: (B, T), labels_name: (B, T)}; labels are −100 at tokens that are not hidden.

    Each sequence has the same number of hidden tokens, at least one.
    """
    num_hidden = max(1, round(MASKED_SHARE * portions.seq_len))
    generator = torch.Generator().manual_seed(portions.seed)
    for ids in corpus.windows(portions.batch_size, portions.seq_len, portions.seed):
        order = torch.rand(ids.shape, generator=generator).argsort(dim=1)
        hidden = order < num_hidden
        yield {
            ids_name: ids.masked_fill(hidden, mask_id),
            labels_name: ids.masked_fill(~hidden, IGNORED),
        }


def continued_feed(corpus: Corpus, portions: Portions, name: str, other: str, goal: str) -> Feed:
    """Feed of sequences under `name` and of their continuations under `other`, with labels for a loss."""

    def batches(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
        for ids in corpus.windows(portions.batch_size, 2 * portions.seq_len, portions.seed):
            first, second = ids.chunk(2, dim=1)
            yield {name: first.contiguous(), other: second.contiguous()}

    loss_fn = output_loss if other == "labels" else None
    return Feed.of(corpus, portions, batches, f"{corpus}, {portions}, {goal}", loss_fn)


def pairs_feed(
    pairs: ParallelCorpus, portions: Portions, name: str, pad: int, decoder_mask: str | None = None
) -> Feed:
    """Parallel texts, each line cut to the portions' length; see `masked_pairs`."""
    pairs = dataclasses.replace(pairs, limit=portions.seq_len)
    batches = functools.partial(masked_pairs, ids_name=name, pad=pad, decoder_mask=decoder_mask)
    words = f"{pairs}, {portions.batch_size} pairs of up to {portions.length} a side"
    return Feed.of(pairs, portions, batches, words, output_loss)


def images_feed(
    images: Images | None, portions: Portions, name: str, shape: tuple[int, ...], classes: int
) -> Feed:
    """Batches {name: (B, C, H, W), "labels": (B,)}: real images, or noise with random labels."""

    def real(images: Images, portions: Portions) -> Iterator[Batch]:
        for pixels, labels in images.batches(portions.batch_size, portions.seed):
            yield {name: resized(pixels, *shape[1:]), "labels": labels}

    def random(portions: Portions) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(portions.seed)
        for tensor in noise(shape, portions.seed):
            yield {name: tensor, "labels": torch.randint(classes, shape[:1], generator=generator)}

    if images is not None:
        return Feed.of(images, portions, real, f"{images}, resized to {shape}", output_loss)
    words = f"standard normal noise as {name} {shape}, random labels"
    return Feed(in_blocks(random, portions), words, loss_fn=output_loss)
