"""`Pair`: a residual add and the norm that reads its result."""

from dataclasses import dataclass

from torch import Tensor, nn

from normscope.kernels.form import Norm


@dataclass(frozen=True)
class Pair:
    """A residual add and the norm that reads its result.

    Attributes:
        holder: path of the module whose forward adds.
        nth: which of the residual adds in a call of the holder, 0 first.
        norm: path of the norm.
        kind: "layer" or "rms".
        eps: ε inside the root.
        offset: 1.0 where the gain is 1 + weight (Gemma), else 0.0.
        weight, bias: names of the norm's own parameters, None without.
    """

    holder: str
    nth: int
    norm: str
    kind: Norm
    eps: float
    offset: float
    weight: str | None
    bias: str | None

    def gains(self, norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """The norm's weight, to which `offset` is added, and its bias."""
        return tuple(None if name is None else getattr(norm, name) for name in (self.weight, self.bias))  # type: ignore[return-value]
