"""Find attention over depth (Attention Residuals), which replaces the residual sums.

Each branch reads h = Σ_i α_i v_i over earlier outputs v_i, with α the softmax of scores of the v_i
themselves. A mixture of experts weights outputs by scores of its input; an attention pool runs once.
"""

import itertools
from collections.abc import Iterable

from normscope.anatomy.graph import Op, Value, search
from normscope.anatomy.ops import SAME, SOFTMAX, matmul_operands, op_set

_JOINED = op_set("stack cat")


def attention_over_depth(ops: list[Op]) -> str | None:
    """The reason why a model that attends over depth has no residual sums; None for other models."""
    found: list[set[Value]] = []
    for op in ops:
        if op.base in SOFTMAX and op.inputs and op.inputs[0].live:
            joined = _weighed(op.outputs[0])
            if joined:  # the way back from each softmax of a deep stack is long, and few weigh joined values
                joined &= set(search([op.source], _back_to_joined))
            found += [{v.behind(SAME) for v in value.inputs} for value in joined]
    if not any(one & following for one, following in itertools.pairwise(found)):
        return None
    return (
        f"{len(found)} sums of earlier outputs, weighted by a softmax of their scores (Attention Residuals): "
        "such a stack has no residual stream to read"
    )


def _back_to_joined(value: Value) -> Iterable[Value]:
    return () if value.base in _JOINED else (v for v in value.inputs if v.live)


def _weighed(shares: Value) -> set[Value]:
    """The joined values that the softmax's output multiplies."""
    found: set[Value] = set()
    for value in search([shares], lambda v: (w for w in v.successors if w.base in SAME)):
        for op in value.users:
            factors = op.inputs if op.base == "mul" else matmul_operands(op) or ()
            if value in factors:
                found.update(v.behind(SAME) for v in factors if v.behind(SAME).base in _JOINED)
    return found
