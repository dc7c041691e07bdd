"""Inputs for a model of transformers, by its head."""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from normscope.nn.output import IGNORED
from normscope.subjects.assemble import AttemptError, first_that_runs, looking, shorter
from normscope.subjects.corpus import Corpus, encode
from normscope.subjects.data import CLASSIFIERS, ENCODER_DECODERS, Data
from normscope.subjects.digits import Images, require_classes
from normscope.subjects.fake import fake_mode_of
from normscope.subjects.feed import Feed, Portions, in_blocks, noise
from normscope.subjects.feeds import continued_feed, images_feed, masked_feed, pairs_feed
from normscope.subjects.found_loss import without_loss
from normscope.subjects.hf_heads import HeadKind
from normscope.subjects.hf_shapes import FLOAT_INPUTS, float_shapes
from normscope.subjects.loss import Ids, is_causal, output_loss, shifts_labels
from normscope.subjects.parallel import ParallelCorpus, encode_pairs
from normscope.subjects.subject import Batch, Subject, call_model
from normscope.subjects.tokens import tokenised, tokenised_pairs

_FEW_SEQUENCES, _FEW_TOKENS = 2, 16
_NO_HEAD = ("no loss: the model has no head",)
_NOT_CAUSAL = "the model sees later tokens, and its own loss assumes that it does not"


@dataclass(frozen=True)
class Feeder:
    """A model of transformers, its head, and its text (None if it has no vocabulary).

    Attributes:
        pairs, images: data that replace the text.
        mask: the id of a hidden token: the model's own, else one that no byte uses.
        aligned: whether a causal model's own loss compares the logits at t with the label at t (TrOCR), so
            that the labels must be the next ids.
    """

    model: Any
    kind: HeadKind
    portions: Portions
    corpus: Corpus | None
    mask: int = 0
    pairs: ParallelCorpus | None = None
    images: Images | None = None
    aligned: bool = False

    @property
    def main(self) -> str:
        """Name of the model's main input; some models declare one that their forward does not take."""
        declared = getattr(self.model, "main_input_name", "input_ids")
        taken = inspect.signature(self.model.forward).parameters
        return next((name for name in (declared, "input_ids", *FLOAT_INPUTS) if name in taken), declared)

    @property
    def two_stacks(self) -> bool:
        """True if there is a decoder that reads an encoder."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))


def feeder_of(model: Any, kind: HeadKind, portions: Portions, data: Data, folder: Path | None) -> Feeder:
    """Collect what a feed needs; the text uses the model's own tokens if `folder` has a tokenizer.json."""
    _require_fitting(Feeder(model, kind, portions, None), data)
    vocabulary = _vocabulary(model)
    if vocabulary is None:
        return Feeder(model, kind, portions, None, images=data.images)
    own_mask, pad = (getattr(model.config, name, None) for name in ("mask_token_id", "pad_token_id"))
    mask = own_mask if isinstance(own_mask, int) and 0 <= own_mask < vocabulary else vocabulary - 1
    reserved = {mask, pad} if isinstance(pad, int) else {mask}
    tokenizer = folder / "tokenizer.json" if folder else None
    pairs = None
    if tokenizer is not None and tokenizer.is_file():
        corpus = tokenised(data.text, tokenizer, vocabulary, data.tokens)
        if data.pairs is not None:
            pairs = tokenised_pairs(data.pairs, tokenizer, vocabulary, portions.seq_len, data.tokens)
    else:
        corpus = encode(data.text, vocabulary, reserved)
        if data.pairs is not None:
            pairs = encode_pairs(data.pairs, vocabulary, portions.seq_len, reserved)
    return Feeder(model, kind, portions, corpus, mask, pairs, data.images)


def _require_fitting(feeder: Feeder, data: Data) -> None:
    """Raise AttemptError if the chosen data do not fit this model; another head may fit."""
    given = f"{type(feeder.model).__name__} ({feeder.kind})"
    reads_text = feeder.kind == "seq2seq" and feeder.two_stacks and feeder.main not in FLOAT_INPUTS
    if data.pairs is not None and not reads_text:
        raise AttemptError(given, ENCODER_DECODERS, "take hf:t5 or hf:bart, or give --text")
    if data.images is not None and feeder.kind != "image-classification":
        raise AttemptError(given, CLASSIFIERS, "take hf:vit, or leave --images out")
    if data.images is not None:
        require_classes(feeder.model.config.num_labels, given, "num_labels")


def _most_positions(model: Any) -> int | None:
    """The longest sequence for which the model's table of learnt positions suffices; None without a table.

    It is an embedding with as many rows as the config has positions, or up to 4 more (OPT, BART), and not
    that of the tokens. Positions begin after the padding's row, if there is one (RoBERTa).
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    vocabulary = _vocabulary(model)
    for module in model.modules():
        rows = module.num_embeddings if isinstance(module, nn.Embedding) else None
        if rows is not None and rows != vocabulary and most <= rows < most + 5:
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(most, rows - first)
    return None


def _vocabulary(model: Any) -> int | None:
    """Number of ids; None for images and sounds, 256 if ids are Unicode characters (CANINE)."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        return 256 if "input_ids" in inspect.signature(model.forward).parameters else None
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except (NotImplementedError, AttributeError):  # what transformers raises where there is none
        return size
    return min(size, weight.shape[0]) if weight is not None and weight.ndim == 2 else size


def hf_subject(feeder: Feeder, spec: str, notes: tuple[str, ...] = ()) -> Subject:
    """The Subject of the first feed that the model's forward takes."""
    subject = _first(feeder, spec, notes)
    if feeder.kind != "causal" or fake_mode_of(feeder.model) is not None:
        return subject
    if _is_causal(subject):
        aligned = _shifts(feeder.model, subject.batch) is False
        return _first(dataclasses.replace(feeder, aligned=True), spec, notes) if aligned else subject
    masked = _first(dataclasses.replace(feeder, kind="masked"), spec, notes)
    if _shifts(feeder.model, masked.batch) is False:
        return masked
    return without_loss(subject, _NOT_CAUSAL)


def _shifts(model: Any, batch: Batch) -> bool | None:
    """Whether the model's own loss compares the logits at t with the label at t + 1; None if unknown."""
    assert isinstance(batch, dict)
    with looking(model):
        return shifts_labels(call_model(model, batch), batch["labels"])


def _first(feeder: Feeder, spec: str, notes: tuple[str, ...]) -> Subject:
    feeds = (feed.noting(*notes) for feed in _feeds(feeder))
    return first_that_runs(feeder.model, feeds, seed=feeder.portions.seed, spec=spec)


def _is_causal(subject: Subject) -> bool:
    """True if the model is causal; tested on a few short sequences, or at full length if those fail."""
    assert isinstance(subject.batch, dict)
    ids = subject.batch["input_ids"][:_FEW_SEQUENCES]
    with looking(subject.model):
        try:
            return is_causal(subject.model, {"input_ids": ids[:, :_FEW_TOKENS]}, Ids("input_ids"))
        except (RuntimeError, ValueError, AssertionError, IndexError):
            return is_causal(subject.model, {"input_ids": ids}, Ids("input_ids"))


def _feeds(feeder: Feeder) -> Iterator[Feed]:
    if feeder.main not in FLOAT_INPUTS and feeder.corpus is not None:
        most = _most_positions(feeder.model)
        for short in shorter(feeder.portions, feeder.model):
            if most is not None and short.seq_len > most:
                continue  # a real forward fails; a fake one cannot see it
            feed = _text_feed(dataclasses.replace(feeder, portions=short), feeder.corpus)
            yield _started(feed, feeder.model.config) if feeder.kind == "seq2seq" else feed
    if feeder.main in FLOAT_INPUTS:
        for shape in float_shapes(feeder.main, feeder.model.config, feeder.portions):
            yield _float_feed(feeder, feeder.main, shape)
    if feeder.kind == "base":
        yield from _everything(feeder)


def _text_feed(feeder: Feeder, corpus: Corpus) -> Feed:
    name, portions, kind = feeder.main, feeder.portions, feeder.kind
    if feeder.pairs is not None:
        pad = getattr(feeder.model.config, "pad_token_id", None)
        return pairs_feed(feeder.pairs, portions, name, pad if isinstance(pad, int) else 0)
    if kind == "masked":
        return masked_feed(corpus, portions, name, feeder.mask)
    if kind == "causal":
        words = f"{corpus}, {portions}, next-token loss"
        return Feed.of(corpus, portions, _shifted if feeder.aligned else _causal, words, output_loss)
    if kind == "seq2seq":
        goal = "the decoder to go on with the text"
        return continued_feed(corpus, portions, name, "labels", goal)
    if feeder.two_stacks:
        return continued_feed(corpus, portions, name, "decoder_input_ids", "half to the decoder")

    def plain(portions: Portions) -> Iterator[Batch]:
        for ids in corpus.windows(portions.batch_size, portions.seq_len, portions.seed):
            yield {name: ids}

    return Feed(in_blocks(plain, portions), f"{corpus}, {portions}", notes=_NO_HEAD)


def _started(feed: Feed, config: Any) -> Feed:
    """`feed` with the decoder's inputs where transformers cannot make them from the labels.

    It shifts them only if the config has `decoder_start_token_id` and `pad_token_id`; a `T5Config()` built in
    code has only the second, with which T5 starts.
    """
    start, pad = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    if isinstance(start, int) and isinstance(pad, int):
        return feed
    padding = pad if isinstance(pad, int) else 0
    first = start if isinstance(start, int) else padding

    def shifted(batch: Batch) -> Batch:
        assert isinstance(batch, dict)
        ids = batch["labels"].roll(1, dims=1)
        ids[:, 0] = first
        return batch | {"decoder_input_ids": ids.masked_fill(ids == IGNORED, padding)}

    lacking = "pad_token_id" if isinstance(start, int) else "decoder_start_token_id"
    return feed.map(shifted).noting(f"the config has no {lacking}: the decoder starts with id {first}")


def _causal(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, portions.seq_len, portions.seed):
        yield {"input_ids": ids, "labels": ids.clone()}  # the model shifts them


def _shifted(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, portions.seq_len + 1, portions.seed):
        yield {
            "input_ids": ids[:, :-1].contiguous(),
            "labels": ids[:, 1:].contiguous(),
        }  # the model does not shift them


def _float_feed(feeder: Feeder, name: str, shape: tuple[int, ...]) -> Feed:
    portions, corpus, is_seq2seq = feeder.portions, feeder.corpus, feeder.kind == "seq2seq"
    images = feeder.images if len(shape) == 4 else None
    if images is not None or feeder.kind == "image-classification":
        return images_feed(images, portions, name, shape, feeder.model.config.num_labels)
    decoder = "labels" if is_seq2seq else "decoder_input_ids"
    is_heard = corpus is not None and (is_seq2seq or feeder.two_stacks)

    def batches(portions: Portions) -> Iterator[Batch]:
        texts: Iterator[Tensor | None] = itertools.repeat(None)
        if corpus is not None and is_heard:
            texts = corpus.windows(portions.batch_size, portions.seq_len, portions.seed)
        for tensor, ids in zip(noise(shape, portions.seed), texts, strict=False):
            yield {name: tensor} if ids is None else {name: tensor, decoder: ids}

    words = f"standard normal noise as {name} {shape}"
    if corpus is None or not is_heard:
        return Feed(in_blocks(batches, portions), words, notes=_NO_HEAD)
    words, loss_fn = f"{words}, {corpus} to the decoder", output_loss if is_seq2seq else None
    return Feed(in_blocks(batches, portions), words, corpus.unigram_entropy, loss_fn=loss_fn)


def _everything(feeder: Feeder) -> Iterator[Feed]:
    """Feeds for models with several inputs (CLIP): all known inputs that their forward names."""
    names = inspect.signature(feeder.model.forward).parameters
    floats = [name for name in FLOAT_INPUTS if name in names]
    corpus, portions = feeder.corpus, feeder.portions
    texts = [name for name in ("input_ids", "decoder_input_ids") if name in names and corpus is not None]
    if len(floats) + len(texts) < 2:
        return
    shapes = {name: float_shapes(name, feeder.model.config, portions)[0] for name in floats}
    end = _end_of_text(feeder.model)

    def batches(portions: Portions) -> Iterator[Batch]:
        sources = {name: noise(shape, portions.seed) for name, shape in shapes.items()}
        for i, name in enumerate(texts):
            assert corpus is not None
            windows = corpus.windows(portions.batch_size, portions.seq_len, portions.seed + i)
            sources[name] = windows if end is None else (_ended(ids, end) for ids in windows)
        while True:
            yield {name: next(source) for name, source in sources.items()}

    words = [f"standard normal noise as {name} {shape}" for name, shape in shapes.items()]
    if texts:
        words.append(f"{corpus}, {portions}")
    yield Feed(in_blocks(batches, portions), "; ".join(words), notes=_NO_HEAD)


def _end_of_text(model: Any) -> int | None:
    """The id that ends a text, None where the model has none or no embedding for it."""
    end, vocabulary = getattr(model.config.get_text_config(), "eos_token_id", None), _vocabulary(model)
    return end if isinstance(end, int) and vocabulary is not None and 0 <= end < vocabulary else None


def _ended(ids_BT: Tensor, end: int) -> Tensor:
    """Texts that end as the model expects: CLIP reads the token at the end, else the first one."""
    ids_BT = ids_BT.clone()
    ids_BT[:, -1] = end
    return ids_BT
