"""Script of torchrun that test_rescue.py starts: `rescued_ranks.py STORE ddp|apart|fsdp FAULT`.

Two processes train a small decoder. The fault is in the second one alone, in step 30. `apart` averages no
gradients, so that the first one sees nothing of it. Prints a checksum of the weights before and after.
"""

import math
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from normscope.monitor import Monitor, Rescue
from normscope.monitor.rescue import Rescuer
from normscope.subjects import load

store, way, fault = sys.argv[1:]
BAD, STEPS = 30, 45
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
subject = load("nn:decoder,scheme=pre,depth=2,width=16,heads=2")
inner = subject.model.train()
model: torch.nn.Module = inner
if way == "ddp":
    model = DistributedDataParallel(inner)
if way == "fsdp":
    for block in inner.blocks:
        fully_shard(block)
    fully_shard(inner)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
monitor = Monitor(model, optimizer, store=store, rescue=Rescue(lower=0.5, back=10))


def part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total() -> float:
    """Sum of the sizes of this process's weights; 1e9 for each NaN."""
    parts = [part(p.detach()).double().abs().nan_to_num(nan=1e9) for p in inner.parameters()]
    return float(sum(each.sum() for each in parts))


def say(line: str) -> None:
    """Write a line at once, so that two processes do not mix theirs."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def fails(*args: object) -> None:
    raise RuntimeError("a fault that was put in")


batches = subject.batches()
with monitor:
    for step in range(1, STEPS + 1):
        pair = [next(batches), next(batches)]
        is_bad = rank == 1 and step == BAD
        if is_bad and fault == "monitor":
            monitor._look_after_update = fails  # type: ignore[method-assign]
        if rank == 1 and fault == "measure" and BAD <= step < BAD + 3:
            monitor._rescuer._squares = fails  # type: ignore[union-attr, method-assign]
        if rank == 1 and fault == "measure" and step == BAD + 3:
            monitor._rescuer._squares = Rescuer._squares.__get__(monitor._rescuer)  # type: ignore[union-attr]
        if is_bad and fault == "weight":
            with torch.no_grad():
                part(next(inner.parameters())).view(-1)[0] = math.nan
        loss = subject.loss(pair[rank], model)
        factor = {"nan": math.nan, "jump": 1000.0}.get(fault, 1.0) if is_bad else 1.0
        (loss * factor).backward()
        if rank == 0 and fault in ("monitor", "measure") and step == BAD + 1:
            for p in model.parameters():
                p.grad.mul_(1000)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if step == BAD:
            say(f"norm {float(norm.full_tensor() if isinstance(norm, DTensor) else norm)}")
        before = total()
        optimizer.step()
        say(f"rank {rank} step {step} {before!r} {total()!r}")
        optimizer.zero_grad()
        monitor.step(loss)
say(f"rank {rank} failure {monitor.failure} {monitor._rescuer.failure}")  # type: ignore[union-attr]
dist.destroy_process_group()
