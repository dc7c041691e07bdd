"""`nn:` specs → subjects of our own models."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from normscope.errors import UsageError, suggest
from normscope.nn import MODELS, Decoder, EncoderDecoder, ModelConfig, Vision, load_model, set_output_bias
from normscope.nn.encoder_decoder import START
from normscope.nn.models import Model, config_of
from normscope.nn.save import read_config
from normscope.subjects.assemble import Attempt, first_that_runs, lengths, shortened
from normscope.subjects.corpus import Corpus, encode
from normscope.subjects.fake import moved
from normscope.subjects.feed import Feed, Portions, noise
from normscope.subjects.loss import output_loss
from normscope.subjects.masking import masked_batches
from normscope.subjects.memory import memory_refusals, require_room_for_model
from normscope.subjects.spec import Spec
from normscope.subjects.subject import Batch, Subject
from normscope.subjects.text import Text

_CONTEXT = 1024


def load_ours(
    spec: Spec, portions: Portions, text: Text, device: torch.device, dtype: torch.dtype | None, fake: bool
) -> Subject:
    """The model `spec` names, on batches of `text`, or of noise for one that sees images."""
    folder = None if spec.name in MODELS else _folder(spec)
    name, options = (spec.name, dict(spec.options)) if folder is None else read_config(folder)
    if folder is None and name != "vision":
        options.setdefault("context", max(_CONTEXT, portions.seq_len))
    config = config_of(name, **options)
    corpus = None if name == "vision" else _corpus(name, config, text)
    given = f'model "{spec.text}"'
    if not fake:
        with torch.device("meta"):
            require_room_for_model(MODELS[name](config).parameters(), given, device)
    with memory_refusals(given):
        model = load_model(folder) if folder is not None and not fake else MODELS[name](config)
        if config.output_bias == "unigram" and not fake:
            _set_bias(model, corpus, given)
        moved(model, device, dtype)
    notes = ("its weights were not read",) if folder is not None and fake else ()
    attempts = (
        Attempt(
            _feed(model, portions.of_length(length), corpus).noting(
                *notes, *shortened(length, portions.seq_len)
            ),
            output_loss,
        )
        for length in lengths(portions.seq_len)
    )
    return first_that_runs(model, attempts, seed=portions.seed, spec=spec.text)


def _folder(spec: Spec) -> Path:
    """The folder that `spec` names instead of a model, as save_model wrote it."""
    folder, known = Path(spec.name), f"one of {', '.join(MODELS)}, or a folder that save_model wrote"
    if not folder.is_dir():
        raise UsageError(f'model "nn:{spec.name}"', known, suggest(spec.name, MODELS, "choose one of these"))
    for key in spec.options:
        raise UsageError(f'option "{key}" of "{spec.text}"', "no options beside a folder", "leave it out")
    return folder


def _corpus(name: str, config: ModelConfig, text: Text) -> Corpus:
    """The text in ids, but for the one that stands for a hidden token or the decoder's start."""
    if name == "decoder":
        return encode(text, config.vocab)
    return encode(text, config.vocab, reserved=(START if name == "encoder-decoder" else _mask(config),))


def _mask(config: ModelConfig) -> int:
    return config.vocab - 1  # no byte of UTF-8 is 255


def _set_bias(model: Model, corpus: Corpus | None, given: str) -> None:
    if corpus is None:
        raise UsageError(f"{given} with output_bias=unigram", "a model of text", "leave it out")
    counts = corpus.counts[: model.config.vocab]
    set_output_bias(model, [*counts.tolist(), *[0] * (model.config.vocab - len(counts))])


def _feed(model: Model, portions: Portions, corpus: Corpus | None) -> Feed:
    if isinstance(model, Vision):
        return _images(model, portions)
    assert corpus is not None
    batches: Callable[[], Iterator[Batch]]
    if isinstance(model, Decoder):
        goal = "next-token loss"
        batches = lambda: _next_token(corpus, portions)  # noqa: E731
    elif isinstance(model, EncoderDecoder):
        goal = "the decoder to go on with the text"
        batches = lambda: _continued(corpus, portions)  # noqa: E731
    else:
        goal, mask = "15 % masked", _mask(model.config)
        batches = lambda: masked_batches(corpus, portions, mask, "ids", "labels")  # noqa: E731
    return Feed(batches, f"{corpus}, {portions}, {goal}", corpus.unigram_entropy)


def _next_token(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, portions.seq_len + 1, portions.seed):
        yield {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def _continued(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
    for ids in corpus.windows(portions.batch_size, 2 * portions.seq_len, portions.seed):
        first, second = ids.chunk(2, dim=1)
        yield {"ids": first.contiguous(), "labels": second.contiguous()}


def _images(model: Vision, portions: Portions) -> Feed:
    config = model.config
    shape = (portions.batch_size, config.channels, config.image, config.image)

    def batches() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(portions.seed)
        for images in noise(shape, portions.seed):
            labels = torch.randint(config.classes, shape[:1], generator=generator)
            yield {"images": images, "labels": labels}

    return Feed(batches, f"standard normal noise as images {shape}, random labels")
