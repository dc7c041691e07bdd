"""Find the axis of a stream that counts tokens, for token diversity.

Streams have the shape (B, T, d), (T, B, d) (`nn.TransformerEncoder` by default), (B, H, W, d) (Swin), or,
flattened, (B·T, d).

    B sequences, T tokens of one, d features
"""

from torch import Tensor

from normscope.subjects import Batch
from normscope.subjects.feed import tensors_in


def sequences(stream: Tensor, batch: tuple[int, ...] = (), tokens: int | None = None) -> tuple[Tensor, str]:
    """View `stream` as (B, T, d), and a remark for `how` on its shape, "" for (B, T, d).

    A copy is made where a view is not possible.

    Args:
        stream: the tensor.
        batch: shape of the first tensor of the batch.
        tokens: number of tokens that attend to one another in the stack's first attention, None without one.
    """
    if stream.ndim > 3:
        return stream.flatten(1, -2), "stream read as (B, …, d)"
    if stream.ndim == 3:
        if _is_token_major(stream, batch, tokens):
            return stream.transpose(0, 1), "stream read as (T, B, d)"
        return stream, ""
    flat = stream.reshape(-1, stream.shape[-1])
    num_sequences = _num_sequences(flat.shape[0], batch, tokens)
    return flat.reshape(num_sequences, -1, flat.shape[-1]), f"stream read as ({num_sequences}·T, d)"


def _is_token_major(stream: Tensor, batch: tuple[int, ...], tokens: int | None) -> bool:
    """True where attention runs over the first axis, and that axis is not clearly the batch's."""
    first, second = stream.shape[:2]
    if tokens is None or first == second:
        return tokens is None and batch[:1] == (second,) and first != second
    return first == tokens and (batch[:1] != (first,) or batch[:2] == (first, second))


def _num_sequences(num_tokens: int, batch: tuple[int, ...], tokens: int | None) -> int:
    if tokens and num_tokens % tokens == 0:
        return num_tokens // tokens
    if len(batch) > 1 and batch[0] and num_tokens % batch[0] == 0:
        return batch[0]
    return 1


def batch_shape(batch: Batch) -> tuple[int, ...]:
    """Shape of the first tensor of a batch, () where it has none."""
    return next((tuple(tensor.shape) for tensor in tensors_in(batch)), ())
