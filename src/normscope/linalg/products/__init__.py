"""Log singular values and Lyapunov exponents of products of a thousand factors, without over- or underflow.

Used by the claims about deep Jacobians, the benchmarks and the tutorials.
"""

from normscope.linalg.products.lyapunov import LyapunovExponents, lyapunov_exponents
from normscope.linalg.products.spectrum import ProductSpectrum, product_log_singular_values

__all__ = ["LyapunovExponents", "ProductSpectrum", "lyapunov_exponents", "product_log_singular_values"]
