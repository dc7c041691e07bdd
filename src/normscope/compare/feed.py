"""Feed both models the same: the tensors of one batch by their role, put into the other model's batch.

    parts_of(subject)             role → tensor, of the subject's own batch
    batch_with(subject, parts)    the subject's batch with these tensors in their places

Roles: "ids", "decoder ids", "labels", "mask" (one at real tokens), "decoder mask", "positions", "types",
"floats"; a further tensor has its argument's name.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from normscope.nn.output import IGNORED
from normscope.subjects.subject import LABEL_NAMES, LOSS_INPUTS, POSITIONAL, Batch, Subject

Parts = Mapping[str, Tensor]
_IDS = ("input_ids", "ids", "idx", "tokens", "token_ids", "inputs", "input", "x", "src", "source")
_DECODER_IDS = ("decoder_input_ids", "decoder_ids", "tgt", "target_ids", "tgt_ids")
_NAMED = {
    "decoder mask": ("decoder_attention_mask", "tgt_key_padding_mask", "tgt_mask"),
    "mask": (
        "attention_mask",
        "padding_mask",
        "key_padding_mask",
        "src_key_padding_mask",
        "pad_mask",
        "mask",
    ),
    "positions": ("position_ids", "positions", "pos"),
    "types": ("token_type_ids", "segment_ids", "types"),
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a batch.

    Attributes:
        role: its role.
        at: index of a positional argument, or name of a keyword; None where the batch is the tensor itself.
        tensor: its value, None for an argument that the batch leaves out.
        is_inverted: whether a mask is true at padding.
    """

    role: str
    at: int | str | None
    tensor: Tensor | None
    is_inverted: bool = False


@dataclass(frozen=True)
class Fed:
    """A batch with the tensors that were put in, and the roles of those that it cannot take."""

    batch: Batch
    left_out: tuple[str, ...] = ()


def parts_of(subject: Subject) -> dict[str, Tensor]:
    """The tensors of a subject's batch by their role."""
    found: dict[str, Tensor] = {}
    for entry in _entries(subject):
        if entry.tensor is not None and entry.role not in found:
            tensor = entry.tensor.detach().cpu()
            found[entry.role] = ~tensor.bool() if entry.is_inverted else tensor
    return found


def batch_with(subject: Subject, parts: Parts) -> Fed:
    """The subject's batch with the tensors of another.

    A causal model's labels are moved by one where its own are. What it cannot take is left out; an own mask
    without a partner becomes all ones.
    """
    entries = list(_entries(subject))
    known = {entry.role for entry in entries}
    values: dict[int | str | None, Tensor] = {}
    for entry in entries:
        value = parts.get(entry.role)
        if value is None and entry.tensor is not None:
            value = _without_partner(entry, entries, parts)
        if value is None or (entry.tensor is None and entry.role not in parts):
            continue
        if entry.is_inverted:
            value = ~value.bool()
        if entry.tensor is not None and entry.role != "floats":
            value = value.to(entry.tensor.dtype)
        values[entry.at] = value.to(_device(subject.model))
    left_out = tuple(role for role in parts if role not in known and role != "labels")
    return Fed(_filled(subject.batch, values), left_out)


def _without_partner(entry: Entry, entries: list[Entry], parts: Parts) -> Tensor | None:
    """The value of a tensor that only this model has: made from the ids where it follows from them."""
    assert entry.tensor is not None
    ids = parts.get("decoder ids", parts.get("ids"))
    if entry.role in ("mask", "decoder mask"):
        shape = ids.shape if ids is not None and ids.ndim == 2 else entry.tensor.shape
        return torch.ones(shape, dtype=torch.int64)
    if entry.role == "labels":
        own = next((e.tensor for e in entries if e.role == "ids"), None)
        if ids is None or own is None or own.shape != entry.tensor.shape:
            return None
        if torch.equal(own.cpu(), entry.tensor.cpu()):
            return ids
        moved = ids.roll(-1, 1)
        moved[:, -1] = IGNORED if bool((entry.tensor == IGNORED).any()) else ids[:, 0]
        return moved
    if entry.role == "types" and ids is not None:
        return torch.zeros_like(ids)
    if entry.role == "positions" and ids is not None:
        return torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
    return None


def _filled(batch: Batch, values: Mapping[int | str | None, Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        first = values.get(None, batch)
        named = {at: value for at, value in values.items() if isinstance(at, str)}
        return {POSITIONAL: (first,), **named} if named else first
    if isinstance(batch, Mapping):
        positional = tuple(values.get(i, each) for i, each in enumerate(batch.get(POSITIONAL, ())))
        named = {at: value for at, value in values.items() if isinstance(at, str)}
        return {**batch, **({POSITIONAL: positional} if positional else {}), **named}
    arguments = tuple(values.get(i, each) for i, each in enumerate(batch))
    named = {at: value for at, value in values.items() if isinstance(at, str)}
    return {POSITIONAL: arguments, **named} if named else arguments


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _entries(subject: Subject) -> Iterator[Entry]:
    """The tensors of the batch in order, then masks, positions and types that the forward also takes."""
    names = _argument_names(subject.model)
    batch = subject.batch
    given: list[tuple[int | str | None, str, Any]]
    if isinstance(batch, Tensor):
        given = [(None, names[0] if names else "x", batch)]
    elif isinstance(batch, Mapping):
        positional = batch.get(POSITIONAL, ())
        given = [(i, names[i] if i < len(names) else "", each) for i, each in enumerate(positional)]
        given += [(k, k, v) for k, v in batch.items() if k not in (POSITIONAL, LOSS_INPUTS)]
    else:
        given = [(i, names[i] if i < len(names) else "", each) for i, each in enumerate(batch)]
    taken: set[str] = set()
    seen: set[str] = set()
    for at, name, value in given:
        seen.add(name)
        if isinstance(value, Tensor):
            role = _role(name, value, taken)
            taken.add(role)
            yield Entry(role, at, value, _is_inverted(name, value))
    for name in names:
        optional = {**_NAMED, "decoder ids": _DECODER_IDS}
        could = next((role for role, known in optional.items() if name in known), None)
        if name not in seen and could is not None and could not in taken and could != "positions":
            taken.add(could)
            yield Entry(could, name, None, _is_inverted(name, None))


def _role(name: str, value: Tensor, taken: set[str]) -> str:
    plain = name.lower()
    is_whole = not value.is_floating_point() and value.dtype != torch.bool
    if plain in LABEL_NAMES or plain.endswith(("labels", "targets")):
        return "labels" if "labels" not in taken and ("ids" in taken or "floats" in taken) else plain
    if plain in _DECODER_IDS and is_whole:
        return "decoder ids"
    for role, known in _NAMED.items():
        if plain in known:
            return role
    if is_whole and value.ndim == 2:
        if "ids" not in taken:
            return "ids"
        return "decoder ids" if "decoder ids" not in taken else plain
    if plain in _IDS and is_whole:
        return "ids"
    if value.is_floating_point() and "floats" not in taken:
        return "floats"
    return plain


def _is_inverted(name: str, value: Tensor | None) -> bool:
    """PyTorch's own key_padding_mask is true at padding; Hugging Face's attention_mask is one at tokens."""
    is_padding = "padding" in name or name.startswith("pad")
    return is_padding and (value is None or value.dtype == torch.bool)


def _argument_names(model: nn.Module) -> list[str]:
    while isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    inner = getattr(model, "_orig_mod", model)
    try:
        parameters = inspect.signature(inner.forward).parameters.values()
    except (ValueError, TypeError):
        return []
    return [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


def with_decoder_ids(parts: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`parts` with explicit ids of the decoder where the other model reads them: the labels, one later."""
    if "decoder ids" in parts or "decoder ids" not in others or "labels" not in parts:
        return dict(parts)
    labels = parts["labels"]
    if labels.ndim != 2:
        return dict(parts)
    started = labels.roll(1, 1)
    started[:, 0] = 0
    return {**parts, "decoder ids": started.masked_fill(started == IGNORED, 0)}


def shortened(parts: dict[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`parts` with tokens cut to the length that the other model was fed with, where that is shorter."""
    lengths: dict[str, int] = {}
    for role in ("ids", "decoder ids"):
        if role in parts and role in others and parts[role].ndim == others[role].ndim == 2:
            lengths[role] = min(parts[role].shape[1], others[role].shape[1])
    cut: dict[str, Any] = {}
    for role, tensor in parts.items():
        of_decoder = role in ("decoder ids", "decoder mask", "labels") and "decoder ids" in lengths
        length = lengths.get("decoder ids" if of_decoder else "ids")
        long = length is not None and tensor.ndim == 2 and not tensor.is_floating_point()
        cut[role] = tensor[:, :length].contiguous() if long else tensor
    return cut
