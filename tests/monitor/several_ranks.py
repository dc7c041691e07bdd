"""Runs of several processes on this machine (gloo), started by `test_ranks.py`; each writes to one store."""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normscope.monitor import Look, Monitor, together
from normscope.monitor import monitor as monitor_of_runs

sys.path.insert(0, str(Path(__file__).parents[1] / "capture" / "scripts"))
from parts import VOCABULARY, Decoder, cross_entropy

STORE = "run.db"
LENGTH, SAMPLES = 12, 4


def join(rank: int, size: int, folder: Path) -> None:
    """Meet the other processes."""
    torch.set_num_threads(1)
    logging.getLogger("normscope").setLevel(logging.CRITICAL)
    method = "env://" if "TORCHELASTIC_RUN_ID" in os.environ else f"file://{folder / 'meeting'}"
    options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=method, **options)


def model_and_optimizer(lr: float = 1e-3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(blocks=2, width=16)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def batch(step: int, rank: int, samples: int = SAMPLES) -> Tensor:
    """Ids (samples, LENGTH + 1) of a step and rank, that count upwards from a random begin."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    begin = torch.randint(0, VOCABULARY, (samples, 1), generator=generator)
    return (begin + torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    return cross_entropy(model(ids[:, :-1]), ids[:, 1:])


def average(model: nn.Module) -> None:
    """Average the gradients over the processes, as a loop without DDP does."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([each.flatten() for each in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def agree(rank: int, size: int, folder: Path) -> None:
    averaged(rank, folder, 25)


def skip(rank: int, size: int, folder: Path) -> None:
    """Rank 1 leaves out the update of step 12."""
    averaged(rank, folder, 25, skipped=12 if rank == 1 else 0)


def drift(rank: int, size: int, folder: Path) -> None:
    """Rank 1 scales its weights after step 12."""
    averaged(rank, folder, 45, scaled=12 if rank == 1 else 0)


def averaged(rank: int, folder: Path, steps: int, skipped: int = 0, scaled: int = 0) -> None:
    model, optimizer = model_and_optimizer()
    with Monitor(model, optimizer, store=folder / STORE) as monitor:
        for step in range(1, steps + 1):
            loss = loss_of(model, batch(step, rank))
            loss.backward()
            average(model)
            if step != skipped:
                optimizer.step()
            if step == scaled:
                for parameter in model.parameters():
                    parameter.data.mul_(1.01)
            optimizer.zero_grad()
            monitor.step(loss)
    meet()


def data(rank: int, size: int, folder: Path) -> None:
    """Rank 2 reads noise."""
    model, optimizer = model_and_optimizer(lr=3e-2)
    with Monitor(model, optimizer, store=folder / STORE) as monitor:
        for step in range(1, 61):
            ids = batch(step, rank) % 8
            if rank == 2:
                ids = torch.randint(0, VOCABULARY, ids.shape)
            loss = loss_of(model, ids)
            loss.backward()
            average(model)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    meet()


def die(rank: int, size: int, folder: Path) -> None:
    """Rank 1 is killed after step 15; the ranks exchange nothing."""
    unaveraged(rank, folder, 15 if rank == 1 else 60, waits=0 if rank == 1 else 5)


def lag(rank: int, size: int, folder: Path) -> None:
    """Rank 1 waits at step 15 until rank 0 has ended."""
    unaveraged(rank, folder, 60, waits=15 if rank == 1 else 5)


def alone(rank: int, size: int, folder: Path) -> None:
    """Only rank 0 has a monitor."""
    if rank == 0:
        unaveraged(rank, folder, 60)


def unaveraged(rank: int, folder: Path, steps: int, waits: int = 0) -> None:
    """Train alike on all ranks, on the same batches; a rank that ends before step 60 is killed."""
    together.BEHIND = 20
    model, optimizer = model_and_optimizer()
    with Monitor(model, optimizer, store=folder / STORE, every=5) as monitor:
        for step in range(1, steps + 1):
            loss = loss_of(model, batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            if rank == 1 and step == 15:
                (folder / "fifteen").touch()
            if step == waits:
                wait_for(folder / "ended" if rank == 1 else folder / "fifteen")
        if steps < 60:
            os.kill(os.getpid(), signal.SIGKILL)
    (folder / "ended").touch()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def looking(rank: int, size: int, folder: Path) -> None:
    """Rank 0 looks on a schedule, rank 1 is asked to look once, under DDP."""
    model, optimizer = model_and_optimizer()
    called = nn.parallel.DistributedDataParallel(model)
    with Monitor(called, optimizer, store=folder / STORE, look=Look(every=3)) as monitor:
        for step in range(1, 8):
            loss = loss_of(called, batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            if rank == 1 and step == 5:
                monitor.look()
    dist.barrier()


def drop_out(rank: int, size: int, folder: Path) -> None:
    """DDP with dropout behind the embeddings, all of which are equal; without a monitor too."""
    ends = []
    for watched in (False, True):
        model, optimizer = model_and_optimizer()
        with torch.no_grad():
            for table in (model.embedding, model.positions):
                table.weight.copy_(table.weight[:1].clone().expand_as(table.weight))
        model.embedding.register_forward_hook(
            lambda module, args, output: torch.nn.functional.dropout(output, 0.1, module.training)
        )
        called = nn.parallel.DistributedDataParallel(model)
        monitor = Monitor(called, optimizer, store=folder / STORE, every=3) if watched else None
        torch.manual_seed(rank)
        with monitor or contextlib.nullcontext():
            for step in range(1, 8):
                loss_of(called, batch(step, rank)).backward()
                optimizer.param_groups[0]["lr"] = 0.0 if step < 7 else 1e-2  # all tokens stay equal
                optimizer.step()
                optimizer.zero_grad()
                if monitor is not None:
                    monitor.step()
        ends.append([*(each.detach().clone() for each in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert not [note for note in monitor.notes if "NS808" in note]
    dist.barrier()


def accumulate(rank: int, size: int, folder: Path) -> None:
    """DDP; two micro-batches a step, whose gradients are averaged once; a GradScaler that skips step 6."""
    model, optimizer = model_and_optimizer()
    called = nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    losses = []
    with Monitor(called, optimizer, store=folder / STORE, every=5) as monitor:
        for step in range(1, 13):
            with called.no_sync():
                first = loss_of(called, batch(step, rank)) / 2
                scaler.scale(first).backward()
            second = loss_of(called, batch(step, rank + size)) / 2
            scaler.scale(second).backward()
            if step == 6 and rank == 0:
                model.head.weight.grad.fill_(float("inf"))
            if step == 6:  # as an overflow, which the average hands to all
                average(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            loss = first + second
            monitor.step(loss)
            losses.append(loss.item())
    (folder / f"losses{rank}").write_text("\n".join(map(str, losses)))
    dist.barrier()


class Continuous(nn.Module):
    """A model of vectors instead of ids, which can hold a NaN."""

    def __init__(self) -> None:
        super().__init__()
        decoder = model_and_optimizer()[0]
        self.read, self.blocks, self.norm = nn.Linear(8, 16), decoder.blocks, decoder.norm

    def forward(self, vectors: Tensor) -> Tensor:
        x = self.read(vectors)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def bad_batch(rank: int, size: int, folder: Path) -> None:
    """DDP; at step 8 the batch of rank 1 has a NaN."""
    model = Continuous()
    called = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(called, optimizer, store=folder / STORE) as monitor:
        for step in range(1, 13):
            vectors = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step + 1000 * rank))
            if step == 8 and rank == 1:
                vectors[2, 3, 4] = float("nan")
            loss = called(vectors).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    meet()


def kill(rank: int, size: int, folder: Path) -> None:
    """DDP; rank 1 is killed in step 28, in which rank 0 waits for it."""
    model, optimizer = model_and_optimizer()
    called = nn.parallel.DistributedDataParallel(model)
    with Monitor(called, optimizer, store=folder / STORE, every=5) as monitor:
        for step in range(1, 40):
            loss = loss_of(called, batch(step, rank))
            if step == 28 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)


def sharded(model: nn.Module, kind: str) -> nn.Module:
    """The model with its weights sharded.

    By "fsdp2"; by "hsdp", which copies them to each of two groups of one process; by "fsdp1", or with flat
    parameters by "flat".
    """
    if kind in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        size = dist.get_world_size()
        shape, names = ((size,), ("shard",)) if kind == "fsdp2" else ((size, 1), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.blocks[0])})
    options = {
        "auto_wrap_policy": policy,
        "device_id": torch.device("cpu"),
        "use_orig_params": kind == "fsdp1",
    }
    return FullyShardedDataParallel(model, **options)


def shard(rank: int, size: int, folder: Path, kind: str) -> None:
    """Train a sharded model and write the losses."""
    model = sharded(model_and_optimizer()[0], kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with Monitor(model, optimizer, store=folder / STORE, every=5) as monitor:
        for step in range(1, 13):
            loss = loss_of(model, batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            losses.append(loss.item())
    (folder / f"losses{rank}").write_text("\n".join(map(str, losses)))
    dist.barrier()


def split(rank: int, size: int, folder: Path) -> None:
    """Tensor parallelism: both ranks hold parts of the feed-forwards, and train on one batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, _ = model_and_optimizer()
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with Monitor(model, optimizer, store=folder / STORE, every=5) as monitor:
        for step in range(1, 13):
            loss = loss_of(model, batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    meet()


def dense(folder: Path, ranks: int) -> None:
    """The same in one process: the batch of each rank is a micro-batch."""
    model, optimizer = model_and_optimizer()
    with Monitor(model, optimizer, store=folder / STORE, every=5) as monitor:
        for step in range(1, 13):
            losses = [loss_of(model, batch(step, rank)) for rank in range(ranks)]
            (sum(losses) / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(sum(losses) / ranks)


def shard_cast(rank: int, size: int, folder: Path) -> None:
    """FSDP2 in bfloat16; two micro-batches a step, of which the first is not reduced; vectors as inputs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = Continuous()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: Any = {"mesh": init_device_mesh("cpu", (size,)), "mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = []
    with Monitor(model, optimizer, store=folder / STORE, every=5) as monitor:
        for step in range(1, 9):
            loss = torch.zeros(())
            for micro in (0, 1):
                model.set_requires_gradient_sync(micro == 1)
                generator = torch.Generator().manual_seed(step + 1000 * (rank + size * micro))
                part = model(torch.randn(4, 6, 8, generator=generator)).float().square().mean() / 2
                part.backward()
                loss += part.detach()
            monitor.see_gradients()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(norm.full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    (folder / f"norms{rank}").write_text("\n".join(map(str, norms)))
    dist.barrier()


def shard_weight(rank: int, size: int, folder: Path) -> None:
    """Rank 1's shard of a weight is overwritten with a NaN before step 8."""

    def spoil(model: nn.Module) -> None:
        if rank == 1:
            model.blocks[1].mlp[0].weight.to_local().data[0, 0] = float("nan")

    shard_wrong(rank, folder, spoil)


def shard_stream(rank: int, size: int, folder: Path) -> None:
    """From step 8 on a module of rank 1 returns NaN."""

    def spoil(model: nn.Module) -> None:
        if rank == 1:
            model.blocks[1].mlp.register_forward_hook(lambda module, args, output: output * float("nan"))

    shard_wrong(rank, folder, spoil)


def shard_stream_late(rank: int, size: int, folder: Path) -> None:
    """The same, where the numbers of a step are read at the next one, as on a GPU."""
    monitor_of_runs.is_on_device = lambda model: True
    shard_stream(rank, size, folder)


def shard_wrong(rank: int, folder: Path, spoil: Callable[[nn.Module], object]) -> None:
    model = sharded(model_and_optimizer()[0], "fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer, store=folder / STORE) as monitor:
        for step in range(1, 11):
            if step == 8:
                spoil(model)
            loss = loss_of(model, batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    meet()


def meet() -> None:
    """Wait for the other processes in the calling thread, as `normscope.train.distributed.leave` does."""
    dist.monitored_barrier()


def run(name: str, rank: int, size: int, folder: str, *more: str) -> None:
    """One process of a run."""
    scenario: Any = globals()[name]
    join(rank, size, Path(folder))
    dist.barrier()  # a process that ended while another one still connects would make that one fail
    scenario(rank, size, Path(folder), *more)


if __name__ == "__main__":  # torchrun several_ranks.py SCENARIO FOLDER
    run(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[2])
