"""Sample of an attention's logits, read from the arguments of a softmax or of a fused attention.

Shapes: B sequences, H heads, G groups of keys, T queries, S keys, K width of a head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normscope.probes.attention import MASKED_LOGIT

SEQUENCES, QUERIES = 2, 16
"""Sequences of a sample, and queries of each."""
MOST_LOGITS = 1 << 22
"""Most logits of a sample; with many keys and heads it has fewer queries."""


def tally(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], heads: int) -> Tensor | None:
    """Figures of a call's sample, (4, H); None where the logits cannot be read.

    Its rows are the largest |logit|, the sum of the entropies over log(visible keys), the number of the
    queries that see at least two keys, and of those that see one.

    Args:
        func: a softmax, or a fused attention.
        heads: H of logits without an axis for heads, (B·H, T, S).
    """
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    logits = _products(given) if "query" in given else _inputs(given["self"], given["dim"], heads)
    return None if logits is None else _figures(logits)


def _inputs(logits: Tensor, axis: int, heads: int) -> Tensor | None:
    """Sample of the input of a softmax over keys, (B, H, T, S)."""
    if axis not in (-1, logits.ndim - 1) or logits.ndim < 3 or type(logits) is not Tensor:
        return None
    if logits.ndim == 3:
        logits = logits.unflatten(0, (-1, heads if len(logits) % heads == 0 else 1))
    logits = logits.flatten(1, -3)
    sequences, queries = _chosen(*logits.shape)
    return _exact(logits[sequences, :, queries])


def _products(given: Mapping[str, Any]) -> Tensor | None:
    """Sample of the logits of a fused attention, (B, H, T, S), from its arguments by name."""
    query_BHTK, key_BGSK = given["query"], given["key"]
    if type(query_BHTK) is not Tensor or type(key_BGSK) is not Tensor or query_BHTK.ndim != 4:
        return None
    batch, heads, num_queries, width = query_BHTK.shape
    groups, num_keys = key_BGSK.shape[1:3]
    sequences, queries = _chosen(batch, heads, num_queries, num_keys)
    scale = given.get("scale")
    query = _exact(query_BHTK[sequences, :, queries]) * (width**-0.5 if scale is None else scale)
    key = _exact(key_BGSK[sequences])
    logits = (query.unflatten(1, (groups, -1)) @ key.unsqueeze(2).mT).flatten(1, 2)
    mask = given.get("attn_mask", given.get("attn_bias"))
    if mask is not None:
        mask = mask.expand(batch, heads, num_queries, num_keys)[sequences, :, queries]
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if given.get("is_causal"):
        place = torch.arange(max(num_queries, num_keys), device=logits.device)
        logits = logits.masked_fill(place[:num_keys] > place[queries, None], -torch.inf)
    return logits


def _chosen(batch: int, heads: int, num_queries: int, num_keys: int) -> tuple[slice, slice]:
    """Evenly spaced sequences and queries, the last query among them."""
    sequences = max(1, min(batch, SEQUENCES))
    room = MOST_LOGITS // max(1, sequences * heads * num_keys)
    queries = max(1, min(num_queries, QUERIES, room))
    every, step = batch // sequences, num_queries // queries
    first = max(0, num_queries - 1 - (queries - 1) * step)
    return slice(0, every * sequences, max(1, every)), slice(first, num_queries, max(1, step))


def _exact(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _figures(logits_BHTS: Tensor) -> Tensor:
    """The rows of `tally`. NaN is no masked logit."""
    hidden = logits_BHTS <= MASKED_LOGIT
    num_visible = logits_BHTS.shape[-1] - hidden.sum(-1)
    choosing, seeing = num_visible >= 2, num_visible >= 1
    logs = logits_BHTS.masked_fill(hidden, -torch.inf).log_softmax(-1)
    entropy = -(logs.exp() * logs.masked_fill(hidden, 0.0)).sum(-1)
    shares = torch.where(choosing, entropy / num_visible.clamp(min=2).log(), 0.0)
    largest = logits_BHTS.masked_fill(hidden, 0.0).abs().amax((0, 2, 3))
    sums = (each.sum((0, 2)).to(largest.dtype) for each in (shares, choosing, seeing))
    return torch.stack([largest, *sums])
