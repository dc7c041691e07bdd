"""Fused operations of the residual stream, norms over sharded features, and statistics by three algorithms.

The main call:

    normed, stream = residual_norm(x, branch, weight=w, bias=b, eps=1e-5)

It adds a branch to the stream, with dropout and a factor of the stream, and norms the sum.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from normscope.kernels.residual_norm import residual_norm

if TYPE_CHECKING:
    from normscope.kernels.sharded import sharded_layer_norm, sharded_rms_norm

__all__ = ["residual_norm", "sharded_layer_norm", "sharded_rms_norm"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a sharded norm when it is first used: DTensor takes 0.4 s to import."""
        if name in __all__:
            return getattr(import_module("normscope.kernels.sharded"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
