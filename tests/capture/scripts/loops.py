"""Small loops that differ in one thing each, by the name given: `python loops.py muon`."""

import copy
import itertools
import sys

import torch
import torch.nn.functional as F
from parts import LENGTH, Decoder, OwnLoss, batches, cross_entropy, say
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def simple(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


def muon() -> None:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    model = Decoder()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    first = torch.optim.Muon(matrices, lr=0.02)
    second = torch.optim.AdamW([p for p in model.parameters() if id(p) not in known], lr=1e-3)
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        say(step, loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


def in_backward() -> None:
    """An optimizer for each parameter, stepped in the backward as soon as the gradient is there."""
    model = Decoder()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def step_at_once(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = cross_entropy(model(inputs), targets)
        say(step, loss)
        loss.backward()


def lbfgs() -> None:
    """LBFGS: the closure runs several times in one step."""
    model = Decoder()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step, (inputs, targets) in enumerate(batches(), 1):

        def closure(inputs=inputs, targets=targets, step=step, seen=[]):  # noqa: B006
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            if not seen:
                seen.append(step)
                say(step, loss)
            return loss

        optimizer.step(closure)


def distilled() -> None:
    """A student that learns from a larger teacher without gradients."""
    teacher, student = Decoder(4), Decoder()
    teacher.eval()
    optimizer = adamw(student)
    for step, (inputs, targets) in enumerate(batches(), 1):
        with torch.no_grad():
            soft = teacher(inputs).softmax(-1)
        logits = student(inputs)
        loss = 0.5 * F.kl_div(logits.log_softmax(-1), soft, reduction="batchmean") / LENGTH
        loss = loss + 0.5 * cross_entropy(logits, targets)
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


def online() -> None:
    """A student behind a teacher that runs with gradients on, although nothing trains it."""
    student = Decoder()
    teacher = copy.deepcopy(student)
    optimizer = adamw(student)
    for step, (inputs, _) in enumerate(batches(), 1):
        logits = student(inputs)
        loss = F.mse_loss(logits, teacher(inputs).detach() + 1)
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


class Checkpointed(Decoder):
    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def checkpointed() -> None:
    """Blocks that run again in the backward."""
    model = Checkpointed()
    simple(model, adamw(model))


def own_loss() -> None:
    """A model that returns its loss; the loop scales it by a constant."""
    model = OwnLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = model(input_ids=inputs, labels=targets)["loss"]
        loss.backward()
        say(step, loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def side_loss() -> None:
    """A model that keeps its loss as an attribute (llama2.c), two micro-batches, a rate that still rises."""
    model = SideLoss()
    optimizer = adamw(model)
    data = batches()
    for step in range(1, 100):
        optimizer.param_groups[0]["lr"] = 1e-3 * step / 50
        total = 0.0
        for _ in range(2):
            model(*next(data))
            loss = model.last_loss / 2
            total += loss.item()
            loss.backward()
        say(step, torch.tensor(total))
        optimizer.step()
        optimizer.zero_grad()


def two_shares() -> None:
    """Two backwards for one forward, of micro-batches."""
    model = Decoder()
    optimizer = adamw(model)
    data = batches()
    for step in range(1, 100):
        total = 0.0
        for _ in range(2):
            inputs, targets = next(data)
            logits = model(inputs)
            parts = [cross_entropy(logits, targets) / 2, 1e-3 * logits.square().mean() / 2]
            total += sum(part.item() for part in parts)
            parts[0].backward(retain_graph=True)
            parts[1].backward()
        say(step, torch.tensor(total))
        optimizer.step()
        optimizer.zero_grad()


def lora() -> None:
    """Weights of rank 2 beside frozen ones."""
    model = Decoder().requires_grad_(False)

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.down, self.up = nn.Linear(base.in_features, 2, False), nn.Linear(2, base.out_features, False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base_layer(x) + self.up(self.down(x))

    for block in model.blocks:
        block.mix, block.out = Adapted(block.mix), Adapted(block.out)
    simple(model, adamw(model))


def scheduled_free() -> None:
    """An optimizer of its own protocol, which inherits from Optimizer and steps its own weights."""

    class Averaged(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state.setdefault(p, {"mean": torch.zeros_like(p)})
                    state["mean"].lerp_(p.grad.sign(), 0.1)
                    p.data.sub_(state["mean"], alpha=group["lr"])

    model = Decoder()
    simple(model, Averaged(model.parameters(), lr=1e-3))


def compiled_loss() -> None:
    """A loss that is compiled as a whole, which nothing may interrupt."""
    model = Decoder()
    optimizer, compiled = adamw(model), torch.compile(cross_entropy, backend="eager", fullgraph=True)
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = compiled(model(inputs), targets)
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


def two_losses() -> None:
    """Two backwards of one forward: the second reaches all weights, the first only the head."""
    model = TwoHeads()
    optimizer = adamw(model)
    for step, (inputs, targets) in enumerate(batches(), 1):
        logits, probed = model(inputs)
        first, second = cross_entropy(probed, targets), cross_entropy(logits, targets)
        first.backward()
        second.backward()
        say(step, first.item() + second.item())
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers() -> None:
    """The same, in which each loss has an optimizer that steps before the next backward."""
    model = TwoHeads()
    probe = {id(p) for p in model.probe.parameters()}
    first = torch.optim.AdamW(model.probe.parameters(), lr=1e-3)
    second = torch.optim.AdamW([p for p in model.parameters() if id(p) not in probe], lr=1e-3)
    for step, (inputs, targets) in enumerate(batches(), 1):
        logits, probed = model(inputs)
        losses = cross_entropy(probed, targets), cross_entropy(logits, targets)
        for loss, optimizer in zip(losses, (first, second), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        say(step, losses[0].item() + losses[1].item())


def two_scaled_optimizers() -> None:
    """The same with two micro-batches for each loss, under a GradScaler."""
    model = TwoHeads()
    probe = {id(p) for p in model.probe.parameters()}
    first = torch.optim.AdamW(model.probe.parameters(), lr=1e-3)
    second = torch.optim.AdamW([p for p in model.parameters() if id(p) not in probe], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = batches()
    for step in range(1, 100):
        pairs, total = [], 0.0
        first.zero_grad()
        for inputs, targets in itertools.islice(data, 2):
            logits, probed = model(inputs)
            pairs.append((logits, targets))
            loss = cross_entropy(probed, targets) / 2
            total += loss.item()
            scaler.scale(loss).backward()
        scaler.step(first)
        second.zero_grad()
        for logits, targets in pairs:
            loss = cross_entropy(logits, targets) / 2
            total += loss.item()
            scaler.scale(loss).backward()
        scaler.step(second)
        scaler.update()
        say(step, total)


def head_outside() -> None:
    """The model without its head; the loop multiplies by the weights of the embedding."""
    model = Decoder()
    model.head = nn.Identity()
    optimizer = adamw(model)
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = cross_entropy(model(inputs) @ model.embedding.weight.T, targets)
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


def two_scaled() -> None:
    """Two optimizers under one GradScaler: step 3 overflows as a whole, step 4 in the weights of one only."""
    model = Decoder()
    head = [*model.norm.parameters(), *model.head.parameters()]
    known = {id(p) for p in head}
    first = torch.optim.AdamW([p for p in model.parameters() if id(p) not in known], lr=1e-3)
    second = torch.optim.AdamW(head, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        say(step, loss)
        if step == 3:
            model.embedding.weight.grad.fill_(torch.inf)
        if step in (3, 4):
            model.head.weight.grad.fill_(torch.inf)
        for optimizer in (first, second):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def static_buffers() -> None:
    """The next batch is copied into the same buffers before the backward; the loop sums its loss in place."""

    class OfBytes(Decoder):
        def forward(self, ids):
            return super().forward(ids.long())

    model = OfBytes()
    optimizer, data = adamw(model), batches()
    inputs, targets = (tensor.byte() for tensor in next(data))
    for step in range(1, 100):
        loss = torch.zeros(())
        loss += cross_entropy(model(inputs), targets.long())
        for buffer, tensor in zip((inputs, targets), next(data), strict=True):
            buffer.copy_(tensor)
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


class Communicating(Decoder):
    """A decoder that takes the mean of its positions over all processes, as sequence parallelism may."""

    def forward(self, ids):
        mean = self.positions.weight.detach().clone()
        torch.distributed.all_reduce(mean)
        return super().forward(ids) + 0 * mean.sum()


def communicating() -> None:
    """The first of two processes; the other one is a fake that answers at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = Communicating()
        simple(model, adamw(model))
    finally:
        torch.distributed.destroy_process_group()


def blind(num_seen: str) -> None:
    """Steps on gradients of a backward for `num_seen` steps, later on gradients from elsewhere."""
    model = Decoder()
    optimizer = adamw(model)
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = cross_entropy(model(inputs), targets)
        if step <= int(num_seen):
            loss.backward()
            say(step, loss)
        else:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()


def warming(first: str) -> None:
    """A warm-up over 3 steps whose first step has the share `first`/3 of the rate."""
    model = Decoder()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + int(first)) / 3))
    for step, (inputs, targets) in enumerate(batches(), 1):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        say(step, loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def warming_by_hand(first: str) -> None:
    """A warm-up over 3 steps that no scheduler knows; its first step has the share `first`/3 of the rate."""
    model = Decoder()
    optimizer = adamw(model)
    for step, (inputs, targets) in enumerate(batches(), 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step - 1 + int(first)) / 3)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


def half_inputs() -> None:
    """A model that runs under autocast only: its linear maps are given bfloat16."""
    model = HalfInside()
    optimizer = adamw(model)
    for step, (inputs, targets) in enumerate(batches(), 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(inputs).float(), targets)
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


class TwoHeads(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.probe, self.head = copy.deepcopy(self.head), nn.Identity()
        self.out = copy.deepcopy(self.probe)
        self.register_buffer("scale", torch.ones(self.out.in_features))  # saved for the backward

    def forward(self, ids):
        hidden = super().forward(ids) * self.scale
        return self.out(hidden), self.probe(hidden.detach())


class SideLoss(Decoder):
    def forward(self, ids, targets):
        logits = super().forward(ids)
        self.last_loss = cross_entropy(logits, targets)
        return logits


class HalfInside(Decoder):
    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).bfloat16())


def quarters(kind: str) -> None:
    """A mean or a sum that is divided by 4 before its backward; with a GradScaler if `scaled`."""
    model = Decoder()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaled")
    total = 0.0
    for micro, (inputs, targets) in enumerate(batches(), 1):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "scaled"):
            loss = cross_entropy(model(inputs), targets) * (targets.numel() if kind == "summed" else 1) / 4
        scaler.scale(loss).backward()
        total += loss.item()
        if micro % 4 == 0:
            say(micro // 4, total)
            total = 0.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def picture() -> None:
    """A convolutional network: not a Transformer."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    optimizer = adamw(model)
    for step in range(1, 100):
        loss = F.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.randint(10, (8,)))
        loss.backward()
        say(step, loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
