"""Layouts of sharded tensors: which rank holds which features, and what a sharded norm refuses."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from normscope.errors import UsageError


@dataclass(frozen=True)
class FeatureShards:
    """Shards of the feature axis over one dimension of a mesh.

    Attributes:
        mesh: the mesh.
        dim: the mesh dimension that shards the features.
        sizes: number of features of each rank of that dimension; zero where a rank holds none.
        rank: this process's coordinate in that dimension.
    """

    mesh: DeviceMesh
    dim: int
    sizes: tuple[int, ...]
    rank: int

    @property
    def width(self) -> int:
        """Number of features of all ranks together."""
        return sum(self.sizes)


def feature_shards(x: Tensor) -> FeatureShards:
    """The shards of the last dimension of x.

    Raises:
        UsageError: x is no floating-point DTensor, its last dimension is not sharded over exactly one mesh
            dimension, it holds partial sums, or its shards are not those that DTensor cuts.
    """
    if not isinstance(x, DTensor):
        raise UsageError(
            f"x is a {type(x).__name__}",
            "a DTensor that is sharded on its last dimension",
            "call distribute_tensor(x, mesh, [Shard(-1)]), or torch.nn.functional on a plain tensor",
        )
    if not x.dtype.is_floating_point or x.ndim == 0 or x.shape[-1] == 0:
        raise UsageError(
            f"x of shape {tuple(x.shape)} and dtype {x.dtype}",
            "a floating-point tensor with at least one feature",
            "check what is passed as x",
        )
    dim = _feature_dim(x)
    mesh = x.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(
            f"rank {torch.distributed.get_rank()}, which is not in the mesh of x",
            "a rank of the mesh",
            "call the norm only on ranks of the mesh",
        )
    shards = FeatureShards(mesh, dim, shard_sizes(x.shape[-1], mesh.size(dim)), coordinate[dim])
    held = x.to_local().shape[-1]
    if held != shards.sizes[shards.rank]:
        raise UsageError(
            f"a shard of {held} features on rank {shards.rank} of mesh dimension {dim}",
            f"{shards.sizes[shards.rank]} features, as distribute_tensor cuts {shards.width}",
            "build x with distribute_tensor, or cut the shards as torch.chunk does",
        )
    return shards


def shard_sizes(width: int, ranks: int) -> tuple[int, ...]:
    """Number of features of each rank, as DTensor's `Shard` cuts them: ⌈width/ranks⌉ until none is left."""
    most = -(-width // ranks)
    return tuple(max(0, min(most, width - rank * most)) for rank in range(ranks))


def _feature_dim(x: DTensor) -> int:
    """The mesh dimension that shards the last dimension of x."""
    last = x.ndim - 1
    over = [dim for dim, each in enumerate(x.placements) if _sharded_dim(each, x.ndim) == last]
    plain = all(type(x.placements[dim]) is Shard for dim in over)
    if len(over) != 1 or not plain:
        raise UsageError(
            f"x with placements {x.placements}",
            f"exactly one Shard({last}), so that one mesh dimension shards the features",
            "call x.redistribute(placements=…); if no dimension shards the features, use torch.nn.functional",
        )
    if any(each.is_partial() for each in x.placements):
        raise UsageError(
            f"x with placements {x.placements}",
            "Shard and Replicate only: a norm of partial sums is not a sum of norms",
            "call x.redistribute(placements=…) first",
        )
    return over[0]


def _sharded_dim(placement: Placement, ndim: int) -> int | None:
    """The dimension that a placement shards, of a tensor with `ndim` dimensions; None if it shards none."""
    dim: int | None = getattr(placement, "dim", None)
    return None if dim is None else dim % ndim


def local_parameter(name: str, value: Tensor | None, x: DTensor, shards: FeatureShards) -> Tensor | None:
    """This rank's shard of a weight or bias.

    Its gradient is a partial sum over mesh dimensions that shard rows of x. A parameter is first
    redistributed to Shard(0) over the features and Replicate elsewhere. Cutting a replicated one moves
    nothing forward; its gradient is gathered in the backward.

    Raises:
        UsageError: the parameter is no DTensor on the mesh of x, or its shape is not (features,).
    """
    if value is None:
        return None
    if not isinstance(value, DTensor) or value.device_mesh != x.device_mesh:
        what = "a DTensor on another mesh" if isinstance(value, DTensor) else f"a {type(value).__name__}"
        raise UsageError(
            f"{name} is {what}",
            "a DTensor on the mesh of x",
            f"call distribute_tensor({name}, x.device_mesh, placements) with Shard(0) where x has "
            f"Shard({x.ndim - 1}) and Replicate() elsewhere",
        )
    if value.shape != (shards.width,):
        raise UsageError(
            f"{name} of shape {tuple(value.shape)}",
            f"({shards.width},), one number for each feature of x",
            f"check the width of {name}",
        )
    wanted = tuple(Shard(0) if dim == shards.dim else Replicate() for dim in range(x.device_mesh.ndim))
    summed = [
        Shard(0) if dim == shards.dim else Replicate() if each.is_replicate() else Partial()
        for dim, each in enumerate(x.placements)
    ]
    if value.placements != wanted:
        value = value.redistribute(placements=wanted)  # its backward also reduces the partial sums
    return value.to_local(grad_placements=summed)
