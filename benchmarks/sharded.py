"""`normscope bench sharded`: norms over sharded features, against what DTensor does by itself.

A step is a forward and a backward of one norm on gloo ranks of one thread. x, the output and their gradients
are sharded over the features. DTensor's `layer_norm` gathers x, γ and β on every rank and leaves the output
replicated, so it is cut again. DTensor's `rms_norm` raises an error on sharded features (PyTorch 2.13), so x
is gathered by hand. The two norms take turns, a barrier before each. Bytes are counted where the collectives
start, and converted to what a rank sends in a ring. The error is that of the output, float32, mean/std 1e4.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from benchmarks.process import Row, in_fresh_process, median_ms, median_ratio, row
from benchmarks.traffic import Traffic
from normscope.kernels import sharded_layer_norm, sharded_rms_norm

NUM_ROWS, ROUNDS = 1024, 21
EPS = 1e-5
Norm = Callable[[DTensor, DTensor, DTensor], DTensor]


def bench_sharded() -> list[Row]:
    """Rows of bytes and time for 2 and 4 ranks, and of the error at a large offset."""
    rows = []
    for ranks in (2, 4):
        for norm, width, dtype in (
            ("layer_norm", 1024, "bfloat16"),
            ("layer_norm", 4096, "bfloat16"),
            ("layer_norm", 4096, "float32"),
            ("rms_norm", 4096, "bfloat16"),
        ):
            measured = in_fresh_process(measure, ranks, norm, width, dtype, OMP_NUM_THREADS="1")
            rows += _rows(measured, f"{norm}, {ranks} ranks, d = {width}, {dtype}")
    return rows


def _rows(measured: dict[str, Any], what: str) -> list[Row]:
    ours, theirs = measured["ours"], measured["theirs"]
    figure, quartiles = median_ratio(theirs["times"], ours["times"])
    medians = f"{median_ms(theirs['times'], 1)} against {median_ms(ours['times'], 1)} of wall time"
    rows = [
        row(
            f"{what}: bytes that a rank sends a step, DTensor relative to sharded",
            f"{theirs['sent'] / ours['sent']:.0f}",
            "> 1",
            f"{theirs['sent'] / NUM_ROWS:.0f} against {ours['sent'] / NUM_ROWS:.0f} bytes a row; "
            f"collectives {_counts(theirs)} against {_counts(ours)}",
        ),
        row(
            f"{what}: time of a step, DTensor relative to sharded",
            figure,
            "> 1",
            f"{quartiles}; {medians}; {NUM_ROWS} rows, 1 thread a rank",
        ),
    ]
    if "layer_norm" in what and "float32" in what:
        rows.append(
            row(
                f"{what}: error of the output at mean/std 1e4, DTensor relative to sharded",
                f"{theirs['error'] / ours['error']:.0f}",
                "≥ 0.5",
                f"{theirs['error']:.1e} against {ours['error']:.1e}, relative to float64",
            )
        )
    return rows


def _counts(side: dict[str, Any]) -> str:
    return " + ".join(f"{count} {name}" for name, count in side["counts"].items())


def measure(ranks: int, norm: str, width: int, dtype: str) -> dict[str, Any]:
    """Traffic, step times in seconds and error of both norms, as rank 0 sees them."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (ranks, folder, norm, width, dtype), nprocs=ranks)
        return torch.load(f"{folder}/result", weights_only=True)


def _run_rank(rank: int, ranks: int, folder: str, norm: str, width: int, dtype: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    result = _compared(norm, width, getattr(torch, dtype))
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def _compared(norm: str, width: int, dtype: torch.dtype) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    drawn, ones = torch.randn(2, NUM_ROWS, width), torch.ones(width)
    x, grad = (distribute_tensor(each.to(dtype), mesh, [Shard(1)]) for each in drawn)
    weight, bias = (distribute_tensor(each.to(dtype), mesh, [Shard(0)]) for each in (ones, 0 * ones))
    sides = {"ours": SHARDED[norm], "theirs": GATHERED[norm]}
    steps = {name: _step(each, x, weight, bias, grad) for name, each in sides.items()}
    result: dict[str, Any] = {}
    for name, step in steps.items():
        with Traffic() as traffic:
            step()
        error = _error(sides[name], norm, drawn[0, :64] + 1e4, weight, bias)
        result[name] = {"sent": traffic.sent, "counts": dict(traffic.counts), "error": error, "times": []}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            result[name]["times"].append(_wall(step))
    return result


def _step(norm: Norm, x: DTensor, weight: DTensor, bias: DTensor, grad: DTensor) -> Callable[[], object]:
    leaves: list[Any] = [each.detach().requires_grad_() for each in (x, weight, bias)]

    def step() -> object:
        return torch.autograd.grad(norm(*leaves), leaves, grad, allow_unused=True)

    return step


def _wall(step: Callable[[], object]) -> float:
    """Wall-clock time in seconds until the last rank has finished a step that all start together."""
    dist.barrier()
    began = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - began


def _error(norm: Norm, name: str, x: Tensor, weight: DTensor, bias: DTensor) -> float:
    """Relative error of the output in the Frobenius norm, against float64."""
    shape = x.shape[-1:]
    reference = getattr(functional, name)
    exact = reference(x.double(), shape, eps=EPS)
    wide = (each.to(x.dtype) for each in (weight, bias))
    y: Any = norm(distribute_tensor(x, weight.device_mesh, [Shard(1)]), *wide)  # type: ignore[arg-type]
    found = y.full_tensor()
    return float((found.double() - exact).norm() / exact.norm())


def _gathered_layer_norm(x: DTensor, weight: DTensor, bias: DTensor) -> DTensor:
    y = functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    assert isinstance(y, DTensor)
    return y.redistribute(placements=x.placements)


def _gathered_rms_norm(x: DTensor, weight: DTensor, bias: DTensor) -> DTensor:
    whole, gain = (each.redistribute(placements=[Replicate()]) for each in (x, weight))
    y = functional.rms_norm(whole, x.shape[-1:], gain, EPS)
    assert isinstance(y, DTensor)
    return y.redistribute(placements=x.placements)


SHARDED: dict[str, Norm] = {
    "layer_norm": functools.partial(sharded_layer_norm, eps=EPS),
    "rms_norm": lambda x, weight, bias: sharded_rms_norm(x, weight, eps=EPS),
}
GATHERED: dict[str, Norm] = {"layer_norm": _gathered_layer_norm, "rms_norm": _gathered_rms_norm}
