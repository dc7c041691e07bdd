"""Script of torchrun that test_rescue.py starts: `rescued_ranks.py FOLDER WAY:FAULT…`.

In each case two processes train a small decoder. The fault is in the second one alone, at step 30. "apart"
averages no gradients, so that the first one sees nothing of it. Writes the losses, and sums over the weights
before and after each update, to WAY-FAULT.RANK.json.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from normscope.monitor import Monitor, Rescue
from normscope.monitor.rescuer import Rescuer
from normscope.subjects import load
from normscope.train.distributed import leave

BAD, STEPS = 30, 45


def part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fails(*args: object, **options: object) -> None:
    raise RuntimeError("a fault that was put in")


def run(folder: Path, way: str, fault: str, rank: int) -> None:
    torch.manual_seed(7)
    subject = load("nn:decoder,scheme=pre,depth=2,width=16,heads=2")
    inner = subject.model.train()
    model = DistributedDataParallel(inner) if way == "ddp" else inner
    if way == "fsdp":
        for block in inner.blocks:
            fully_shard(block)
        fully_shard(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer, store=folder / f"{way}-{fault}.db", rescue=Rescue(lower=0.5, back=10))
    rescuer = monitor._rescuer
    assert rescuer is not None
    seen = {"before": [], "after": [], "loss": []}

    def total() -> float:
        parts = [part(p.detach()).double().abs().nan_to_num(nan=1e9) for p in inner.parameters()]
        return float(sum(each.sum() for each in parts))

    batches = subject.batches()
    with monitor:
        for step in range(1, STEPS + 1):
            pair = [next(batches), next(batches)]
            is_bad = rank == 1 and step == BAD
            if is_bad and fault == "monitor":
                monitor._instruments.after_update = fails  # type: ignore[method-assign]
            if rank == 1 and fault == "measure" and step in (BAD, BAD + 3):
                rescuer._squares = fails if step == BAD else Rescuer._squares.__get__(rescuer)  # type: ignore
            if is_bad and fault == "weight":
                with torch.no_grad():
                    part(next(inner.parameters())).view(-1)[0] = math.nan
            loss = subject.loss(pair[rank], model)
            factor = {"nan": math.nan, "jump": 1000.0}.get(fault, 1.0) if is_bad else 1.0
            (loss * factor).backward()
            if rank == 0 and fault in ("monitor", "measure", "scaler") and step == BAD + 1:
                for parameter in model.parameters():
                    parameter.grad.mul_(1000)
            if step == BAD:
                norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                seen["norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            seen["before"].append(total())
            if not (is_bad and fault == "scaler"):
                optimizer.step()
            seen["after"].append(total())
            optimizer.zero_grad()
            monitor.step(loss)
            seen["loss"].append(float(loss.detach()))
    seen["failures"] = [monitor.failure, rescuer.failure]
    (folder / f"{way}-{fault}.{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        run(Path(sys.argv[1]), *case.split(":"), dist.get_rank())
    leave(together=True)
