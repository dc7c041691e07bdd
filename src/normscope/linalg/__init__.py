"""Linear algebra of Jacobians: maps in, figures out, each with a status. Knows nothing of norms in models."""

from normscope.linalg.closed_forms import left_kernel, left_kernel_share

__all__ = ["left_kernel", "left_kernel_share"]
