"""The vocabulary: which ATen ops only move data, which scale it, which mix features.

Names are op packets without the in-place underscore: `add` stands for add.Tensor, add_.Tensor, add.Scalar.
"""

import torch

from normscope.anatomy.graph import Op, Value, between

CASTS = frozenset(
    {"_to_copy", "to", "clone", "contiguous", "alias", "detach", "lift_fresh", "type_as", "resolve_conj"}
)
VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "expand", "squeeze"}
    | {"unsqueeze", "flatten", "unflatten", "swapaxes", "movedim", "view_as", "expand_as", "as_strided", "T"}
    | {"swapdims", "_conj", "alias_copy", "view_copy", "expand_copy", "permute_copy", "movedim", "mT"}
)
DROPOUTS = frozenset({"native_dropout", "dropout", "feature_dropout", "alpha_dropout"})
SAME = CASTS | VIEWS | DROPOUTS
"""Every element of the input comes out once (or repeated), in the input's value."""

PARTS = frozenset(
    {"slice", "select", "index", "index_select", "split", "split_with_sizes", "chunk", "unbind"}
)
PARTS |= {"narrow", "gather", "roll", "constant_pad_nd", "pad", "cat", "stack", "repeat", "tile", "flip"}
"""Moves data, but some of it only, or together with other data."""

MATMULS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "addmv", "_grouped_mm", "addbmm"}
)
MATMULS |= {"_scaled_mm", "_addmm_activation", "einsum", "_int_mm", "_trilinear", "_scaled_grouped_mm"}
CONVOLUTIONS = frozenset({"convolution", "conv1d", "conv2d", "conv3d", "_convolution", "mkldnn_convolution"})
CONVOLUTIONS |= {"cudnn_convolution", "convolution_overrideable", "conv_transpose1d", "conv_transpose2d"}
FOURIER = frozenset({"_fft_c2c", "_fft_r2c", "_fft_c2r"})
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "_thnn_fused_lstm_cell", "mkldnn_rnn_layer"})
SOFTMAX = frozenset({"_softmax", "_safe_softmax", "softmax"})
FUSED_ATTENTION = frozenset(
    {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"}
    | {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"}
    | {"_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention"}
)


def base_name(func: torch._ops.OpOverload) -> str:
    """`aten.add_.Tensor` → `add`; ops of other namespaces keep theirs: `mylib.fused`."""
    namespace, _, name = func._schema.name.partition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if namespace == "aten" else f"{namespace}.{name}"


def is_weight(value: Value) -> bool:
    """A parameter, or made of parameters alone."""
    return value.learnt and not value.live


def matmul_operands(op: Op) -> tuple[Value, Value] | None:
    """The two factors of a matmul, whatever bias it adds."""
    if op.base not in MATMULS:
        return None
    first = 1 if op.base in {"addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"} else 0
    tensors = [a for a in op.args if isinstance(a, Value)]
    if len(tensors) < first + 2:
        return None
    return tensors[first], tensors[first + 1]


def weight_of(op: Op) -> Value | None:
    """The learnt operand of a parameterised matmul or convolution; None for anything else."""
    operands = matmul_operands(op)
    if operands is None and op.base in CONVOLUTIONS and len(op.inputs) > 1:
        operands = (op.inputs[0], op.inputs[1])
    if operands is None:
        return None
    first, second = operands
    if is_weight(second):
        return second
    return first if is_weight(first) and second.live else None


def mixes_between(start: Value, end: Value) -> bool:
    """Whether `end` comes from `start` by way of something learnt."""
    region = between(start, end)
    inside = {start, *region}
    return any(v.op is not None and is_mixing(v.op, inside) for v in region)


def is_mixing(op: Op, region: set[Value]) -> bool:
    """Whether the op mixes features or tokens of what comes from `region` with something learnt (or by FFT,
    scan).
    """
    weight = weight_of(op)
    if weight is not None:
        return any(v in region for v in op.inputs if v is not weight)
    if op.base in FOURIER or op.base in RECURRENT:
        return True
    if "." in op.base and op.outputs and op.outputs[0].norm is None:
        return any(is_weight(v) for v in op.inputs)
    return False
