"""AdamW, Adam and SGD for K replicas at once, each with its own learning rate, decay, ε and clipping.

Shapes: K replicas, then a parameter's own shape.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.train.optim import SGD_MOMENTUM, betas, build_optimizers
from normscope.train.recipe import Recipe

STACKED_OPTIMIZERS = ("adamw", "adam", "sgd")
Betas = tuple[float, float]


@dataclass
class _Settings:
    """Optimiser settings for a group of parameters, each (K,)."""

    full_rate: Tensor
    decay: Tensor
    eps: Tensor
    rate: Tensor


@dataclass
class _Entry:
    """A stacked parameter, the settings it shares with others, and its optimiser state."""

    parameter: Tensor
    settings: _Settings
    state: list[Tensor]
    steps: int = 0


class StackedOptimizer:
    """Optimiser that steps stacked parameters as each replica's torch optimiser would.

    Learning rates, decays and ε come from the optimisers that `build_optimizers` makes for each model, so
    that those of a parametrisation (μP) are kept.

    Args:
        parameters: name → (K, …), with `requires_grad` as in the models.
        models, configs: models and settings of the replicas, in order.
    """

    def __init__(
        self, parameters: dict[str, Tensor], models: Sequence[nn.Module], configs: Sequence[Recipe]
    ) -> None:
        self._rule = functools.partial(_RULES[configs[0].optimizer_name], betas(configs[0]))
        groups = [_group_of_each(model, config) for model, config in zip(models, configs, strict=True)]
        shared: dict[Any, _Settings] = {}
        self._entries: list[_Entry] = []
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                own = [group[name] for group in groups]
                numbers = tuple((g["full_lr"], g["weight_decay"], g.get("eps", 0.0)) for g in own)
                if numbers not in shared:
                    columns = (_column(values, parameter.device) for values in zip(*numbers, strict=True))
                    rate, decay, eps = columns
                    shared[numbers] = _Settings(rate, decay, eps, rate)
                self._entries.append(_Entry(parameter, shared[numbers], []))
        self._settings = list(shared.values())
        limits = [math.inf if config.clip is None else config.clip for config in configs]
        self._limits = _column(limits, self._entries[0].parameter.device)

    @torch.no_grad()
    def step(self, factors: Sequence[float]) -> None:
        """Step every replica at its fraction of the full learning rate; skip parameters without gradient."""
        stepped = [(entry, g) for entry in self._entries if (g := entry.parameter.grad) is not None]
        if not stepped:
            return
        entries, gradients = map(list, zip(*stepped, strict=True))
        if not bool(self._limits.isinf().all()):
            clip_each(gradients, self._limits)
        for settings in self._settings:
            settings.rate = settings.full_rate * _column(factors, settings.full_rate.device)
        for entry in entries:
            entry.steps += 1
        self._rule(entries, gradients)

    def keep(self, rows: Tensor, parameters: dict[str, Tensor]) -> None:
        """Continue with only the replicas at `rows`, whose weights are now `parameters`."""
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        for entry, parameter in zip(self._entries, trained, strict=True):
            entry.parameter = parameter
            entry.state = [tensor[rows] for tensor in entry.state]
        for settings in self._settings:
            settings.full_rate, settings.rate = settings.full_rate[rows], settings.rate[rows]
            settings.decay, settings.eps = settings.decay[rows], settings.eps[rows]
        self._limits = self._limits[rows]


def _group_of_each(model: nn.Module, config: Recipe) -> dict[str, dict[str, Any]]:
    """Parameter name → its optimiser group."""
    (optimizer,) = build_optimizers(model, config)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {name: group_of[id(p)] for name, p in model.named_parameters() if id(p) in group_of}


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def _wide(numbers: Tensor, like: Tensor) -> Tensor:
    """(K,) as (K, 1, …), to broadcast with a stacked tensor."""
    return numbers.to(like.dtype).view(-1, *(1,) * (like.dim() - 1))


def _columns(entries: list[_Entry], number: Callable[[_Settings, int], Tensor]) -> list[Tensor]:
    """`number(settings, steps)` as a column for each entry, computed once for entries that share it."""
    made: dict[tuple[int, int, int], Tensor] = {}
    columns = []
    for entry in entries:
        key = (id(entry.settings), entry.steps, entry.parameter.dim())
        if key not in made:
            made[key] = _wide(number(entry.settings, entry.steps), entry.parameter)
        columns.append(made[key])
    return columns


@torch.no_grad()
def clip_each(gradients: Sequence[Tensor], limits: Tensor) -> None:
    """Clip the norm of each replica's gradients to its limit (K,); inf does not clip.

    For each replica this equals `torch.nn.utils.clip_grad_norm_`.
    """
    norms = [torch.linalg.vector_norm(gradient.reshape(len(limits), -1), dim=1) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factor = (limits / (norm + 1e-6)).clamp(max=1.0)
    # inf/inf is nan; without clipping the finite gradients must be kept.
    factor = torch.where(limits.isinf(), 1.0, factor)
    torch._foreach_mul_(list(gradients), [_wide(factor, gradient) for gradient in gradients])


def _adamw(betas: Betas, entries: list[_Entry], gradients: list[Tensor]) -> None:
    kept = _columns(entries, lambda settings, _: 1 - settings.rate * settings.decay)
    torch._foreach_mul_([entry.parameter for entry in entries], kept)
    _move(betas, entries, gradients)


def _adam(betas: Betas, entries: list[_Entry], gradients: list[Tensor]) -> None:
    _move(betas, entries, _decayed(entries, gradients))


def _move(betas: Betas, entries: list[_Entry], gradients: list[Tensor]) -> None:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980, Algorithm 1), with bias corrections in step size and ε."""
    means, squares = _states(entries, 2)
    beta1, beta2 = betas

    def root(steps: int) -> float:
        return math.sqrt(1 - beta2**steps)

    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    moves = torch._foreach_sqrt(squares)
    torch._foreach_add_(moves, _columns(entries, lambda settings, steps: settings.eps * root(steps)))
    torch._foreach_reciprocal_(moves)
    torch._foreach_mul_(moves, means)
    rates = _columns(entries, lambda settings, steps: settings.rate * (root(steps) / (1 - beta1**steps)))
    torch._foreach_mul_(moves, rates)
    torch._foreach_sub_([entry.parameter for entry in entries], moves)


def _sgd(betas: Betas, entries: list[_Entry], gradients: list[Tensor]) -> None:
    (momenta,) = _states(entries, 1)
    torch._foreach_mul_(momenta, SGD_MOMENTUM)
    torch._foreach_add_(momenta, _decayed(entries, gradients))
    moves = torch._foreach_mul(momenta, _columns(entries, lambda settings, _: settings.rate))
    torch._foreach_sub_([entry.parameter for entry in entries], list(moves))


def _decayed(entries: list[_Entry], gradients: list[Tensor]) -> list[Tensor]:
    """Gradients plus weight decay; the gradients themselves if there is none."""
    if not any(bool(entry.settings.decay.any()) for entry in entries):
        return gradients
    decays = _columns(entries, lambda settings, _: settings.decay)
    pairs = zip(entries, gradients, decays, strict=True)
    return [gradient + decay * entry.parameter for entry, gradient, decay in pairs]


def _states(entries: list[_Entry], num: int) -> list[list[Tensor]]:
    """Optimiser state as `num` lists with a tensor for each parameter, initially zero."""
    for entry in entries:
        if not entry.state:
            entry.state = [torch.zeros_like(entry.parameter) for _ in range(num)]
    return [[entry.state[i] for entry in entries] for i in range(num)]


_RULES: dict[str, Callable[[Betas, list[_Entry], list[Tensor]], None]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
}
