"""Cases of the sharded norms that every rank of a gloo group runs; a rank that fails names the case."""

import itertools
import multiprocessing
import re
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from benchmarks.traffic import Traffic
from normscope.errors import UsageError
from normscope.kernels import sharded_layer_norm, sharded_rms_norm

CASES: list[Callable[[int], None]] = []
EPS = 1e-5
WIDTHS = (64, 10, 9, 1)
"""Even shards, uneven shards, ranks without features."""


def case(function: Callable[[int], None]) -> Callable[[int], None]:
    """Add a case, called with the number of ranks."""
    CASES.append(function)
    return function


IMPORTS = [__name__, "torch._dynamo.backends.common", "torch.distributed.tensor.debug"]
"""Modules that the ranks need, imported once in the process from which they are forked: it takes seconds."""


def run_ranks(ranks: int) -> None:
    """Run all cases on gloo ranks of one thread; raises the first failure."""
    multiprocessing.set_forkserver_preload(IMPORTS)
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(
            _run_rank, (ranks, f"{folder}/store"), nprocs=ranks, start_method="forkserver"
        )


def _run_rank(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    for each in CASES:
        try:
            each(ranks)
        except BaseException as error:
            error.add_note(f"in the case {each.__name__} on rank {rank} of {ranks}")
            raise
    dist.barrier()
    dist.destroy_process_group()


class Inputs(NamedTuple):
    """x (rows, d), its output's gradient, γ and β: whole tensors, the same on every rank."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    bias: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(each.to(dtype) for each in self))


class Results(NamedTuple):
    """Output and gradients as whole float64 tensors."""

    y: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def inputs(*shape: int, offset: float = 0.0, spread: float = 0.0, dtype: torch.dtype) -> Inputs:
    """Gaussian inputs; `spread` moves each feature by another amount, so that means of shards differ."""
    draw = torch.Generator().manual_seed(sum(shape))
    x, grad = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    x = x + offset + spread * torch.linspace(-1, 1, shape[-1], dtype=torch.float64)
    weight, bias = (torch.randn(shape[-1], generator=draw, dtype=torch.float64) for _ in range(2))
    return Inputs(x, grad, 1 + 0.1 * weight, bias).to(dtype)


def dense(norm: str, given: Inputs, dtype: torch.dtype) -> Results:
    """The unsharded norm of torch.nn.functional in `dtype`."""
    x, weight, bias = (each.to(dtype, copy=True).requires_grad_() for each in (given.x, *given[2:]))
    shape = x.shape[-1:]
    if norm == "layer":
        y = functional.layer_norm(x, shape, weight, bias, EPS)
    else:
        y = functional.rms_norm(x, shape, weight, EPS)
    y.backward(given.grad.to(dtype))
    wide = [each.detach().double() for each in (y, x.grad, weight.grad)]
    return Results(*wide, bias.grad.double() if norm == "layer" else None)


def flat(ranks: int) -> DeviceMesh:
    """A mesh of one dimension, which shards the features."""
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))


def leaf(value: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """A distributed leaf that requires a gradient."""
    return distribute_tensor(value.clone(), mesh, placements).requires_grad_()


def called(norm: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> DTensor:
    if norm == "layer":
        return sharded_layer_norm(x, weight, bias, eps=EPS)
    return sharded_rms_norm(x, weight, eps=EPS)


def sharded(norm: str, given: Inputs, mesh: DeviceMesh) -> Results:
    """The sharded norm over a mesh of one dimension."""
    last = given.x.ndim - 1
    x = leaf(given.x, mesh, Shard(last))
    weight, bias = (leaf(each, mesh, Shard(0)) for each in given[2:])
    y = called(norm, x, weight, bias)
    assert (y.shape, y.dtype, y.stride(), y.placements) == (x.shape, x.dtype, x.stride(), x.placements)
    y.backward(distribute_tensor(given.grad, mesh, [Shard(last)]))
    assert x.grad.placements == x.placements
    bias_grad = None if norm == "rms" else bias.grad.full_tensor().double()
    return Results(*(whole(each) for each in (y, x.grad, weight.grad)), bias_grad)


def whole(x: DTensor) -> Tensor:
    return x.full_tensor().detach().double()


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm())


@case
def equals_the_dense_norm_in_float64(ranks: int) -> None:
    for norm, width, offset in itertools.product(("layer", "rms"), WIDTHS, (0.0, 1e4)):
        given = inputs(2, 3, width, offset=offset, spread=5.0, dtype=torch.float64)
        for found, exact in zip(
            sharded(norm, given, flat(ranks)), dense(norm, given, torch.float64), strict=True
        ):
            if found is not None:
                torch.testing.assert_close(found, exact, rtol=0, atol=1e-12 * (1 + offset))


@case
def blocks_of_rows_change_nothing(ranks: int) -> None:
    """Blocks of one row, and more rows than fit into a block."""
    with patch("normscope.kernels.row_blocks.NUMBERS", 1):
        equals_the_dense_norm_in_float64(ranks)
    given = inputs(3000, 64, dtype=torch.float64)
    for found, exact in zip(
        sharded("layer", given, flat(ranks)), dense("layer", given, torch.float64), strict=True
    ):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-11)


@case
def is_as_close_to_float64_as_the_dense_norm(ranks: int) -> None:
    """At most twice the error of torch.nn.functional at the same precision, plus the last rounding."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for norm, width, offset, dtype in itertools.product(("layer", "rms"), (64, 9), (0.0, 1e4), dtypes):
        given = inputs(16, width, offset=offset, spread=20.0, dtype=dtype)
        exact, native = dense(norm, given, torch.float64), dense(norm, given, dtype)
        for name, ours in sharded(norm, given, flat(ranks))._asdict().items():
            if ours is None:
                continue
            good, theirs = getattr(exact, name), getattr(native, name)
            rounding = torch.finfo(dtype).eps * float(good.norm())
            limit = 2 * distance(theirs, good) + rounding
            error = distance(ours, good)
            assert error <= limit, f"{norm} {width} {offset} {dtype} {name}: {error} > {limit}"


@case
def starts_one_all_reduce_each_way(ranks: int) -> None:
    for norm, forward, backward in (("layer", 2 * ranks + 1, 2), ("rms", 1, 1)):
        given = inputs(5, 7, 12, dtype=torch.bfloat16)
        x = leaf(given.x, flat(ranks), Shard(2))
        weight, bias = (leaf(each, x.device_mesh, Shard(0)) for each in given[2:])
        grad = distribute_tensor(given.grad, x.device_mesh, [Shard(2)])
        with Traffic() as traffic:
            y = called(norm, x, weight, bias)
        assert traffic.counts == {"all_reduce": 1}
        assert traffic.payload == 5 * 7 * forward * 4  # float32 statistics of each row
        with Traffic() as traffic:
            y.backward(grad)
        assert traffic.counts == {"all_reduce": 1}
        assert traffic.payload == 5 * 7 * backward * 4


@case
def comm_debug_mode_counts_the_same(ranks: int) -> None:
    if ranks > 2:  # its import takes seconds on each rank
        return
    from torch.distributed.tensor.debug import CommDebugMode

    for norm in ("layer", "rms"):
        given = inputs(5, 12, dtype=torch.float32)
        x = leaf(given.x, flat(ranks), Shard(1))
        weight, bias = (leaf(each, x.device_mesh, Shard(0)) for each in given[2:])
        grad = distribute_tensor(given.grad, x.device_mesh, [Shard(1)])
        with CommDebugMode() as forward:
            y = called(norm, x, weight, bias)
        with CommDebugMode() as backward:
            y.backward(grad)
        assert forward.get_total_counts() == backward.get_total_counts() == 1


@case
def keeps_all_digits_where_the_naive_sums_cancel(ranks: int) -> None:
    """float32 with mean/std up to 1e6: E[x²] − E[x]² has no correct digit there, torch's layer_norm two."""
    for offset, spread in itertools.product((0.0, 1e2, 1e4, 1e6), (0.0, 3.0, 100.0)):
        given = inputs(8, 97, offset=offset, spread=spread, dtype=torch.float32)
        exact = dense("layer", given, torch.float64)
        for found, good in zip(sharded("layer", given, flat(ranks)), exact, strict=True):
            assert distance(found, good) <= 2e-7 * float(good.norm()), f"{offset} {spread}"


@case
def a_row_of_equal_values_gives_the_bias(ranks: int) -> None:
    for value in (0.0, 3.0, 12345.678):
        given = inputs(3, 10, dtype=torch.float32)
        x = distribute_tensor(torch.full((3, 10), value), flat(ranks), [Shard(1)])
        weight, bias = (distribute_tensor(each, x.device_mesh, [Shard(0)]) for each in given[2:])
        y = sharded_layer_norm(x, weight, bias)
        torch.testing.assert_close(y.full_tensor(), given.bias.expand(3, 10), rtol=1e-5, atol=1e-5)


@case
def a_value_that_is_not_finite_stays_in_its_row(ranks: int) -> None:
    x = inputs(3, 10, dtype=torch.float32).x
    x[1, 9] = torch.inf
    x[2, 0] = torch.nan
    for norm in ("layer", "rms"):
        y = called(norm, distribute_tensor(x, flat(ranks), [Shard(1)]), None, None).full_tensor()
        assert bool(y[0].isfinite().all())
        assert bool(y[2].isnan().all())
        assert not bool(y[1, 9].isfinite())


@case
def second_derivatives_equal_the_dense_ones(ranks: int) -> None:
    for norm, width in itertools.product(("layer", "rms"), (9, 12)):
        given = inputs(4, width, spread=2.0, dtype=torch.float64)
        mesh, direction = flat(ranks), inputs(5, width, dtype=torch.float64).x[:4]
        x, weight, bias = (
            leaf(each, mesh, Shard(each.ndim - 1)) for each in (given.x, given.weight, given.bias)
        )
        grad = leaf(given.grad, mesh, Shard(1))
        first = torch.autograd.grad(called(norm, x, weight, bias), x, grad, create_graph=True)[0]
        along = distribute_tensor(direction, mesh, [Shard(1)])
        with Traffic() as traffic:
            found = torch.autograd.grad(first, (x, weight, grad), along)
        assert traffic.counts == {"all_reduce": 2}  # for the sums of the backward and for its statistics

        x, weight, bias, grad = (
            each.clone().requires_grad_() for each in (given.x, given.weight, given.bias, given.grad)
        )
        y = (
            functional.layer_norm(x, (width,), weight, bias, EPS)
            if norm == "layer"
            else functional.rms_norm(x, (width,), weight, EPS)
        )
        first = torch.autograd.grad(y, x, grad, create_graph=True)[0]
        for ours, theirs in zip(found, torch.autograd.grad(first, (x, weight, grad), direction), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=1e-12)


@case
def forward_mode_is_refused(ranks: int) -> None:
    """DTensor takes no tangents, and a dual shard that would reach the norm is refused too."""
    given = inputs(4, 12, dtype=torch.float64)
    x = distribute_tensor(given.x, flat(ranks), [Shard(1)])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        forward_ad.make_dual(x, x)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(sharded_layer_norm, (x,), (x,))
    from normscope.kernels.sharded_layout import feature_shards
    from normscope.kernels.sharded_step import ShardNorm

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.to_local(), x.to_local())
        with pytest.raises(RuntimeError, match="jvp"):
            ShardNorm.apply(dual, None, None, feature_shards(x), EPS, True)
        with pytest.raises((NotImplementedError, RuntimeError)):
            sharded_layer_norm(DTensor.from_local(dual, x.device_mesh, x.placements, run_check=False))


@case
def compiles_to_one_graph_with_the_same_collectives(ranks: int) -> None:
    if ranks > 2:  # the graph is the same, and each rank takes seconds to trace it
        return
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    for norm in ("layer", "rms"):
        given = inputs(4, 12, dtype=torch.float32)
        x, weight, bias = (
            leaf(each, flat(ranks), Shard(each.ndim - 1)) for each in (given.x, given.weight, given.bias)
        )
        grad = distribute_tensor(given.grad, x.device_mesh, [Shard(1)])
        graphs: list[int] = []

        def counting(graph: torch.fx.GraphModule, _: object, graphs: list[int] = graphs) -> object:
            """Count the all-reduces of a graph, which runs as it is."""
            graphs.append(sum("all_reduce" in str(node.target) for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=counting, bw_compiler=counting)
        y = torch.compile(called, backend=backend, fullgraph=True)(norm, x, weight, bias)
        y.backward(grad)
        assert graphs == [1, 1]  # the forward and the backward
        exact = dense(norm, given, torch.float64)
        torch.testing.assert_close(whole(y), exact.y, rtol=0, atol=1e-6)
        torch.testing.assert_close(whole(x.grad), exact.x, rtol=0, atol=1e-6)
        torch.testing.assert_close(whole(weight.grad), exact.weight, rtol=0, atol=1e-5)


@case
def rows_may_be_sharded_over_another_mesh_dimension(ranks: int) -> None:
    """A mesh (2, R/2), also with fewer rows than ranks; gradients of γ and β are partial sums over rows."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))
    for norm, rows, row_dim in itertools.product(("layer", "rms"), (5, 1), (0, 1)):
        given = inputs(rows, 3, 9, dtype=torch.float64)
        x = leaf(given.x, mesh, Shard(row_dim), Shard(2))
        weight, bias = (leaf(each, mesh, Replicate(), Shard(0)) for each in given[2:])
        y = called(norm, x, weight, bias)
        assert y.placements == x.placements
        with Traffic() as traffic:
            y.backward(distribute_tensor(given.grad, mesh, [Shard(row_dim), Shard(2)]))
        assert traffic.counts == {"all_reduce": 1}, traffic.counts
        assert weight.grad.placements == (Partial(), Shard(0))
        exact = dense(norm, given, torch.float64)
        torch.testing.assert_close(whole(y), exact.y, rtol=0, atol=1e-12)
        torch.testing.assert_close(whole(x.grad), exact.x, rtol=0, atol=1e-12)
        torch.testing.assert_close(whole(weight.grad), exact.weight, rtol=0, atol=1e-12)
        if norm == "layer":
            torch.testing.assert_close(whole(bias.grad), exact.bias, rtol=0, atol=1e-12)


@case
def the_features_may_be_the_first_mesh_dimension_and_x_a_vector(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("tensor", "data"))
    given = inputs(9, dtype=torch.float64)
    x = leaf(given.x, mesh, Shard(0), Replicate())
    weight = leaf(given.weight, mesh, Shard(0), Replicate())
    y = sharded_layer_norm(x, weight, eps=EPS)
    y.backward(distribute_tensor(given.grad, mesh, [Shard(0), Replicate()]))
    exact = dense("layer", given._replace(bias=torch.zeros_like(given.bias)), torch.float64)
    assert weight.grad.placements == weight.placements
    for found, good in ((y, exact.y), (x.grad, exact.x), (weight.grad, exact.weight)):
        torch.testing.assert_close(whole(found), good, rtol=0, atol=1e-12)


@case
def a_replicated_gradient_or_weight_is_cut(ranks: int) -> None:
    given = inputs(4, 10, dtype=torch.float64)
    x = leaf(given.x, flat(ranks), Shard(1))
    weight, bias = (leaf(each, x.device_mesh, Replicate()) for each in given[2:])
    with Traffic() as traffic:
        y = sharded_layer_norm(x, weight, bias, eps=EPS)
    assert traffic.counts == {"all_reduce": 1}
    (y.full_tensor() * given.grad).sum().backward()
    exact = dense("layer", given, torch.float64)
    for found, good in zip((y, x.grad, weight.grad, bias.grad), exact, strict=True):
        torch.testing.assert_close(whole(found), good, rtol=0, atol=1e-12)
    assert weight.grad.placements == weight.placements


@case
def parameters_keep_their_own_precision(ranks: int) -> None:
    given = inputs(4, 10, dtype=torch.float32)
    x = leaf(given.x.bfloat16(), flat(ranks), Shard(1))
    weight = leaf(given.weight, x.device_mesh, Shard(0))
    y = sharded_rms_norm(x, weight, eps=EPS)
    y.backward(distribute_tensor(given.grad.bfloat16(), x.device_mesh, [Shard(1)]))
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@case
def errors_say_what_to_do(ranks: int) -> None:
    mesh, good = flat(ranks), torch.ones(4, 8)
    x, weight = distribute_tensor(good, mesh, [Shard(1)]), distribute_tensor(good[0], mesh, [Shard(0)])
    square, narrow = init_device_mesh("cpu", (2, ranks // 2)), distribute_tensor(good[:, 0], mesh)
    rank = dist.get_rank()
    for match, wrong in (
        ("x is a Tensor.*distribute_tensor", lambda: sharded_layer_norm(good)),
        ("Shard.1.*redistribute", lambda: sharded_layer_norm(distribute_tensor(good, mesh, [Shard(0)]))),
        ("exactly one", lambda: sharded_rms_norm(distribute_tensor(good, square, [Shard(1), Shard(1)]))),
        (
            "partial sums",
            lambda: sharded_layer_norm(DTensor.from_local(good, square, [Partial(), Shard(1)])),
        ),
        ("int64", lambda: sharded_rms_norm(distribute_tensor(good.long(), mesh, [Shard(1)]))),
        ("at least one feature", lambda: sharded_rms_norm(distribute_tensor(good[:, :0], mesh, [Shard(1)]))),
        ("weight is a Tensor", lambda: sharded_layer_norm(x, good[0])),
        (
            "bias of shape .4,.*.8,",
            lambda: sharded_layer_norm(x, weight, narrow),
        ),
        (
            "weight is a DTensor on another mesh",
            lambda: sharded_rms_norm(x, distribute_tensor(good[0], square)),
        ),
        ("eps=-1", lambda: sharded_layer_norm(x, eps=-1.0)),
        ("eps=nan", lambda: sharded_rms_norm(x, eps=float("nan"))),
        (
            "shard of . features.*torch.chunk",
            lambda: sharded_rms_norm(
                DTensor.from_local(
                    good.new_ones(4, 9 if rank == 0 else 1),
                    mesh,
                    [Shard(1)],
                    run_check=False,
                    shape=torch.Size((4, 8 + ranks)),
                    stride=(8 + ranks, 1),
                )
            ),
        ),
    ):
        with pytest.raises(UsageError, match=match):
            wrong()


@case
def the_page_runs_as_printed(ranks: int) -> None:
    page = Path(__file__).parents[2] / "docs" / "sharded-norms.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(block, str(page), "exec"), {})
