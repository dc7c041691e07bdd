"""A stand-in for a subject: a copy in fake tensors, which takes no memory, or in real ones."""

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from normscope.subjects import Subject, fake_mode_of
from normscope.subjects.fake import fake_from_meta, faking, to_fake
from normscope.subjects.feed import map_tensors, tensors_in, tensors_of
from normscope.train import working_copy

_SHORT = 32
"""Tokens that are enough to read where the norms sit."""


@contextlib.contextmanager
def fake_stand_in(subject: Subject) -> Iterator[Subject]:
    """The subject in fake tensors, inside their mode; a subject that is fake already is given itself.

    Raises:
        Exception: whatever the model raises where it is copied.
    """
    mode, are_whole = fake_mode_of(subject.model), _masks_are_whole(subject.batch)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
        else:
            mode = stack.enter_context(faking())
            model = _fake_copy(subject.model, mode)
            subject = dataclasses.replace(subject, model=model, batch=to_fake(subject.batch, mode))
        stack.enter_context(_masks_as_of_real_tensors(subject.batch, are_whole))
        yield subject


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    if next((p.device.type for p in model.parameters()), None) == "meta":
        return fake_from_meta(copy.deepcopy(model), mode)
    with FakeCopyMode(mode):
        twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    return twin


def _masks_are_whole(batch: Any) -> bool:
    """Whether every mask in a batch of keyword arguments is known to mask nothing; True without masks."""
    masks = [each for name, each in batch.items() if "mask" in name] if isinstance(batch, Mapping) else []
    return all(
        isinstance(each, torch.Tensor) and not isinstance(each, FakeTensor) and bool(each.all())
        for each in masks
    )


@contextlib.contextmanager
def _masks_as_of_real_tensors(batch: Any, are_whole: bool) -> Iterator[None]:
    """Let transformers leave out masks that mask nothing, as it does for real tensors.

    It cannot see in fake position ids that nothing is packed, nor in a fake mask of ones that nothing is
    masked. It then makes a mask of tokens by tokens, for which it repeats the keys and values of
    grouped-query attention.
    """
    masking = sys.modules.get("transformers.masking_utils")
    replaced: dict[str, Any] = {}
    if not (isinstance(batch, Mapping) and "position_ids" in batch):
        replaced["find_packed_sequence_indices"] = lambda position_ids: None
    if are_whole:
        for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
            replaced[name] = _as_without_mask(getattr(masking, name, None))
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            if hasattr(masking, name):
                stack.enter_context(mock.patch.object(masking, name, function))
        yield


def _as_without_mask(ignores: Any) -> Any:
    """The function of transformers that says whether a mask can be left out, for a mask of ones."""

    def of_ones(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(ignores(None, *args, **kwargs))

    return of_ones


@contextlib.contextmanager
def real_stand_in(subject: Subject) -> Iterator[Subject]:
    """The subject with a copy of its model, for models that fake tensors cannot run."""
    with working_copy(subject.model) as model:
        yield dataclasses.replace(subject, model=model)


def num_sequences(subject: Subject) -> int | None:
    """Length of the first axis of the batch's first tensor; None without one."""
    first = next((t for t in tensors_of(subject.batch) if t.ndim), None)
    return None if first is None else first.shape[0]


def with_sequences(subject: Subject, count: int) -> Subject:
    """The subject with the first `count` sequences of its batch."""
    whole = num_sequences(subject)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:count].clone() if tensor.ndim and tensor.shape[0] == whole else tensor

    return dataclasses.replace(subject, batch=map_tensors(cut, subject.batch))


def to_read(subject: Subject) -> Subject:
    """The subject with a smaller batch, enough to read the anatomy: one sequence, short if all is of ids."""
    tensors = tensors_in(subject.batch)
    if len({t.shape for t in tensors}) == 1 and all(
        t.ndim == 2 and not t.is_floating_point() for t in tensors
    ):
        batch = map_tensors(lambda t: t[:1, :_SHORT].clone(), subject.batch)
        return dataclasses.replace(subject, batch=batch)
    return with_sequences(subject, 1)
