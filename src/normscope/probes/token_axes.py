"""Which axis of a stream counts tokens.

Streams come as (B, T, d), as (T, B, d) (`nn.TransformerEncoder` by default), as (B, H, W, d) (Swin), as (B,
C, H, W) (convolutional stems) and flattened as (B·T, d). Token diversity needs to know which.

    B sequences, T tokens of one, d features
"""

from dataclasses import dataclass

from torch import Tensor

from normscope.subjects import Batch
from normscope.subjects.feed import tensors_in


@dataclass(frozen=True)
class Hints:
    """What is known besides the stream's own shape.

    Attributes:
        batch: shape of the first tensor of the batch.
        tokens: how many tokens attend to one another in the stack's first attention, None without one.
        width: number of features, from γ of a norm on the stream, None without one.
    """

    batch: tuple[int, ...] = ()
    tokens: int | None = None
    width: int | None = None


def sequences(stream: Tensor, hints: Hints) -> tuple[Tensor, str]:
    """View `stream` as (B, T, d), and say how it was read where that is not how it lay.

    Returns:
        the view (a copy where the axes do not lie that way), and "" for (B, T, d), else a remark for `how`.
    """
    if stream.ndim > 2 and hints.width not in (None, stream.shape[-1]) and stream.shape[1] == hints.width:
        return stream.movedim(1, -1).flatten(1, -2), "stream read as (B, d, …)"
    if stream.ndim > 3:
        return stream.flatten(1, -2), "stream read as (B, …, d)"
    if stream.ndim == 3:
        if _is_token_major(stream, hints):
            return stream.transpose(0, 1), "stream read as (T, B, d)"
        return stream, ""
    flat = stream.reshape(-1, stream.shape[-1])
    num_sequences = _num_sequences(flat.shape[0], hints)
    return flat.reshape(num_sequences, -1, flat.shape[-1]), f"stream read as ({num_sequences}·T, d)"


def _is_token_major(stream: Tensor, hints: Hints) -> bool:
    """Attention runs over the first axis, and the first axis is not plainly the batch's."""
    first, second = stream.shape[:2]
    if hints.tokens is None or first == second:
        return hints.tokens is None and hints.batch[:1] == (second,) and first != second
    fed_token_major = hints.batch[:2] == (first, second)
    return first == hints.tokens and (hints.batch[:1] != (first,) or fed_token_major)


def _num_sequences(num_tokens: int, hints: Hints) -> int:
    if hints.tokens and num_tokens % hints.tokens == 0:
        return num_tokens // hints.tokens
    if hints.batch and hints.batch[0] and num_tokens % hints.batch[0] == 0 and len(hints.batch) > 1:
        return hints.batch[0]
    return 1


def batch_shape(batch: Batch) -> tuple[int, ...]:
    """Shape of the first tensor of a batch, () where it has none."""
    return next((tuple(tensor.shape) for tensor in tensors_in(batch)), ())
