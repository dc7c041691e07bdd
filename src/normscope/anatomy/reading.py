"""`read_anatomy`: read the anatomy of a model; one file per step.

record     one forward → a graph of ops              (record, graph, calls, opaque)
norms      which ops are norms                       (norms)
residual   which adds are residual sums              (residual, several)
branches   kind of each branch, norms at its ends    (branches, gates, attention, projections)
streams    which sum follows which, norms between    (streams, nesting)
blocks     which sums make a block                   (blocks)
schemes    catalogue names, of a branch, of a stack  (schemes, inside)
assemble   the frozen types of the contract          (assemble)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from normscope.anatomy.assemble import NO_RESIDUAL_SUM, assemble
from normscope.anatomy.graph import Graph
from normscope.anatomy.measuring import measuring
from normscope.anatomy.record import record
from normscope.anatomy.types import Anatomy
from normscope.collecting import collection_paused
from normscope.errors import UsageError
from normscope.subjects.subject import Batch, Subject, call_model
from normscope.subjects.untouched import untouched


def read_anatomy(model_or_subject: nn.Module | Subject, batch: Batch | None = None) -> Anatomy:
    """Read the residual stream of a model from the dataflow of one forward in eval mode.

    Args:
        model_or_subject: any module, or a subject (whose batch is used unless one is given).
        batch: a tensor, a tuple of arguments, or a mapping of keyword arguments; None for one made by
            `make_subject`.

    Raises:
        UsageError: no batch can be made.
        Exception: whatever the model's forward raises on this batch.

    The model is restored. A model without residual adds gives an anatomy without stacks and a line in
    `unread`. A model with parameters made under a `FakeTensorMode` is read without memory for them.
    """
    if isinstance(model_or_subject, Subject):
        model, batch = model_or_subject.model, model_or_subject.batch if batch is None else batch
    else:
        model = model_or_subject
        if batch is None:
            from normscope.subjects import make_subject

            batch = make_subject(model).batch
    with collection_paused():
        return assemble(record_forward(model, batch))


def record_forward(model: nn.Module, batch: Batch, with_dropouts: bool = False) -> Graph:
    """The graph of one forward of `model` on `batch`, see `record`; buffers and random state are restored."""
    with _same_world(model, batch) as here, untouched(model), measuring(model):
        return record(model, lambda: call_model(model, here), here, with_dropouts)


@contextmanager
def _same_world(model: nn.Module, batch: Any) -> Iterator[Any]:
    """The batch as fake or meta tensors where the model's parameters are such."""
    parameter = next(model.parameters(), None)
    if isinstance(parameter, FakeTensor):
        mode = parameter.fake_mode
        with mode:
            yield tree_map_only(
                torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t), batch
            )
    elif parameter is not None and parameter.device.type == "meta":
        yield tree_map_only(torch.Tensor, lambda t: t.to("meta"), batch)
    else:
        yield batch


def require_residual_stream(anatomy: Anatomy, given: str) -> None:
    """Raise UsageError for a model without a residual stream; accept a model that could not be read."""
    if anatomy.unread == (NO_RESIDUAL_SUM,) and not anatomy.stacks:
        raise UsageError(
            f"{given} ({NO_RESIDUAL_SUM})",
            "a model with a residual stream, x + F(x)",
            "give the whole Transformer, not a part of it",
        )
