"""Fused operations of the residual stream.

The main call:

    normed, stream = residual_norm(x, branch, weight=w, bias=b, eps=1e-5)

It adds a branch to the stream, with dropout and a factor of the stream, and norms the sum.
"""

from normscope.kernels.residual_norm import residual_norm

__all__ = ["residual_norm"]
