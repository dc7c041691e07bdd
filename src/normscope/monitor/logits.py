"""Sample of an attention's logits, read from the arguments of a softmax or of a fused attention.

Shapes: N attentions, B sequences, H heads, G groups of keys, T queries, S keys, K width of a head.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normscope.probes.attention import MASKED_LOGIT

SEQUENCES, QUERIES = 2, 8
"""Sequences of a sample, and queries of each."""
MOST_LOGITS = 1 << 20
"""Most logits of a sample; with many keys and heads it has fewer queries."""
LEAST_LOG = -80.0
"""Log probability under which a key adds nothing to the entropy in float32; a smaller one has a slow exp."""


class Sample(NamedTuple):
    """Some queries of an attention, copied: their logits, or the operands of these.

    Attributes:
        query: (B, H, T, K), or the logits (B, H, T, S) where there is no key.
        key: (B, G, S, K).
        bias: what is added to the products, (B or 1, H or 1, T or 1, S).
        scale: factor of the products.
    """

    query: Tensor
    key: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.query.numel() + (0 if self.key is None else self.key.numel())

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shapes, types, devices and scale; samples that share them are computed together."""
        tensors = (self.query, self.key, self.bias)
        return self.scale, *(None if x is None else (x.shape, x.dtype, x.device) for x in tensors)


def sample(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], heads: int) -> Sample | None:
    """Sample of a call of a softmax or a fused attention; None where its logits cannot be read.

    Args:
        heads: H of logits without an axis for heads, (B·H, T, S).
    """
    given = _by_name(func, args, kwargs)
    shape = _shape(given, heads)
    if shape is None or type(args[0]) is not Tensor:
        return None
    if "query" in given:
        return _operands(given, shape) if type(given["key"]) is Tensor else None
    sequences, queries = _chosen(*shape)
    return Sample(_copied(given["self"].reshape(shape)[sequences, :, queries]))


def num_heads(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], heads: int) -> int:
    """Heads of a call, 0 where its logits cannot be read; arguments are those of `sample`."""
    shape = _shape(_by_name(func, args, kwargs), heads)
    return 0 if shape is None else shape[1]


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(_names(func), args, strict=False)) | dict(kwargs)


@functools.cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def _shape(given: Mapping[str, Any], heads: int) -> tuple[int, int, int, int] | None:
    """Shape of the logits, (B, H, T, S), None where it is not clear; all axes between B and T are heads."""
    if "query" in given:
        query, key = given["query"], given["key"]
        return (*query.shape[:3], key.shape[2]) if query.ndim == 4 else None
    logits, axis = given["self"], given["dim"]
    if axis not in (-1, logits.ndim - 1) or logits.ndim < 3:
        return None
    if logits.ndim == 3:
        heads = heads if len(logits) % heads == 0 else 1
        return (len(logits) // heads, heads, *logits.shape[1:])
    return (len(logits), math.prod(logits.shape[1:-2]), *logits.shape[-2:])


def _operands(given: Mapping[str, Any], shape: tuple[int, int, int, int]) -> Sample:
    """Sample of the queries and keys of a fused attention, from its arguments by name."""
    query_BHTK, key_BGSK, (_, _, num_queries, num_keys) = given["query"], given["key"], shape
    sequences, queries = _chosen(*shape)
    bias, scale = given.get("attn_mask", given.get("attn_bias")), given.get("scale")
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        bias = bias[sequences if len(bias) > 1 else slice(1), :, queries if bias.shape[2] > 1 else slice(1)]
        bias = _copied(torch.where(bias, 0.0, -torch.inf) if bias.dtype == torch.bool else bias)
    elif given.get("is_causal"):
        bias = _causal(queries.start, queries.step, num_queries, num_keys, query_BHTK.device)
    query, key = _copied(query_BHTK[sequences, :, queries]), _copied(key_BGSK[sequences])
    return Sample(query, key, bias, query.shape[-1] ** -0.5 if scale is None else scale)


@functools.lru_cache(maxsize=4)
def _causal(first: int, step: int, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Bias of a causal mask, (1, 1, T, S): the first query of the batch sees the first key only."""
    queries = torch.arange(first, num_queries, step, device=device)
    keys = torch.arange(num_keys, device=device)
    return torch.where(keys > queries[:, None], -torch.inf, 0.0)[None, None]


def _chosen(batch: int, heads: int, num_queries: int, num_keys: int) -> tuple[slice, slice]:
    """Evenly spaced sequences and queries, the last query among them."""
    sequences = max(1, min(batch, SEQUENCES))
    room = MOST_LOGITS // max(1, sequences * heads * num_keys)
    queries = max(1, min(num_queries, QUERIES, room))
    every, step = batch // sequences, num_queries // queries
    first = max(0, num_queries - 1 - (queries - 1) * step)
    return slice(0, every * sequences, max(1, every)), slice(first, num_queries, max(1, step))


def _copied(tensor: Tensor) -> Tensor:
    """A copy in float32, or in float64 if it is."""
    dtype = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


@torch.no_grad()
def tallies(samples: Sequence[Sample]) -> list[Tensor]:
    """Figures of each sample, (4, H); samples of one kind are computed together.

    The rows are the largest |logit|, the sum of the entropies over log(visible keys), the number of the
    queries that see at least two keys, and of those that see one.
    """
    alike: dict[Any, list[int]] = defaultdict(list)
    for number, each in enumerate(samples):
        alike[each.kind].append(number)
    found: dict[int, Tensor] = {}
    for numbers in alike.values():
        figures = _figures(_logits([samples[number] for number in numbers]))
        found |= zip(numbers, figures.unbind(1), strict=True)
    return [found[number] for number in range(len(samples))]


def _logits(samples: Sequence[Sample]) -> Tensor:
    """The logits of samples of one kind, (N, B, H, T, S)."""
    query = torch.stack([each.query for each in samples])
    keys = [each.key for each in samples if each.key is not None]
    if not keys:
        return query
    key_NBGSK = torch.stack(keys)
    by_group = query.mul_(samples[0].scale).reshape(*key_NBGSK.shape[:3], -1, query.shape[-1])
    logits = (by_group @ key_NBGSK.mT).view(*query.shape[:4], -1)
    biases = [each.bias for each in samples if each.bias is not None]
    return logits.add_(torch.stack(biases)) if biases else logits


def _figures(logits_NBHTS: Tensor) -> Tensor:
    """The figures of N samples, (4, N, H); the logits are overwritten. NaN is no masked logit, and stays."""
    num_visible = (logits_NBHTS.shape[-1] - (logits_NBHTS <= MASKED_LOGIT).sum(-1)).to(logits_NBHTS.dtype)
    choosing, seeing = num_visible >= 2, num_visible >= 1
    largest = torch.threshold(logits_NBHTS, MASKED_LOGIT, 0.0).abs_().amax((1, 3, 4))
    logs = torch.threshold_(logits_NBHTS, MASKED_LOGIT, -torch.inf).log_softmax(-1).clamp_(min=LEAST_LOG)
    entropy = -torch.exp(logs, out=logits_NBHTS).mul_(logs).sum(-1)
    shares = torch.where(choosing, entropy / num_visible.clamp_(min=2).log_(), 0.0)
    return torch.stack(
        [largest, *(each.sum((1, 3)).to(largest.dtype) for each in (shares, choosing, seeing))]
    )
