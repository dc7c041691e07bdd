"""Subjects of `nn:` specs."""

from collections.abc import Iterator
from pathlib import Path

import torch

from normscope.errors import UsageError, suggest
from normscope.nn import MODELS, Decoder, EncoderDecoder, ModelConfig, Vision, load_model, set_output_bias
from normscope.nn.encoder_decoder import START
from normscope.nn.models import Model, config_of
from normscope.nn.save import read_config
from normscope.subjects.assemble import first_that_runs, shorter
from normscope.subjects.corpus import Corpus, encode
from normscope.subjects.data import CLASSIFIERS, ENCODER_DECODERS, Data
from normscope.subjects.digits import Images, require_classes
from normscope.subjects.fake import moved
from normscope.subjects.feed import Feed, Portions
from normscope.subjects.feeds import continued_feed, images_feed, masked_feed, pairs_feed
from normscope.subjects.loss import output_loss
from normscope.subjects.memory import memory_refusals, require_room_for_model
from normscope.subjects.parallel import ParallelCorpus, encode_pairs
from normscope.subjects.spec import Spec
from normscope.subjects.subject import Batch, Subject

_CONTEXT = 1024


def load_ours(
    spec: Spec, portions: Portions, data: Data, device: torch.device, dtype: torch.dtype | None, fake: bool
) -> Subject:
    """Load the model of `spec`, with batches of `data`, or of noise for a vision model without images."""
    folder = None if spec.name in MODELS else _folder(spec)
    name, options = (spec.name, dict(spec.options)) if folder is None else read_config(folder)
    if folder is None and name != "vision":
        options.setdefault("context", max(_CONTEXT, portions.seq_len))
    config = config_of(name, **options)
    given = f'model "{spec.text}"'
    _require_fitting(name, config, data, given)
    encoded = _encoded(name, config, data, portions.seq_len)
    if not fake:
        with torch.device("meta"):
            require_room_for_model(MODELS[name](config).parameters(), given, device)
    with memory_refusals(given):
        model = load_model(folder) if folder is not None and not fake else MODELS[name](config)
        if config.output_bias == "unigram" and not fake:
            _set_bias(model, encoded, given)
        moved(model, device, dtype)
    notes = ("its weights were not read",) if folder is not None and fake else ()
    feeds = (_feed(model, short, encoded).noting(*notes) for short in shorter(portions, model))
    return first_that_runs(model, feeds, seed=portions.seed, spec=spec.text)


def _folder(spec: Spec) -> Path:
    """The folder of `spec`, written by save_model."""
    folder, known = Path(spec.name), f"one of {', '.join(MODELS)}, or a folder that save_model wrote"
    if not folder.is_dir():
        raise UsageError(f'model "nn:{spec.name}"', known, suggest(spec.name, MODELS, "choose one of these"))
    for key in spec.options:
        raise UsageError(f'option "{key}" of "{spec.text}"', "no options with a folder", "leave it out")
    return folder


def _require_fitting(name: str, config: ModelConfig, data: Data, given: str) -> None:
    if data.pairs is not None and name != "encoder-decoder":
        raise UsageError(given, ENCODER_DECODERS, "take nn:encoder-decoder, or give --text")
    if data.images is not None and name != "vision":
        raise UsageError(given, CLASSIFIERS, "take nn:vision, or leave --images out")
    if data.images is not None:
        require_classes(config.classes, given, "classes")


Encoded = Corpus | ParallelCorpus | Images | None


def _encoded(name: str, config: ModelConfig, data: Data, seq_len: int) -> Encoded:
    """The data as ids that leave the mask's or the start token's id free; None: noise."""
    if name == "vision":
        return data.images
    if name == "decoder":
        return encode(data.text, config.vocab)
    reserved = (START if name == "encoder-decoder" else _mask(config),)
    if data.pairs is not None:
        return encode_pairs(data.pairs, config.vocab, seq_len, reserved)
    return encode(data.text, config.vocab, reserved)


def _mask(config: ModelConfig) -> int:
    return config.vocab - 1  # no byte of UTF-8 is 255


def _set_bias(model: Model, encoded: Encoded, given: str) -> None:
    if encoded is None or isinstance(encoded, Images):
        raise UsageError(f"{given} with output_bias=unigram", "a model of text", "leave it out")
    counts = encoded.counts[: model.config.vocab]
    set_output_bias(model, [*counts.tolist(), *[0] * (model.config.vocab - len(counts))])


def _feed(model: Model, portions: Portions, encoded: Encoded) -> Feed:
    config = model.config
    if isinstance(model, Vision):
        assert encoded is None or isinstance(encoded, Images)
        shape = (portions.batch_size, config.channels, config.image, config.image)
        return images_feed(encoded, portions, "images", shape, config.classes)
    if isinstance(encoded, ParallelCorpus):
        return pairs_feed(encoded, portions, "ids", START, decoder_mask="decoder_attention_mask")
    assert isinstance(encoded, Corpus)
    if isinstance(model, Decoder):
        return Feed.of(encoded, portions, _next_token, f"{encoded}, {portions}, next-token loss", output_loss)
    if isinstance(model, EncoderDecoder):
        goal = "the decoder to go on with the text"
        return continued_feed(encoded, portions, "ids", "labels", goal)
    return masked_feed(encoded, portions, "ids", _mask(config))


def _next_token(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, portions.seq_len + 1, portions.seed):
        yield {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
