"""`load`: make a Subject from a MODEL spec."""

import contextlib
from pathlib import Path
from typing import Any

import torch

from normscope.errors import UsageError, describe
from normscope.subjects.bare import subject_of
from normscope.subjects.data import Data, gather
from normscope.subjects.fake import fake_mode_of, faking, moved
from normscope.subjects.feed import Portions
from normscope.subjects.hf import load_hf
from normscope.subjects.memory import (
    NoRoomError,
    memory_refusals,
    require_room_for_ids,
    require_room_for_model,
)
from normscope.subjects.ours import load_ours
from normscope.subjects.python import call_factory
from normscope.subjects.rng import seeded
from normscope.subjects.spec import Spec, parse
from normscope.subjects.subject import Subject


def load(
    spec: str,
    *,
    seed: int = 0,
    batch_size: int = 4,
    seq_len: int = 64,
    text: Path | None = None,
    source: Path | None = None,
    target: Path | None = None,
    images: str | None = None,
    validation: float = 0.0,
    tokens: Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    fake: bool = False,
    find_loss: bool = True,
) -> Subject:
    """Build the model of `spec` and its batches, and run one forward to check that they fit together.

    The global generators (torch, NumPy, random) start from `seed` and are restored at the end. A user's
    factory runs as `python file.py` would run it; its prints go to stderr.

    Args:
        spec: MODEL: `nn:decoder,scheme=post`, `hf:gpt2,n_layer=24`, `hf:PATH`, `file.py:factory` or
            `package.module:factory`; option values are JSON.
        seed: seed of the weights and of the batches.
        batch_size, seq_len: sequences per batch, and tokens per sequence.
        text: a file of UTF-8 text, or a folder of them; None is the Python standard library's source.
        source, target: parallel texts for an encoder–decoder: line i of one belongs to line i of the other.
        images: "digits" feeds scikit-learn's digits to a vision model; None feeds noise.
        validation: fraction of the data, at its end, that is held out for `Subject.validation`.
        tokens: folder for the tokens of the whole text, for an `hf:PATH` with a tokenizer.json; None
            tokenises the first 256 KiB (4,096 pairs) in memory.
        device: device of model and batches.
        dtype: type of the model's floating-point tensors; None keeps the model's own.
        fake: build from fake tensors, which have shapes but no values, so that a model of any size can be
            read. Run its forwards inside `fake_mode_of(model)`.
        find_loss: whether to look for a loss where a factory gives none; see `make_subject`.

    Raises:
        UsageError: an argument, the model or the data cannot be used.
    """
    parsed = parse(spec)
    portions = Portions(batch_size, seq_len, seed)
    place = _device(device)
    require_room_for_ids(batch_size, seq_len)
    data = gather(text, source, target, images, validation, tokens)
    with seeded(seed), faking() if fake else contextlib.nullcontext():
        if parsed.kind == "hf":
            subject = load_hf(parsed, portions, data, place, dtype, fake)
        elif parsed.kind == "nn":
            subject = load_ours(parsed, portions, data, place, dtype, fake)
        else:
            subject = _load_python(parsed, portions, data, place, dtype, find_loss)
    if validation and subject.validation is None:
        subject.notes = (
            *subject.notes,
            "nothing is held out for validation: the batches are not cut from data",
        )
    return subject


def load_to_read(spec: str, *, batch_size: int = 1, **options: Any) -> Subject:
    """`load` for reading only: a model that does not fit into memory is built from fake tensors.

    Args:
        spec, batch_size, options: as in `load`, without `fake`.
    """
    try:
        return load(spec, batch_size=batch_size, **options)
    except NoRoomError:
        subject = load(spec, batch_size=batch_size, **options, fake=True)
        subject.notes = (*subject.notes, "read without creating its weights, which would not fit into memory")
        return subject


def _load_python(
    spec: Spec,
    portions: Portions,
    data: Data,
    device: torch.device,
    dtype: torch.dtype | None,
    find_loss: bool,
) -> Subject:
    given = f'model "{spec.text}"'
    with memory_refusals(given):
        model, batch, loss_fn, run = call_factory(spec)
        if fake_mode_of(model) is None:
            require_room_for_model(model.parameters(), given, device, built=True)
        moved(model, device, dtype)
        if run is not None:
            run.states_follow()
    subject = subject_of(
        model, batch, loss_fn, portions=portions, data=data, spec=spec.text, find_loss=find_loss
    )
    subject.run = run
    return subject


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f'device "{device}" ({describe(error).partition(".")[0]})',
            "a device that this machine and this PyTorch have",
            "leave --device out to use the CPU",
        ) from error
    return place
