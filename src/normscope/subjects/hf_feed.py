"""Inputs of a transformers model, chosen by its head."""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normscope.subjects.assemble import (
    Attempt,
    AttemptError,
    first_that_runs,
    lengths,
    looking,
    shortened,
)
from normscope.subjects.corpus import Corpus, encode
from normscope.subjects.data import CLASSIFIERS, ENCODER_DECODERS, Data
from normscope.subjects.digits import Images, labelled_images, require_classes
from normscope.subjects.fake import fake_mode_of
from normscope.subjects.feed import Feed, Portions, in_blocks, noise
from normscope.subjects.hf_heads import HeadKind
from normscope.subjects.hf_shapes import FLOAT_INPUTS, float_shapes
from normscope.subjects.loss import Ids, is_causal, output_loss, shifts_labels
from normscope.subjects.masking import masked_batches
from normscope.subjects.parallel import ParallelCorpus, encode_pairs, masked_pairs
from normscope.subjects.subject import Batch, LossFn, Subject, call_model
from normscope.subjects.tokens import tokenised, tokenised_pairs

_FEW_SEQUENCES, _FEW_TOKENS = 2, 16
_NOT_CAUSAL = "no loss: the model sees later tokens, and its own loss is for models that do not"


@dataclass(frozen=True)
class Feeder:
    """A model of transformers, its head, and the text for it (None where it has no vocabulary).

    Attributes:
        pairs, images: what was asked for in the place of text.
        mask: the id that stands for a hidden token: the model's own, else one that no byte uses.
    """

    model: Any
    kind: HeadKind
    portions: Portions
    corpus: Corpus | None
    mask: int = 0
    pairs: ParallelCorpus | None = None
    images: Images | None = None

    @property
    def main(self) -> str:
        """The model's name for what it eats first; some declare one that their forward does not have."""
        declared = getattr(self.model, "main_input_name", "input_ids")
        taken = inspect.signature(self.model.forward).parameters
        return next((name for name in (declared, "input_ids", *FLOAT_INPUTS) if name in taken), declared)

    @property
    def two_stacks(self) -> bool:
        """Whether there is a decoder that reads an encoder."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    def of_length(self, length: int) -> "Feeder":
        """The same with sequences of another length."""
        return dataclasses.replace(self, portions=self.portions.of_length(length))


def feeder_of(model: Any, kind: HeadKind, portions: Portions, data: Data, folder: Path | None) -> Feeder:
    """All that a feed is made of; the text in the model's own tokens where `folder` has a tokenizer.json."""
    _require_fitting(Feeder(model, kind, portions, None), data)
    vocabulary = _vocabulary(model)
    if vocabulary is None:
        return Feeder(model, kind, portions, None, images=data.images)
    own_mask = getattr(model.config, "mask_token_id", None)
    mask = own_mask if isinstance(own_mask, int) and 0 <= own_mask < vocabulary else vocabulary - 1
    reserved = {mask, *(i for i in (getattr(model.config, "pad_token_id", None),) if isinstance(i, int))}
    tokenizer = folder / "tokenizer.json" if folder else None
    has_own = tokenizer is not None and tokenizer.is_file()
    if tokenizer is not None and has_own:
        corpus = tokenised(data.text, tokenizer, vocabulary, data.tokens)
    else:
        corpus = encode(data.text, vocabulary, reserved)
    pairs = None
    if data.pairs is not None and tokenizer is not None and has_own:
        pairs = tokenised_pairs(data.pairs, tokenizer, vocabulary, portions.seq_len, data.tokens)
    elif data.pairs is not None:
        pairs = encode_pairs(data.pairs, vocabulary, portions.seq_len, reserved)
    return Feeder(model, kind, portions, corpus, mask, pairs, data.images)


def _require_fitting(feeder: Feeder, data: Data) -> None:
    """AttemptError where the data that was asked for is not for this model; another head may do."""
    given = f"{type(feeder.model).__name__} ({feeder.kind})"
    reads_text = feeder.kind == "seq2seq" and feeder.two_stacks and feeder.main not in FLOAT_INPUTS
    if data.pairs is not None and not reads_text:
        raise AttemptError(given, ENCODER_DECODERS, "take hf:t5 or hf:bart, or give --text")
    if data.images is not None and feeder.kind != "image-classification":
        raise AttemptError(given, CLASSIFIERS, "take hf:vit, or leave --images out")
    if data.images is not None:
        require_classes(feeder.model.config.num_labels, given, "num_labels")


def _vocabulary(model: Any) -> int | None:
    """Number of ids; None for images and sounds, 256 where ids are characters of any kind (CANINE)."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        return 256 if "input_ids" in inspect.signature(model.forward).parameters else None
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except (NotImplementedError, AttributeError):  # what transformers raises where there is none
        return size
    return min(size, weight.shape[0]) if weight is not None and weight.ndim == 2 else size


def hf_subject(feeder: Feeder, spec: str, notes: tuple[str, ...] = ()) -> Subject:
    """The Subject of the first way of feeding `feeder` that its forward takes."""
    subject = _first(feeder, spec, notes)
    if feeder.kind != "causal" or fake_mode_of(feeder.model) is not None or _is_causal(subject):
        return subject
    masked = _first(dataclasses.replace(feeder, kind="masked"), spec, notes)
    assert isinstance(masked.batch, dict)
    with looking(feeder.model):
        shifts = shifts_labels(call_model(feeder.model, masked.batch), masked.batch["labels"])
    if shifts is False:
        return masked
    subject.loss_fn, subject.unigram_entropy = None, None
    subject.notes = (*subject.notes, _NOT_CAUSAL)
    return subject


def _first(feeder: Feeder, spec: str, notes: tuple[str, ...]) -> Subject:
    attempts = (Attempt(feed.noting(*notes), loss_fn) for feed, loss_fn in _feeds(feeder))
    return first_that_runs(feeder.model, attempts, seed=feeder.portions.seed, spec=spec)


def _is_causal(subject: Subject) -> bool:
    """Whether the model is causal, tested on a few short sequences, or at full length if those fail."""
    assert isinstance(subject.batch, dict)
    ids = subject.batch["input_ids"][:_FEW_SEQUENCES]
    with looking(subject.model):
        try:
            return is_causal(subject.model, {"input_ids": ids[:, :_FEW_TOKENS]}, Ids("input_ids"))
        except (RuntimeError, ValueError, AssertionError, IndexError):
            return is_causal(subject.model, {"input_ids": ids}, Ids("input_ids"))


Way = tuple[Feed, LossFn | None]


def _feeds(feeder: Feeder) -> Iterator[Way]:
    if feeder.main not in FLOAT_INPUTS and feeder.corpus is not None:
        for length in lengths(feeder.portions.seq_len):
            feed, loss_fn = _text_feed(feeder.of_length(length), feeder.corpus)
            yield feed.noting(*shortened(length, feeder.portions.seq_len)), loss_fn
    if feeder.main in FLOAT_INPUTS:
        for shape in float_shapes(feeder.main, feeder.model.config, feeder.portions):
            yield _float_feed(feeder, feeder.main, shape)
    if feeder.kind == "base":
        yield from _everything(feeder)


def _text_feed(feeder: Feeder, corpus: Corpus) -> Way:
    name, words = feeder.main, f"{corpus}, {feeder.portions}"
    portions, kind = feeder.portions, feeder.kind
    if feeder.pairs is not None:
        pad = getattr(feeder.model.config, "pad_token_id", None)
        pairs = dataclasses.replace(feeder.pairs, limit=portions.seq_len)
        said = functools.partial(masked_pairs, ids_name=name, pad=pad if isinstance(pad, int) else 0)
        return Feed.of(pairs, portions, said, f"{pairs}, {portions.pairs()}"), output_loss
    if kind == "masked":
        hidden = functools.partial(masked_batches, mask_id=feeder.mask, ids_name=name, labels_name="labels")
        return Feed.of(corpus, portions, hidden, f"{words}, 15 % masked"), output_loss
    if kind == "causal":
        return Feed.of(corpus, portions, _causal, f"{words}, next-token loss"), output_loss
    other = "labels" if kind == "seq2seq" else "decoder_input_ids"
    if kind == "seq2seq" or feeder.two_stacks:
        goal = ", the decoder to go on with the text" if kind == "seq2seq" else ", half to the decoder"
        continued = functools.partial(_continued, name=name, other=other)
        feed = Feed.of(corpus, portions, continued, words + goal)
        return feed, output_loss if kind == "seq2seq" else None
    plain = functools.partial(_plain, corpus, name=name)
    return Feed(in_blocks(plain, portions), words).noting("no loss: the model has no head"), None


def _plain(corpus: Corpus, portions: Portions, name: str) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, portions.seq_len, portions.seed):
        yield {name: ids}


def _causal(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, portions.seq_len, portions.seed):
        yield {"input_ids": ids, "labels": ids.clone()}  # the model shifts them


def _continued(corpus: Corpus, portions: Portions, name: str, other: str) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, 2 * portions.seq_len, portions.seed):
        first, second = ids.chunk(2, dim=1)
        yield {name: first.contiguous(), other: second.contiguous()}


def _float_feed(feeder: Feeder, name: str, shape: tuple[int, ...]) -> Way:
    portions = feeder.portions
    words = f"standard normal noise as {name} {shape}"
    if feeder.images is not None and len(shape) == 4:
        real = functools.partial(labelled_images, name=name, shape=shape[1:])
        return Feed.of(feeder.images, portions, real, f"{feeder.images}, resized to {shape}"), output_loss
    if feeder.kind == "image-classification":
        classes = feeder.model.config.num_labels
        labelled = functools.partial(_labelled, name, shape, classes)
        return Feed(in_blocks(labelled, portions), f"{words}, random labels"), output_loss
    decoder = "labels" if feeder.kind == "seq2seq" else "decoder_input_ids"
    if feeder.corpus is not None and (feeder.kind == "seq2seq" or feeder.two_stacks):
        corpus = feeder.corpus
        heard = in_blocks(functools.partial(_heard, name, shape, decoder, corpus), portions)
        feed = Feed(heard, f"{words}, {corpus} to the decoder", corpus.unigram_entropy)
        return feed, output_loss if feeder.kind == "seq2seq" else None
    silent = functools.partial(_silent, name, shape)
    return Feed(in_blocks(silent, portions), words).noting("no loss: the model has no head"), None


def _silent(name: str, shape: tuple[int, ...], portions: Portions) -> Iterator[Batch]:
    for tensor in noise(shape, portions.seed):
        yield {name: tensor}


def _labelled(name: str, shape: tuple[int, ...], classes: int, portions: Portions) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(portions.seed)
    for tensor in noise(shape, portions.seed):
        yield {name: tensor, "labels": torch.randint(classes, (shape[0],), generator=generator)}


def _heard(
    name: str, shape: tuple[int, ...], decoder: str, corpus: Corpus, portions: Portions
) -> Iterator[Batch]:
    texts = corpus.windows(portions.batch_size, portions.seq_len, portions.seed)
    for tensor, ids in zip(noise(shape, portions.seed), texts, strict=False):
        yield {name: tensor, decoder: ids}


def _everything(feeder: Feeder) -> Iterator[Way]:
    """Ways to feed models with several inputs at once (CLIP): all known inputs that their forward names."""
    names = inspect.signature(feeder.model.forward).parameters
    floats = [name for name in FLOAT_INPUTS if name in names]
    texts = [
        name for name in ("input_ids", "decoder_input_ids") if name in names and feeder.corpus is not None
    ]
    if len(floats) + len(texts) < 2:
        return
    portions = feeder.portions
    shapes = {name: float_shapes(name, feeder.model.config, portions)[0] for name in floats}

    def batches(portions: Portions) -> Iterator[Batch]:
        noises = {name: noise(shape, portions.seed) for name, shape in shapes.items()}
        assert feeder.corpus is not None or not texts
        windows = {
            name: feeder.corpus.windows(portions.batch_size, portions.seq_len, portions.seed + i)  # type: ignore[union-attr]
            for i, name in enumerate(texts)
        }
        while True:
            yield {name: next(source) for name, source in (noises | windows).items()}

    words = [f"standard normal noise as {name} {shape}" for name, shape in shapes.items()]
    if texts:
        words.append(f"{feeder.corpus}, {portions}")
    yield Feed(in_blocks(batches, portions), "; ".join(words)).noting("no loss: the model has no head"), None


__all__ = ["Feeder", "feeder_of", "hf_subject"]
