"""A LayerNorm whose features are spread over ranks, and the program that tries it on some.

`python -m normscope.claims.shards SETTINGS`, settings as JSON: seeds, worlds. The process starts the ranks as
copies of itself, and prints a list of what they found.

Shapes: N rows, D features of all ranks, S = D/world of one.
"""

import datetime
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from normscope.claims.experiments import gaussian
from normscope.train.distributed import leave

PATIENCE = datetime.timedelta(seconds=60)
"""Time after which a rank that waits for another gives up."""
ROWS, WIDTH, EPS, CHUNKS = 24, 48, 1e-5, 4
LATE = 0.05
"""Seconds by which one rank comes late to a collective, so that the others wait for it."""


@dataclass
class Ranks:
    """The collectives of one norm, counted."""

    calls: int = 0

    def sum(self, value: Tensor) -> "dist.Work":
        """Begin to all-reduce `value` in place."""
        self.calls += 1
        return dist.all_reduce(value, async_op=True)

    def gather(self, value: Tensor) -> Tensor:
        """All ranks' values [world, …]."""
        self.calls += 1
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value)
        return torch.stack(parts)


Statistics = Callable[[Tensor, Ranks], tuple[Tensor, Tensor]]


def by_sums(x_NS: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Mean and variance [N, 1] by one all-reduce of (Σx, Σx²)."""
    sums = torch.stack((x_NS.sum(-1), x_NS.square().sum(-1)))
    ranks.sum(sums).wait()
    mean, square = sums[..., None] / WIDTH
    return mean, square - mean.square()


def by_merging(x_NS: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The same by one all-gather of each rank's own mean and squares (Chan et al. 1979)."""
    mean_N, variance_N = x_NS.mean(-1), x_NS.var(-1, correction=0)
    means, variances = ranks.gather(torch.stack((mean_N, variance_N))).unbind(1)
    mean = means.mean(0)
    return mean[:, None], (variances + (means - mean).square()).mean(0)[:, None]


def locally(x_NS: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Each rank's own: nothing is sent."""
    return x_NS.mean(-1, keepdim=True), x_NS.var(-1, correction=0, keepdim=True)


STATISTICS: dict[str, Statistics] = {"sums": by_sums, "merging": by_merging, "local": locally}


class ShardedLayerNorm(torch.autograd.Function):
    """LayerNorm of x (N, D) of which this rank has x (N, S)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_NS: Tensor, gain_S: Tensor, bias_S: Tensor, how: str, ranks: Ranks
    ) -> Tensor:
        """(N, S) → (N, S)."""
        mean, variance = STATISTICS[how](x_NS, ranks)
        scale = (variance + EPS).rsqrt()
        normal_NS = (x_NS - mean) * scale
        ctx.save_for_backward(normal_NS, scale, gain_S)
        ctx.how, ctx.ranks = how, ranks  # type: ignore[attr-defined]
        return normal_NS * gain_S + bias_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """One all-reduce of (Σ g γ, Σ g γ ẑ)."""
        (g_NS,) = gradients
        normal_NS, scale, gain_S = ctx.saved_tensors
        inner_NS = g_NS * gain_S
        sums = torch.stack((inner_NS.sum(-1), (inner_NS * normal_NS).sum(-1)))
        if ctx.how == "local":
            sums *= dist.get_world_size()
        else:
            ctx.ranks.sum(sums).wait()
        mean, along = sums[..., None] / WIDTH
        to_x = (inner_NS - mean - normal_NS * along) * scale
        return to_x, (g_NS * normal_NS).sum(0), g_NS.sum(0), None, None


def inputs(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Float64 x [N, D], by name."""
    x = gaussian(seed, ROWS, WIDTH)
    yield "N(0, 1)", x
    yield "N(5, 1) · 1e3", 1e3 * (x + 5)
    yield "one feature of 100", torch.cat((x[:, :1] + 100, x[:, 1:]), 1)
    yield "a mean of 1e5 σ", x + 1e5


def _compared(seed: int) -> Iterator[dict[str, Any]]:
    """Each way of the statistics against the whole norm, forward and backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    drawn = gaussian(seed, 2 + ROWS, WIDTH)
    gain, bias, g = drawn[0], drawn[1], drawn[2:]
    for name, x in inputs(seed):
        whole = [each.clone().requires_grad_() for each in (x, gain, bias)]
        y = F.layer_norm(whole[0], (WIDTH,), whole[1], whole[2], EPS)
        truth = [y, *torch.autograd.grad(y, whole, g)]
        offset = float((x.mean(-1) / x.std(-1, correction=0)).abs().max())
        for how in STATISTICS:
            ranks = Ranks()
            mine = [t.detach().chunk(world, -1)[rank].clone().requires_grad_() for t in whole]
            part = ShardedLayerNorm.apply(*mine, how, ranks)
            ahead = ranks.calls
            found = [part, *torch.autograd.grad(part, mine, g.chunk(world, -1)[rank])]
            error = max(_error(its, everyone) for its, everyone in zip(found, truth, strict=True))
            place = {"seed": seed, "world": world, "input": name, "offset": offset, "how": how}
            yield place | {"error": _largest(error), "forward": ahead, "backward": ranks.calls - ahead}


def _overlapped(seed: int) -> dict[str, Any]:
    """Products x W in chunks of rows; the sums of one travel while the next is multiplied.

    The last rank comes late, so that whether the others have gone on meanwhile can be seen.
    """
    rank, world, ranks = dist.get_rank(), dist.get_world_size(), Ranks()
    x, weight = gaussian(seed, ROWS + WIDTH, WIDTH).split((ROWS, WIDTH))
    mine = weight.chunk(world, -1)[rank]
    products: list[Tensor] = []
    works: list[tuple[Tensor, Any]] = []
    under_way = 0
    dist.barrier()
    for chunk in x.chunk(CHUNKS):
        under_way += bool(works) and not works[-1][1].is_completed()
        products.append(chunk @ mine)
        sums = torch.stack((products[-1].sum(-1), products[-1].square().sum(-1)))
        if rank == world - 1:
            time.sleep(LATE)
        works.append((sums, ranks.sum(sums)))
    for _, work in works:
        work.wait()
    mean, square = torch.cat([sums for sums, _ in works], 1)[..., None] / WIDTH
    found = (torch.cat(products) - mean) * (square - mean.square() + EPS).rsqrt()
    truth = F.layer_norm(x @ weight, (WIDTH,), eps=EPS)
    place = {"seed": seed, "world": world, "input": "x W in chunks", "how": "overlapped"}
    error, waiting = _largest(_error(found, truth)), int(_largest(under_way))
    return place | {"error": error, "under_way": waiting, "chunks": CHUNKS}


def _error(mine: Tensor, everyone: Tensor) -> float:
    """Error of this rank's part, relative to the whole."""
    part = everyone.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    return float(((mine - part).norm() / everyone.norm()).detach())


def _largest(value: float) -> float:
    """Largest value over all ranks."""
    result = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return float(result)


def _rank(rank: int, world: int, seeds: list[int], store: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=PATIENCE)
    found = [row for seed in seeds for row in (*_compared(seed), _overlapped(seed))]
    leave(together=True)
    return found


def main(settings: str) -> None:
    """Print what the ranks found, one world after the other."""
    given = json.loads(settings)
    context = multiprocessing.get_context("fork")  # nothing of torch has run yet: no thread is lost
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in given["worlds"]:
            store = Path(folder, f"store-{world}").as_uri()
            # A process for each rank, as each waits for all the others.
            with ProcessPoolExecutor(world, mp_context=context) as pool:
                ranks = [pool.submit(_rank, rank, world, given["seeds"], store) for rank in range(world)]
                found += ranks[0].result()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
