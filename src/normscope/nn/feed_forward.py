"""The position-wise feed-forward network.

Shapes: B batch, T tokens, D width, F hidden width.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.linear import LINEARS, Gain
from normscope.nn.norms import NoNorm

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu-tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu, "silu": F.silu}
)
GATED: Mapping[str, str] = MappingProxyType({"swiglu": "silu", "geglu": "gelu", "geglu-tanh": "gelu-tanh"})
"""Name of a gated feed-forward → activation of its gate (Shazeer 2020, arXiv:2002.05202)."""


class FeedForward(nn.Module):
    """down(σ(up(x))), or gated down(σ(gate(x)) ⊙ up(x)), on each token.

    Args:
        width: D.
        hidden: F.
        activation: a name of `ACTIVATIONS` or `GATED`.
        gained: whether each unit of `up` and of `gate` has a learnt gain, times √D (nGPT).
        inner_norm: norm before `down`; None for none.
        linear: a name of `LINEARS`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        gained: bool = False,
        inner_norm: nn.Module | None = None,
        linear: str = "plain",
    ) -> None:
        super().__init__()
        make = LINEARS[linear]
        self.activation = activation
        self.up = make(width, hidden, bias=bias)
        self.gate = make(width, hidden, bias=bias) if activation in GATED else None
        gains = 0 if not gained else 2 if self.gate is not None else 1
        self.gains = nn.ModuleList(Gain((hidden,), start=width**0.5, held=1.0) for _ in range(gains))
        self.inner_norm = inner_norm or NoNorm()
        self.down = make(hidden, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up_BTF = self._gained(self.up(x_BTD), 0)
        if self.gate is None:
            hidden_BTF = ACTIVATIONS[self.activation](up_BTF)
        else:
            hidden_BTF = ACTIVATIONS[GATED[self.activation]](self._gained(self.gate(x_BTD), 1)) * up_BTF
        return self.down(self.inner_norm(hidden_BTF))

    def _gained(self, x_BTF: Tensor, index: int) -> Tensor:
        return x_BTF * self.gains[index]() if self.gains else x_BTF


def default_hidden(width: int, activation: str) -> int:
    """4·width; with a gate, which adds a third matrix, two thirds of that, rounded up to a multiple of 8."""
    return -(-8 * width // 24) * 8 if activation in GATED else 4 * width
