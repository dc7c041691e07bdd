"""Ids of a batch that an embedding has no row for."""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normscope.subjects.feed import tensors_in
from normscope.subjects.subject import Batch, call_model


class MissingRow(NamedTuple):
    """The `id` of a row that the embedding at `path` does not have."""

    path: str
    rows: int
    id: int
    is_in_batch: bool

    @property
    def do(self) -> str:
        """Advice; positions are not in the batch."""
        return f"give it more rows, or {'smaller ids' if self.is_in_batch else 'shorter sequences'}"

    def __str__(self) -> str:
        return f'id {self.id} for the embedding "{self.path}", which has {self.rows} rows'


def missing_row(model: nn.Module, batch: Batch) -> MissingRow | None:
    """The row that an embedding lacks, where a forward on the batch asks for one; None if none does."""
    found: list[MissingRow] = []
    ends = {int(value) for each in tensors_in(batch) if _is_of_ids(each) for value in each.aminmax()}

    def look(module: nn.Module, given: tuple[Any, ...], path: str, rows: int) -> None:
        for ids in filter(_is_of_ids, tensors_in(given)):
            smallest, largest = map(int, ids.aminmax())
            for asked in (largest, smallest):
                if not 0 <= asked < rows:
                    found.append(MissingRow(path, rows, asked, asked in ends))

    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                hook = functools.partial(look, path=path, rows=module.num_embeddings)
                hooks.enter_context(module.register_forward_pre_hook(hook))
        with contextlib.suppress(Exception):  # the error that is looked for
            call_model(model, batch)
    return next(iter(found), None)


def _is_of_ids(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.dtype in (torch.int64, torch.int32)
