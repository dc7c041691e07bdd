"""Find attention, a softmax whose input is a product of two activations, and its operands.

Also classify how a branch mixes tokens: softmax attention; two chained products of activations (linear
attention); convolution, FFT or scan. A branch without any of them is a feed-forward.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from normscope.anatomy.axes import contracted, counted
from normscope.anatomy.graph import Op, Value, search
from normscope.anatomy.ops import (
    CONVOLUTIONS,
    FOURIER,
    MATMULS,
    RECURRENT,
    SAME,
    matmul_operands,
    op_set,
    weight_of,
)
from normscope.anatomy.softmax import logits_in

_BEFORE_SOFTMAX = SAME | op_set(
    "add sub rsub mul div where masked_fill tanh slice cat select index stack clamp minimum maximum "
    "constant_pad_nd gather as_strided copy overwrite index_put tril triu fill flip split"
)
_AFTER_SOFTMAX = SAME | op_set("mul div where masked_fill slice select nan_to_num index constant_pad_nd")
_SCANS = op_set("cumsum cumprod logcumsumexp associative_scan higher_order.associative_scan")


@dataclass(eq=False)
class Attention:
    """Operands of one attention as they meet: logits = q·k (+ mask), probabilities·v."""

    query: Value
    key: Value
    value: Value
    logits: Value
    probabilities: Value
    output: Value


def find_attentions(ops: list[Op]) -> list[Attention]:
    """Every softmax attention of the recording, in order."""
    found = (_attention(op, logits) for op in ops if (logits := logits_in(op)) is not None and logits.live)
    return [attention for attention in found if attention is not None]


def _attention(op: Op, logits: Value) -> Attention | None:
    product = _product_before(logits)
    use = _product_after(op.outputs[0])
    if product is None or use is None:
        return None
    operands, used = matmul_operands(product), matmul_operands(use[0])
    assert operands is not None
    assert used is not None
    other = used[1] if used[0] is use[1] else used[0]
    return Attention(operands[0], operands[1], other, logits, op.outputs[0], use[0].outputs[0])


def is_activation_product(op: Op | None) -> bool:
    """True where this is a matmul of two activations."""
    operands = matmul_operands(op)
    return operands is not None and all(v.live for v in operands)


def _product_before(logits: Value) -> Op | None:
    def step(value: Value) -> Iterable[Value]:
        return (v for v in value.inputs if v.live) if value.base in _BEFORE_SOFTMAX else ()

    return next((v.op for v in search([logits], step) if is_activation_product(v.op)), None)


def _product_after(probabilities: Value) -> tuple[Op, Value] | None:
    """The matmul of the probabilities with the values, and its operand for the probabilities."""

    def step(value: Value) -> Iterable[Value]:
        return (v for v in value.successors if v.base in _AFTER_SOFTMAX)

    uses = ((op, value) for value in search([probabilities], step) for op in value.users)
    return next(
        ((op, v) for op, v in uses if is_activation_product(op) and v in (matmul_operands(op) or ())), None
    )


def has_linear_attention(region: list[Value]) -> bool:
    """True where one product of activations feeds another, with no parameterised matmul between."""
    products = [v for v in region if is_activation_product(v.op)]
    if any(v.base in _SCANS for v in region):
        return False

    def step(value: Value) -> Iterable[Value]:
        return (
            (v for v in value.inputs if v.index >= products[0].index) if weight_of(value.op) is None else ()
        )

    for later in products[1:]:
        behind = set(search([later], step)) - {later}
        if not behind.isdisjoint(products):
            return True
    return False


def mixes_tokens(region: list[Value]) -> bool:
    """True where these mix tokens: by a convolution (wider than one), an FFT, a scan, a loop over positions,
    a recurrent op, or a matmul over another axis than the features'.
    """
    for value in region:
        op, weight = value.op, weight_of(value.op)
        if op is None:
            continue
        if op.base in FOURIER | RECURRENT or (op.base in _SCANS and value.floating):
            return True
        if op.base == "select" and value.floating and _steps(op.source) > 2:
            return True
        if weight is not None and op.base in MATMULS and _contracts_tokens(op, weight):
            return True
        if op.base in CONVOLUTIONS and any(n > 1 for n in op.inputs[1].shape[2:]):
            return True
    return False


def _steps(value: Value) -> int:
    """Number of different positions along one axis that are selected from a value one by one."""
    taken = {(op.arg(1, "dim"), op.arg(2, "index")) for op in value.users if op.base == "select"}
    return max(Counter(axis for axis, _ in taken).values(), default=0)


def _contracts_tokens(op: Op, weight: Value) -> bool:
    """True where a matmul sums over tokens."""
    summed = contracted(op, weight)
    return summed is not None and "token" in counted(summed[0], [summed[1]])


def projections_into(attention: Attention) -> list[Op]:
    """The parameterised matmuls that make an attention's keys and values; in cross-attention they read a
    second stream.
    """

    def step(value: Value) -> Iterable[Value]:
        stops = weight_of(value.op) is not None or is_activation_product(value.op)
        return () if stops else (v for v in value.inputs if v.live)

    met = (v.op for v in search([attention.key, attention.value], step) if v.live)
    ops = {op for op in met if op is not None and weight_of(op) is not None}
    return sorted(ops, key=lambda op: op.outputs[0].index)


def logits_of(ops: list[Op]) -> set[Value]:
    """Values that reach a softmax elementwise: scores, biases and masks are not the stream."""

    def step(value: Value) -> Iterable[Value]:
        return (v for v in value.inputs if v.floating) if value.base in _BEFORE_SOFTMAX else ()

    scores = (logits for op in ops if (logits := logits_in(op)) is not None)
    return {value for value in search(scores, step) if value.base in _BEFORE_SOFTMAX}
