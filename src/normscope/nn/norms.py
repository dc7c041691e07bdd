"""The norms a slot can hold."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

NORMS: Mapping[str, Callable[[int, float], nn.Module]] = MappingProxyType(
    {
        "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
        "rmsnorm": lambda width, eps: nn.RMSNorm(width, eps=eps),
    }
)
"""Kind → maker of (width, eps). LayerNorm: γ (x − mean)/√(var + ε) + β. RMSNorm: γ x/√(mean x² + ε)."""
