"""Readers of the stream that a stack without a final norm hands on, as far as its size is concerned."""

from collections.abc import Iterable, Iterator

from normscope.anatomy.graph import Op, Value, ancestors, between, search
from normscope.anatomy.ops import CONVOLUTIONS, MATMULS, PARTS, SAME, op_set
from normscope.anatomy.types import Reader

_LINEAR = SAME | PARTS | MATMULS | CONVOLUTIONS
_LINEAR |= op_set("add sub rsub neg mul div sum mean avg_pool1d avg_pool2d avg_pool3d")
_LINEAR |= op_set("_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d")
_LINEAR |= op_set("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d pixel_shuffle pixel_unshuffle")
_SCALES_ALONG = op_set("relu leaky_relu amax max max_pool2d_with_indices max_pool1d max_pool2d")
"""Ops that are not linear, and still give c times the result for c times the input."""


def reader_of(ends: Iterable[Value], outputs: Iterable[Value]) -> Reader:
    """The reader of a stream that ends at these values.

    "norm": on every path to the outputs a norm comes before anything that would notice the stream's size, as
    in a neck of convolution and norm. Biases between are passed over: they start at zero. "nothing": no
    weight comes after the stream, which is itself the output. "weights" otherwise.
    """
    ends = list(ends)
    used = ancestors(outputs, min(v.index for v in ends) - 1)
    reached = [v for v in search(ends, lambda v: _unnormed(v, used)) if v not in ends]
    ops = {v.op for v in reached if v.op is not None}
    if used.isdisjoint(ends) or not (_are_outputs([*ends, *reached], outputs) or not all(map(_scales, ops))):
        return "norm"
    return "weights" if any(v.is_weight for op in ops for v in op.inputs) else "nothing"


def _unnormed(value: Value, used: set[Value]) -> Iterator[Value]:
    """The used values that are computed from this one outside of the norms that begin here."""
    inside = {v for norm in value.norms_behind for v in between(norm.input, norm.output)}
    return (v for v in value.successors if v in used and v not in inside)


def _are_outputs(values: Iterable[Value], outputs: Iterable[Value]) -> bool:
    return not set(values).isdisjoint(outputs)


def _scales(op: Op) -> bool:
    """True where c times the value gives c times the result."""
    if op.base == "div":
        return not any(v.live for v in op.inputs[1:])
    if op.base == "mul" or op.base in MATMULS:
        return sum(v.live for v in op.inputs) == 1
    return op.base in _LINEAR | _SCALES_ALONG
