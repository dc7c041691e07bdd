"""The optimisers a trial knows, by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from normscope.errors import UsageError
from normscope.nn import has_own_rates, param_groups
from normscope.train.config import TrialConfig

SGD_MOMENTUM = 0.9
ADAM_EPS, ADAM_BETAS = 1e-8, (0.9, 0.999)  # PyTorch's own
Groups = list[nn.Parameter] | list[dict[str, Any]]


def build_optimizers(model: nn.Module, config: TrialConfig) -> list[Optimizer]:
    """The optimisers that together step every trainable parameter of `model`, once each.

    One of them for adamw, adam and sgd (momentum 0.9). Muon (kellerjordan.github.io/posts/muon) steps the
    `hidden_matrices`, AdamW the rest. Models of ours under μP or depth-μP get Adam's rates and ε from there.
    Each parameter group keeps its full rate under "full_lr", for the schedule.

    Raises:
        UsageError: the model has nothing to train, or this torch has no Muon.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UsageError("the model", "at least one parameter that requires a gradient", "unfreeze some")
    optimizers = _BUILDERS[config.optimizer](model, trainable, config)
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["full_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Set every group's rate to `factor` times its full one."""
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["lr"] = group["full_lr"] * factor


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The 2-D weights between the embeddings and the output layer.

    An output layer is an `nn.Linear` as wide as an embedding has rows (the vocabulary), tied to it or not.
    """
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    vocabularies = {weight.shape[0] for weight in embeddings}
    excluded = {id(weight) for weight in embeddings}
    excluded |= {
        id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in vocabularies
    }
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in excluded]


def _adamw(params: Groups, config: TrialConfig) -> Optimizer:
    return torch.optim.AdamW(
        params, lr=config.lr, betas=betas(config), eps=_eps(config), weight_decay=_decay(config, 0.01)
    )


def _groups(
    model: nn.Module, params: list[nn.Parameter], config: TrialConfig, default_decay: float
) -> Groups:
    """`params`, in groups with rates of their own where the model's parametrisation has such."""
    if not has_own_rates(model):
        return params
    return param_groups(model, config.lr, eps=_eps(config), weight_decay=_decay(config, default_decay))


def _muon(model: nn.Module, trainable: list[nn.Parameter], config: TrialConfig) -> list[Optimizer]:
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(
            "optimizer 'muon'", "torch with torch.optim.Muon (2.9 or later)", "use adamw or upgrade"
        )
    matrices = hidden_matrices(model)
    taken = {id(p) for p in matrices}
    rest = [p for p in trainable if id(p) not in taken]
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=config.lr, weight_decay=_decay(config, 0.1)))
    if rest:
        optimizers.append(_adamw(rest, config))
    return optimizers


def betas(config: TrialConfig) -> tuple[float, float]:
    """Adam's decay rates of the two moments."""
    own = ADAM_BETAS[0] if config.beta1 is None else config.beta1
    return own, ADAM_BETAS[1] if config.beta2 is None else config.beta2


def _eps(config: TrialConfig) -> float:
    return ADAM_EPS if config.eps is None else config.eps


def _decay(config: TrialConfig, default: float) -> float:
    return default if config.weight_decay is None else config.weight_decay


Builder = Callable[[nn.Module, list[nn.Parameter], TrialConfig], list[Optimizer]]
_BUILDERS: dict[str, Builder] = {
    "adamw": lambda model, params, config: [_adamw(_groups(model, params, config, 0.01), config)],
    "adam": lambda model, params, config: [
        torch.optim.Adam(
            _groups(model, params, config, 0.0),
            lr=config.lr,
            betas=betas(config),
            eps=_eps(config),
            weight_decay=_decay(config, 0.0),
        )
    ],
    "sgd": lambda model, params, config: [
        torch.optim.SGD(params, lr=config.lr, momentum=SGD_MOMENTUM, weight_decay=_decay(config, 0.0))
    ],
    "muon": _muon,
}
