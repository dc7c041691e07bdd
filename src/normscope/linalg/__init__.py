"""Linear algebra of Jacobians: figures of linear maps, each with a status. Independent of models.

The main calls:

    op = JacobianOperator(f, x)        # J = ∂f/∂x at x; or JacobianOperator.on_graph(y, x)
    sigma_max(op, tol=1e-2)            # σ_max by Golub–Kahan–Lanczos, with error, residual and status
    singular_values(dense(op))         # every σ, where the map is small
    restricted_jacobian(op, rows, columns)  # some entries: one token's Jacobian, exact
    numerical_rank(values, tol)        # (rank, gap)
    top_singular(op, 20)               # the k largest, with multiplicity
    sigma_min(op, kernel=…)            # the smallest outside the known kernel, for κ up to 10–20
    layerwise_sigma_min(layers)        # the same for a product of layers, of any κ
"""

from normscope.linalg.bounds import (
    condition_number,
    confidence_of_each,
    effective_rank,
    joint_confidence,
    product_log_lower_bound,
    product_log_upper_bound,
    stable_rank,
    weyl_interval,
    weyl_lower_bound,
)
from normscope.linalg.closed_forms import (
    layer_norm_jacobian,
    left_kernel,
    left_kernel_share,
    right_kernel,
    rms_norm_jacobian,
)
from normscope.linalg.dense import dense, numerical_rank, restricted_jacobian, singular_values
from normscope.linalg.density import Estimate, LogDensity, log_density
from normscope.linalg.extremes import TopSingular, top_singular
from normscope.linalg.golub_kahan import Bidiagonalisation, LinearMap, Status
from normscope.linalg.graph import NO_PATH, TangentError
from normscope.linalg.largest import SigmaMax, sigma_max
from normscope.linalg.layer_inverse import Layer, LayerwiseInverse
from normscope.linalg.layerwise import layerwise_sigma_min
from normscope.linalg.maps import (
    Composition,
    Deflated,
    Matrix,
    Projected,
    Restriction,
    Shifted,
    Transposed,
    token_indices,
)
from normscope.linalg.operator import JacobianOperator
from normscope.linalg.products import (
    LyapunovExponents,
    ProductSpectrum,
    lyapunov_exponents,
    product_log_singular_values,
)
from normscope.linalg.smallest import Side, SigmaMin, sigma_min
from normscope.linalg.subspaces import Kernel, TokenProjector
from normscope.linalg.tangents import Method

__all__ = [
    "NO_PATH",
    "Bidiagonalisation",
    "Composition",
    "Deflated",
    "Estimate",
    "JacobianOperator",
    "Kernel",
    "Layer",
    "LayerwiseInverse",
    "LinearMap",
    "LogDensity",
    "LyapunovExponents",
    "Matrix",
    "Method",
    "ProductSpectrum",
    "Projected",
    "Restriction",
    "Shifted",
    "Side",
    "SigmaMax",
    "SigmaMin",
    "Status",
    "TangentError",
    "TokenProjector",
    "TopSingular",
    "Transposed",
    "condition_number",
    "confidence_of_each",
    "dense",
    "effective_rank",
    "joint_confidence",
    "layer_norm_jacobian",
    "layerwise_sigma_min",
    "left_kernel",
    "left_kernel_share",
    "log_density",
    "lyapunov_exponents",
    "numerical_rank",
    "product_log_lower_bound",
    "product_log_singular_values",
    "product_log_upper_bound",
    "restricted_jacobian",
    "right_kernel",
    "rms_norm_jacobian",
    "sigma_max",
    "sigma_min",
    "singular_values",
    "stable_rank",
    "token_indices",
    "top_singular",
    "weyl_interval",
    "weyl_lower_bound",
]
