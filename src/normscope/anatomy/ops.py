"""Sets of ATen ops: those that only move data, those that scale it, those that mix features.

Names are op packets without the in-place underscore: `add` stands for add.Tensor, add_.Tensor, add.Scalar.
"""

from collections.abc import Collection

import torch

from normscope.anatomy.graph import Op, Value, between


def op_set(names: str) -> frozenset[str]:
    """A set of ops, written as one line of names."""
    return frozenset(names.split())


CASTS = op_set("_to_copy to clone contiguous alias detach lift_fresh type_as resolve_conj")
VIEWS = op_set(
    "view _unsafe_view reshape _reshape_alias permute transpose t expand squeeze unsqueeze flatten unflatten "
    "swapaxes swapdims movedim view_as expand_as as_strided T mT _conj "
    "alias_copy view_copy expand_copy permute_copy"
)
DROPOUTS = op_set("native_dropout dropout feature_dropout alpha_dropout")
SAME = CASTS | VIEWS | DROPOUTS
"""Ops that output every element of the input unchanged, once or repeatedly."""
PARTS = op_set(
    "slice select index index_select split split_with_sizes chunk unbind narrow gather roll constant_pad_nd "
    "pad cat stack repeat tile flip"
)
"""Ops that move a part of the data, or join it with other data."""
MATMULS = op_set(
    "mm bmm addmm baddbmm matmul linear mv addmv addbmm einsum _grouped_mm _scaled_mm _scaled_grouped_mm "
    "_addmm_activation _int_mm _trilinear"
)
_WITH_BIAS_FIRST = op_set("addmm baddbmm addmv addbmm _addmm_activation")
CONVOLUTIONS = op_set(
    "convolution conv1d conv2d conv3d _convolution mkldnn_convolution cudnn_convolution "
    "convolution_overrideable conv_transpose1d conv_transpose2d"
)
FOURIER = op_set("_fft_c2c _fft_r2c _fft_c2r")
RECURRENT = op_set("lstm gru rnn_tanh rnn_relu _thnn_fused_lstm_cell mkldnn_rnn_layer")
SOFTMAX = op_set("_softmax _safe_softmax softmax")
FUSED_ATTENTION = op_set(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention"
)


def base_name(func: torch._ops.OpOverload) -> str:
    """`aten.add_.Tensor` → `add`; ops of other namespaces keep theirs: `mylib.fused`."""
    namespace, _, name = func._schema.name.partition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if namespace == "aten" else f"{namespace}.{name}"


def same(value: Value) -> Value:
    """`value` before casts and views."""
    return value.behind(CASTS | VIEWS)


def constant_of(op: Op) -> float | None:
    """The number an op adds or multiplies with; None where it is not one number."""
    for arg in op.args:
        if isinstance(arg, Value) and arg.number is not None:
            return arg.number
        if isinstance(arg, int | float) and not isinstance(arg, bool):
            return float(arg)
    return None


def matmul_operands(op: Op | None) -> tuple[Value, Value] | None:
    """The two factors of a matmul, whatever bias it adds; None for anything else."""
    if op is None or op.base not in MATMULS:
        return None
    first = int(op.base in _WITH_BIAS_FIRST)
    tensors = [a for a in op.args if isinstance(a, Value)]
    return (tensors[first], tensors[first + 1]) if len(tensors) > first + 1 else None


def weight_of(op: Op | None) -> Value | None:
    """The learnt operand of a parameterised matmul or convolution; None for anything else."""
    operands = matmul_operands(op)
    if op is not None and op.base in CONVOLUTIONS and len(op.inputs) > 1:
        operands = (op.inputs[0], op.inputs[1])
    if operands is None:
        return None
    first, second = operands
    if second.is_weight:
        return second
    return first if first.is_weight and second.live else None


def mixes_between(start: Value, end: Value) -> bool:
    """True where `end` comes from `start` through a learnt op."""
    region = between(start, end)
    inside = {start, *region}
    return any(is_mixing(v.op, inside) for v in region)


def is_mixing(op: Op | None, region: Collection[Value]) -> bool:
    """True where the op mixes features or tokens of a value in `region` with something learnt, or by FFT or
    scan.
    """
    if op is None:
        return False
    weight = weight_of(op)
    if weight is not None:
        return any(v in region for v in op.inputs if v is not weight)
    if op.base in FOURIER or op.base in RECURRENT:
        return True
    is_opaque = "." in op.base and op.outputs and op.outputs[0].looks_normed is None
    return bool(is_opaque) and any(v.is_weight for v in op.inputs)
