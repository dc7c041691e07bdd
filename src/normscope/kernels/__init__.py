"""Kernels of norms: LayerNorm and RMSNorm over sharded features, and statistics by three algorithms."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope.kernels.sharded import sharded_layer_norm, sharded_rms_norm

__all__ = ["sharded_layer_norm", "sharded_rms_norm"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a sharded norm when it is first used: DTensor takes 0.4 s to import."""
        if name in __all__:
            return getattr(import_module("normscope.kernels.sharded"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
