"""LayerNorm and RMSNorm over a feature axis that is sharded over ranks: DTensor in, DTensor out.

DTensor's own `layer_norm` first gathers the features on every rank, and its output stays replicated. These
norms exchange a few numbers for each row instead, and the output is sharded as the input.
"""

import math

from torch import Tensor
from torch.distributed.tensor import DTensor

from normscope.errors import UsageError
from normscope.kernels.sharded_layout import feature_shards, local_parameter
from normscope.kernels.sharded_step import ShardNorm


def sharded_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> DTensor:
    """γ (x − mean)/√(variance + ε) + β over the last dimension, which one mesh dimension shards.

    The forward all-reduces 2R + 1 numbers for each row (R ranks share the features), the backward two. The
    error does not grow with mean/std. Half precision has float32 statistics. Gradients of γ and β are partial
    sums over mesh dimensions that shard rows, as DTensor has them. Second derivatives are right; forward mode
    is refused.

    Args:
        x: DTensor (…, d) with exactly one `Shard(-1)`; other mesh dimensions may shard other dimensions.
        weight, bias: γ and β, DTensors (d,) on the mesh of x, best with `Shard(0)` over the features. A
            replicated one is cut without traffic; its gradient is gathered.
        eps: ε.

    Returns:
        A DTensor with the shape, dtype and placements of x.

    Raises:
        UsageError: x, γ or β has another layout, or ε is negative.

    Formula: Ba et al. 2016, arXiv:1607.06450; merging of statistics: Chan, Golub and LeVeque 1983.
    """
    return _sharded(x, weight, bias, eps, centred=True)


def sharded_rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> DTensor:
    """γ x/√(mean x² + ε) over the last dimension, which one mesh dimension shards.

    Forward and backward all-reduce one number for each row. For the rest see `sharded_layer_norm`.

    Formula: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return _sharded(x, weight, None, eps, centred=False)


def _sharded(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> DTensor:
    if not (math.isfinite(eps) and eps >= 0):
        raise UsageError(f"eps={eps}", "a finite number, at least 0", "use 1e-5 or 1e-6")
    shards = feature_shards(x)
    assert isinstance(x, DTensor)
    local = x.to_local(grad_placements=x.placements)
    y = ShardNorm.apply(
        local.flatten(0, -2) if local.ndim > 1 else local[None],
        local_parameter("weight", weight, x, shards),
        local_parameter("bias", bias, x, shards),
        shards,
        eps,
        centred,
    )
    return DTensor.from_local(
        y.reshape(local.shape), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
