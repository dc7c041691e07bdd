"""A stand-in for a subject: a copy in fake tensors, which takes no memory, or in real ones."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from normscope.subjects import Subject, fake_mode_of
from normscope.subjects.fake import fake_from_meta, faking, to_fake
from normscope.train import working_copy


@contextlib.contextmanager
def fake_stand_in(subject: Subject) -> Iterator[Subject]:
    """The subject in fake tensors, inside their mode; a subject that is fake already is given itself.

    Raises:
        Exception: whatever the model raises where it is copied.
    """
    mode = fake_mode_of(subject.model)
    if mode is not None:
        with mode:
            yield subject
        return
    with faking() as mode:
        model = _fake_copy(subject.model, mode)
        yield dataclasses.replace(subject, model=model, batch=to_fake(subject.batch, mode))


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    if next((p.device.type for p in model.parameters()), None) == "meta":
        return fake_from_meta(copy.deepcopy(model), mode)
    with FakeCopyMode(mode):
        twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    return twin


@contextlib.contextmanager
def real_stand_in(subject: Subject) -> Iterator[Subject]:
    """The subject with a copy of its model, for models that fake tensors cannot run."""
    with working_copy(subject.model) as model:
        yield dataclasses.replace(subject, model=model)


def num_sequences(subject: Subject) -> int | None:
    """Length of the first axis of the batch's first tensor; None without one."""
    first = next((t for t in _tensors(subject) if t.ndim), None)
    return None if first is None else first.shape[0]


def _tensors(subject: Subject) -> Iterator[torch.Tensor]:
    from normscope.subjects.feed import tensors_of

    return tensors_of(subject.batch)


def with_sequences(subject: Subject, count: int) -> Subject:
    """The subject with the first `count` sequences of its batch."""
    from normscope.subjects.feed import map_tensors

    whole = num_sequences(subject)
    batch = map_tensors(lambda t: t[:count].clone() if t.ndim and t.shape[0] == whole else t, subject.batch)
    return dataclasses.replace(subject, batch=batch)
