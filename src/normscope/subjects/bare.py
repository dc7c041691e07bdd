"""`make_subject`: make a Subject of a module that is already built, with or without a batch."""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.subjects.assemble import (
    AttemptError,
    assemble,
    first_that_runs,
    looking,
    shapes,
    shorter,
    where_and_what,
)
from normscope.subjects.corpus import Corpus, encode
from normscope.subjects.data import Data, gather
from normscope.subjects.fake import fake_mode_of
from normscope.subjects.feed import Feed, Portions, Replay, in_blocks, noise
from normscope.subjects.found_loss import with_found_loss
from normscope.subjects.given import require_module
from normscope.subjects.guess import (
    Arguments,
    arguments_of,
    float_widths,
    image_shapes,
    pattern_ids,
    vocabulary_of,
)
from normscope.subjects.loss import own_loss, shifts_labels
from normscope.subjects.masks import masked_feeds
from normscope.subjects.own_run import Run
from normscope.subjects.repeats import SINGLE
from normscope.subjects.subject import Batch, LossFn, Subject, call_model
from normscope.subjects.targets import num_random_ids
from normscope.subjects.text import Text

_NOISE = "no loss: the input is noise"


def make_subject(
    model: nn.Module | Run,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    *,
    seed: int = 0,
    batch_size: int = 4,
    seq_len: int = 64,
    text: Path | None = None,
    spec: str | None = None,
    find_loss: bool = True,
) -> Subject:
    """Make a Subject of a bare module; one forward in eval mode checks that module and batch fit together.

    Without a batch, the module gets byte ids (B, T) of the text, or, if it takes floats, standard normal
    noise (B, T, d) or (B, C, H, W). Without a `loss_fn`, the model's own loss is used (a scalar in its
    output). If it has none, next-token loss is used, provided that the output is (B, T, V) logits and no
    token sees a later one. Else the Subject's `loss_fn` is None, and a note gives the reason.

    Args:
        model: the module, or a Run, which brings its batches and its loss; it is not changed.
        batch: a tensor, a tuple of arguments, a mapping of keyword arguments, or an iterable of those.
        loss_fn: `loss_fn(output, batch)` → scalar.
        seed, batch_size, seq_len, text: settings of the batches that are made when none is given.
        spec: name of the model; by default its class.
        find_loss: whether to look for a loss where none is given, which takes up to six more forwards.

    Raises:
        UsageError: the forward or the loss fails on the batch, or needs too much memory; or a batch or a loss
            is given together with a Run.
    """
    if isinstance(model, Run):
        if batch is not None or loss_fn is not None:
            raise UsageError(
                "a Run together with a batch or a loss_fn",
                "either a Run, or a module with its batch and loss_fn",
                "put them into the Run (batches=…, loss=…)",
            )
        subject = make_subject(
            model.model,
            model.batches,
            model.loss,
            seed=seed,
            batch_size=batch_size,
            seq_len=seq_len,
            text=text,
            spec=spec,
            find_loss=find_loss,
        )
        subject.run = model
        return subject
    require_module(model)
    return subject_of(
        model,
        batch,
        loss_fn,
        portions=Portions(batch_size, seq_len, seed),
        data=gather(text),
        spec=spec or type(model).__name__,
        find_loss=find_loss,
    )


def subject_of(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    *,
    portions: Portions,
    data: Data,
    spec: str,
    find_loss: bool = True,
) -> Subject:
    """`make_subject` with data that are already loaded."""
    hf = sys.modules.get("transformers")  # a model of transformers has imported it
    # a class of the user's own that derives from PreTrainedModel alone has none of the heads of transformers
    has_head = any(each.__module__.startswith("transformers.models.") for each in type(model).__mro__)
    is_of_transformers = hf is not None and isinstance(model, hf.PreTrainedModel) and has_head
    is_fed_by_head = batch is None and loss_fn is None and is_of_transformers
    if not is_fed_by_head and (data.pairs is not None or data.images is not None):
        raise UsageError(
            f'"{spec}" with {"--images" if data.pairs is None else "--source and --target"}',
            "a model of nn: or hf:, whose inputs are known",
            "let the factory return (module, batches, loss_fn)",
        )
    if is_fed_by_head:
        from normscope.subjects.hf_feed import feeder_of, hf_subject
        from normscope.subjects.hf_heads import head_kind_of

        return hf_subject(feeder_of(model, head_kind_of(model), portions, data, None), spec)
    if batch is not None:
        subject = assemble(model, _given_feed(batch, loss_fn, spec), seed=portions.seed, spec=spec)
    else:
        feeds = (dataclasses.replace(feed, loss_fn=loss_fn) for feed in _feeds(model, portions, data.text))
        try:
            subject = first_that_runs(model, feeds, seed=portions.seed, spec=spec)
        except AttemptError as error:
            required = ", ".join(arguments_of(model).required)
            do = f"let a factory return (module, batch), with the batch ({required})"
            raise AttemptError(error.given, error.expected, do if "," in required else error.do) from error
    if not find_loss or loss_fn is not None or fake_mode_of(model) is not None or _NOISE in subject.notes:
        return subject
    return with_found_loss(subject)


def _given_feed(batch: Any, loss_fn: LossFn | None, spec: str) -> Feed:
    single = isinstance(batch, Tensor | tuple | Mapping)
    if not single and not isinstance(batch, Iterable):
        raise UsageError(
            f"a batch of type {type(batch).__name__}",
            "a tensor, a tuple of arguments, a mapping of keyword arguments, or an iterable of those",
            "change the batch",
        )
    replay = Replay([batch] if single else batch)
    seen = list(itertools.islice(replay(), 1))
    if not seen:
        raise UsageError(
            f'"{spec}" with an iterator of batches that is empty', "at least one batch", "give one"
        )
    first = seen[0]
    if not isinstance(first, Tensor | tuple | list | Mapping):
        raise UsageError(
            f'"{spec}" with an iterator that gives {type(first).__name__}',
            "batches: a tensor, a tuple of arguments or a mapping of keyword arguments",
            "change the iterator",
        )
    words = f"the {'batch' if single else 'batches'} given, {shapes(first)}"
    if (size := num_random_ids(first)) is not None:
        words += f", ids that look random: as even as uniform draws from {size}"
    notes = (SINGLE,) if single else replay.notes
    return Feed(replay, words, notes=notes, loss_fn=loss_fn, is_given=True)


def _feeds(model: nn.Module, portions: Portions, text: Text) -> Iterator[Feed]:
    """Yield feeds of ids if the module has an embedding, else of images if it convolves, else of floats."""
    arguments = arguments_of(model)
    vocabulary = _vocabulary(model, arguments, portions)
    if vocabulary is not None:
        corpus = encode(text, vocabulary)
        for short in shorter(portions, model):
            if arguments.labels is not None:
                yield from _labelled_feeds(model, arguments, corpus, short)
            if arguments.masks:
                yield from masked_feeds(model, arguments.masks, corpus, short)
            else:
                yield _ids_feed(corpus, short, arguments.num_inputs)
        return
    found = image_shapes(model, portions)
    found += [(portions.batch_size, portions.seq_len, width) for width in float_widths(model)]
    if not found:
        raise UsageError(
            f'model of class "{type(model).__name__}"',
            "a module with an embedding, a norm or a linear map, which show the shape of its input",
            "give a batch: let the factory return (module, batch)",
        )
    for shape in found:
        yield _noise_feed(shape, portions, arguments.num_inputs)


def _vocabulary(model: nn.Module, arguments: Arguments, portions: Portions) -> int | None:
    if fake_mode_of(model) is not None:  # a lookup of fake ids cannot be recognised by their values
        return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
    device, _ = where_and_what(model)
    for short in shorter(portions, model):
        ids = pattern_ids(short.seq_len, device)
        rows = vocabulary_of(model, (ids,) * arguments.num_inputs, ids)
        if rows is not None:
            return rows
    return None


def _ids_feed(corpus: Corpus, portions: Portions, num_inputs: int) -> Feed:
    def batches(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
        for ids in corpus.windows(portions.batch_size, num_inputs * portions.seq_len, portions.seed):
            yield (
                ids if num_inputs == 1 else tuple(part.contiguous() for part in ids.chunk(num_inputs, dim=1))
            )

    return Feed.of(corpus, portions, batches, f"{corpus}, {portions}")


def _labelled_feeds(
    model: nn.Module, arguments: Arguments, corpus: Corpus, portions: Portions
) -> Iterator[Feed]:
    """Feed of ids with the next ids as labels, for a `forward(ids, targets=None)` that computes its own loss.

    Some models compare logits at t with the label at t (nanoGPT), others with that at t + 1 (transformers).
    """
    first, name = arguments.first, arguments.labels
    assert name is not None
    device, _ = where_and_what(model)
    ids = next(corpus.windows(portions.batch_size, portions.seq_len, portions.seed)).to(device)
    with looking(model):
        try:
            output = call_model(model, {first: ids, name: ids})
        except Exception:  # the model does not take such labels
            return
    if own_loss(output) is None:
        return
    shifts = shifts_labels(output, ids)
    if shifts is None:
        shifts = name.startswith("label")

    def batches(corpus: Corpus, portions: Portions) -> Iterator[Batch]:
        for ids in corpus.windows(portions.batch_size, portions.seq_len + (not shifts), portions.seed):
            labels = ids if shifts else ids[:, 1:]
            yield {first: ids[:, : portions.seq_len].contiguous(), name: labels.contiguous()}

    yield Feed.of(corpus, portions, batches, f"{corpus}, {portions}, the next ids as {name}")


def _noise_feed(shape: tuple[int, ...], portions: Portions, num_inputs: int) -> Feed:
    def batches(portions: Portions) -> Iterator[Batch]:
        sources = [noise(shape, portions.seed + index) for index in range(num_inputs)]
        while True:
            parts = tuple(next(source) for source in sources)
            yield parts[0] if num_inputs == 1 else parts

    return Feed(in_blocks(batches, portions), f"standard normal noise {shape}", notes=(_NOISE,))
