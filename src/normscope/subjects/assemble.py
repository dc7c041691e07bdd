"""Make a Subject from a model and possible feeds: the first feed whose forward runs is used."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from normscope.errors import UsageError, describe
from normscope.subjects.fake import fake_mode_of, to_fake
from normscope.subjects.feed import Feed, Portions, placed, tensors_in
from normscope.subjects.memory import is_out_of_memory, memory_refusals, require_room_for_batch
from normscope.subjects.missing_row import missing_row
from normscope.subjects.subject import (
    LOSS_INPUTS,
    POSITIONAL,
    Batch,
    LossFn,
    Subject,
    arguments_in,
    call_model,
)
from normscope.subjects.untouched import untouched
from normscope.subjects.without_input import of_counts

_LENGTHS = tuple(2**power for power in range(4, 21))
_SHORTEST_CONTEXT = 8
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class AttemptError(UsageError):
    """The model cannot be built, fed or judged this way; another way may work."""


def shorter(portions: Portions, model: nn.Module) -> Iterator[Portions]:
    """Yield `portions`, then the same with shorter sequences, the longest first.

    Lengths are powers of two from 16, and the sizes of the model's embeddings: one may hold positions.
    """
    yield portions
    rows = {each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)}
    lengths = {*_LENGTHS, *(size for size in rows if size >= _SHORTEST_CONTEXT)}
    yield from (portions.shortened(each) for each in sorted(lengths, reverse=True) if each < portions.seq_len)


def first_that_runs(model: nn.Module, feeds: Iterable[Feed], *, seed: int, spec: str) -> Subject:
    """The Subject of the first feed whose forward and loss run; the first error if none does."""
    first: AttemptError | None = None
    for feed in feeds:
        try:
            return assemble(model, feed, seed=seed, spec=spec)
        except AttemptError as error:
            first = first or error
    raise first or AttemptError(
        f'"{spec}" ({type(model).__name__})',
        "a model of text, images or sound",
        "wrap it in a factory that returns (module, batch), file.py:factory",
    )


def assemble(model: nn.Module, feed: Feed, *, seed: int, spec: str) -> Subject:
    """Make the Subject of one feed and run one forward in eval mode; AttemptError if that fails."""
    device, dtype = where_and_what(model)
    mode = fake_mode_of(model)
    feed = feed.map(lambda each: placed(to_fake(each, mode), device, dtype))
    subject = Subject(
        model=model,
        batch=next(feed.batches()),
        loss_fn=feed.loss_fn,
        batches=feed.batches,
        seed=seed,
        spec=spec,
        input=feed.input,
        unigram_entropy=feed.unigram_entropy,
        notes=feed.notes,
        validation=feed.validation,
        has_own_batches=feed.is_given,
        without_input=None if feed.counts is None else of_counts(feed.counts),
    )
    if feed.validation is not None:
        next(feed.validation())  # a part too short for one sequence fails now, not during training
    words = f'"{spec}" on {feed.input}'
    try_forward(model, subject.batch, feed.loss_fn, given=words, is_own=feed.is_given)
    return subject


def where_and_what(model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Device of the first parameter or buffer, and dtype of the first floating one."""
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    return device, next((t.dtype for t in tensors if t.is_floating_point()), None)


@contextlib.contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Context for a trial forward: eval mode, no graph, no fused encoder, prints to stderr; all restored."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    eager = torch.compiler.set_stance("force_eager")  # one forward is not worth a compilation
    try:
        with untouched(model), torch.no_grad(), eager, contextlib.redirect_stdout(sys.stderr):
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def try_forward(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, *, given: str, is_own: bool = False
) -> None:
    """Run one forward and loss; AttemptError if one fails, UsageError if memory runs out.

    Args:
        model, batch, loss_fn: what is tried.
        given: model and batch in words.
        is_own: whether the batch is the user's, so that no option changes it.
    """
    mode = fake_mode_of(model)
    if mode is None:
        require_room_for_batch(model, batch, given)
    with looking(model), memory_refusals(given), mode or contextlib.nullcontext():
        try:
            output = call_model(model, batch)
        except _NEEDS_VALUES:
            return  # the forward depends on values, which fake tensors lack
        except Exception as error:
            if is_out_of_memory(error):
                raise
            do = "change --batch-size or --seq-len, or let a factory return (module, batch)"
            if is_own:
                do = "change the batch or the forward"
            if isinstance(error, IndexError) and mode is None and (row := missing_row(model, batch)):
                wanted = f"ids from 0 to {row.rows - 1}"
                raise AttemptError(f"{given} ({row})", wanted, row.do if is_own else do) from error
            if isinstance(error, TypeError) and loss_fn is not None and len(tensors_in(batch)) > 1:
                do = (
                    "give the forward's arguments as a dict, "
                    f'and targets that only the loss reads under "{LOSS_INPUTS}" in it'
                )
            raise AttemptError(
                f"{given} ({describe(error)})", f"a forward that takes {shapes(batch)}", do
            ) from error
        if loss_fn is not None:
            _try_loss(loss_fn, output, batch, given)


def _try_loss(loss_fn: LossFn, output: Any, batch: Batch, given: str) -> None:
    do = "fix the loss_fn; it is called as loss_fn(output, batch)"
    try:
        loss = loss_fn(output, batch)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise AttemptError(f"loss of {given} ({describe(error)})", "a scalar tensor", do) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise AttemptError(f"loss of {given} ({type(loss).__name__}{shape})", "a scalar tensor", do)


def shapes(batch: Any) -> str:
    """Describe the batch's tensors, such as "int64 (4, 64)", with names if they have them."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, dict):
        positional = [shapes(value) for value in batch.get(POSITIONAL, ())]
        named = [f"{name}: {shapes(value)}" for name, value in arguments_in(batch)[1].items()]
        return ", ".join(positional + named)
    if isinstance(batch, tuple | list):
        return ", ".join(shapes(value) for value in batch)
    return type(batch).__name__
