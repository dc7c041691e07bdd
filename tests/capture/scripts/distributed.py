"""Two processes of torchrun: DDP, or with `--shard` FSDP2; with `--reduce` the forward communicates."""

import sys

import torch
import torch.distributed as dist
from parts import Decoder, batches, cross_entropy, say
from torch.nn.parallel import DistributedDataParallel


class Reducing(Decoder):
    def forward(self, ids):
        mean = self.positions.weight.detach().clone()
        dist.all_reduce(mean)
        return super().forward(ids) + 0 * mean.sum()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Reducing() if "--reduce" in sys.argv else Decoder()
if "--shard" in sys.argv:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (inputs, targets) in enumerate(batches(), 1):
    own = slice(rank, None, dist.get_world_size())
    loss = cross_entropy(model(inputs[own]), targets[own])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if rank == 0:
        say(step, loss)
    optimizer.step()
    optimizer.zero_grad()
