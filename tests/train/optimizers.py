"""Optimizers written as users write them: outside PyTorch, with attributes and habits of their own."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al. 2023, arXiv:2302.06675."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((beta1 * m + (1 - beta1) * p.grad).sign(), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class HandMuon(Optimizer):
    """Muon with AdamW's rule for vectors, and lists of its parameters beside the groups."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})
        self.matrices = [p for group in self.param_groups for p in group["params"] if p.ndim == 2]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        steps = {id(p): self._orthogonal for p in self.matrices}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * steps.get(id(p), torch.sign)(m))

    @staticmethod
    def _orthogonal(matrix: Tensor) -> Tensor:
        x = matrix / (matrix.norm() + 1e-7)
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x


class ShampooLike(Optimizer):
    """Gupta et al. 2018, arXiv:1802.09568, with its preconditioners in a dictionary beside the state."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.left: dict[nn.Parameter, Tensor] = {}
        self.every, self.count = every, 0
        self.generator = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad.reshape(len(p), -1)
                if p not in self.left or self.count % self.every == 0:
                    self.left[p] = self.left.get(p, 0.01 * torch.eye(len(p))) + g @ g.T
                noise = torch.randn(g.shape, generator=self.generator)
                move = torch.linalg.solve(self.left[p], g) + 1e-3 * noise
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * move.reshape(p.shape))


class ScheduleFreeSGD(Optimizer):
    """Defazio et al. 2024, arXiv:2405.15682; refuses to step outside its training mode."""

    def __init__(self, params: Any, lr: float = 1e-1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0, "train_mode": False})

    @torch.no_grad()
    def train(self) -> None:
        self._swap(to_training=True)

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(to_training=False)

    def _swap(self, *, to_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_training:
                group["train_mode"] = to_training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 0.1 if to_training else -1 / 9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call optimizer.train() first")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                gradient = p.grad + group["weight_decay"] * p
                p.lerp_(z, 1 / group["k"])
                p.sub_(gradient, alpha=group["lr"] * 0.9 * (1 - 1 / group["k"]))
                z.sub_(gradient, alpha=group["lr"])


class Lookahead(Optimizer):
    """Zhang et al. 2019, arXiv:1907.08610: shares the groups of the optimizer inside."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        self.inner = ShampooLike(params, lr, weight_decay)
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        super_hooks = Optimizer(
            [nn.Parameter(torch.ones(1))],
            {},
        )
        vars(self).update({k: v for k, v in vars(super_hooks).items() if k.endswith("_hooks")})
        self.state: Any = defaultdict(dict)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 3 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)


class OwnRate(Optimizer):
    """Lowers the rate of its groups itself, and keeps its state by the ids of the parameters."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        everything = [p for group in self.param_groups for p in group["params"]]
        self.momenta = {id(p): torch.zeros_like(p) for p in everything}
        self.slow = {id(everything[0])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9
            for p in group["params"]:
                if p.grad is not None:
                    self.momenta[id(p)].lerp_(p.grad, 0.1 if id(p) in self.slow else 0.5)
                    p.sub_(self.momenta[id(p)], alpha=group["lr"])


class Plain:
    """An optimizer that derives from nothing: the protocol alone."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        given = list(params)
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        self.param_groups = [{"lr": lr, "weight_decay": weight_decay, **group} for group in groups]
        self.state: dict[Any, Any] = {}

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad, alpha=group["lr"])


Make = Callable[[Any], Any]


def every_optimizer() -> dict[str, Make]:
    """Constructor of each optimizer, by name; it takes a list of parameters or groups."""
    torch_own = torch.optim
    made: dict[str, Make] = {
        "Adadelta": lambda p: torch_own.Adadelta(p, lr=0.5),
        "Adafactor": lambda p: torch_own.Adafactor(p, lr=1e-2),
        "Adagrad": lambda p: torch_own.Adagrad(p, lr=1e-2),
        "Adam": lambda p: torch_own.Adam(p, lr=1e-2, amsgrad=True),
        "AdamW": lambda p: torch_own.AdamW(p, lr=1e-2),
        "AdamW fused": lambda p: torch_own.AdamW(p, lr=1e-2, fused=True),
        "AdamW one by one": lambda p: torch_own.AdamW(p, lr=1e-2, foreach=False),
        "AdamW tensor rate": lambda p: torch_own.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
        "Adamax": lambda p: torch_own.Adamax(p, lr=1e-2),
        "ASGD": lambda p: torch_own.ASGD(p, lr=1e-2, t0=2),
        "NAdam": lambda p: torch_own.NAdam(p, lr=1e-2),
        "RAdam": lambda p: torch_own.RAdam(p, lr=1e-2),
        "RMSprop": lambda p: torch_own.RMSprop(p, lr=1e-2, momentum=0.5),
        "Rprop": lambda p: torch_own.Rprop(p, lr=1e-3),
        "SGD": lambda p: torch_own.SGD(p, lr=1e-2),
        "SGD Nesterov": lambda p: torch_own.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    }
    ours = (Lion, HandMuon, ShampooLike, ScheduleFreeSGD, Lookahead, OwnRate, Plain)
    return made | {kind.__name__: kind for kind in ours}
