"""The optimisers by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from normscope.errors import UsageError
from normscope.nn import Residual, block_matrices, has_own_rates, param_groups
from normscope.train.live import LiveOptimizers
from normscope.train.recipe import ADAM_BETAS, ADAM_EPS, Recipe

TITLES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "muon": "Muon"}
"""Optimisers as they are written in a sentence."""
SGD_MOMENTUM = 0.9


def build_optimizers(model: nn.Module, config: Recipe) -> list[Optimizer]:
    """The optimisers that together step every trainable parameter of `model`, once each.

    There is one for adamw, adam and sgd (momentum 0.9). Muon (kellerjordan.github.io/posts/muon) steps the
    `hidden_matrices` by updates of AdamW's size (`match_rms_adamw`: Liu et al. 2025, arXiv:2502.16982), and
    AdamW the rest. normscope's models in μP or depth-μP get the learning rates, decays and ε of
    `param_groups`. Each parameter group keeps its full learning rate under "full_lr", for the schedule. Live
    optimizers are copied, see `LiveOptimizers.build`, without "full_lr".

    Raises:
        UsageError: the model has nothing to train or nothing for Muon, this torch has no Muon, or μP has no
            learning rates for the optimiser.
    """
    trainable = require_trainable(model)
    if isinstance(config.optimizer, LiveOptimizers):
        return list(config.optimizer.build(model).optimizers)
    optimizers: list[Optimizer]
    if config.optimizer == "muon":
        optimizers = _muon(model, trainable, config)
    elif config.optimizer == "sgd":
        optimizers = [torch.optim.SGD(_groups(model, trainable, config, 0.0), momentum=SGD_MOMENTUM)]
    elif config.optimizer == "adam":
        optimizers = [_adam(torch.optim.Adam, _groups(model, trainable, config, 0.0), config)]
    else:
        optimizers = [_adam(torch.optim.AdamW, _groups(model, trainable, config, 0.01), config)]
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["full_lr"] = group["lr"]
    return optimizers


def require_trainable(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters; UsageError if there are none."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UsageError(
            "a model without trainable parameters",
            "at least one parameter that requires a gradient",
            "unfreeze some",
        )
    return trainable


def set_rate(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its full one."""
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["lr"] = group["full_lr"] * factor


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained 2-D weights between the embeddings and the output layer.

    In normscope's models these are the linear maps in the blocks. In other models these are all matrices but
    the embeddings, the parameters of a `Residual`, and the output layer. The output layer is the module that
    `get_output_embeddings` names; else modules tied to an embedding; else each `nn.Linear`, outside lists of
    layers, whose number of outputs is an embedding's number of rows; else the last `nn.Linear` with that
    number.
    """
    matrices = block_matrices(model)
    if not matrices:
        excluded = _outer(model)
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in excluded]
    return [p for p in matrices if p.requires_grad]


def _outer(model: nn.Module) -> set[int]:
    """Parameters of embeddings, output layer and joins."""
    modules = dict(model.named_modules())
    tables = {id(m.weight): m.num_embeddings for m in modules.values() if isinstance(m, nn.Embedding)}
    linears = {path: m for path, m in modules.items() if isinstance(m, nn.Linear)}
    wide = {path: m for path, m in linears.items() if m.out_features in tables.values()}
    named = (m.get_output_embeddings() for m in modules.values() if hasattr(m, "get_output_embeddings"))
    heads = (
        [m for m in named if m is not None]
        or [m for m in linears.values() if id(m.weight) in tables]
        or [m for path, m in wide.items() if not any(map(str.isdigit, path.split(".")))]  # outside lists
        or [m for path, m in wide.items() if path == list(linears)[-1]]
    )
    joins = [m.join for m in modules.values() if isinstance(m, Residual)]
    return set(tables) | {id(p) for module in heads + joins for p in module.parameters()}


def _groups(
    model: nn.Module, params: list[nn.Parameter], config: Recipe, default_decay: float
) -> list[dict[str, Any]]:
    """`params` in groups, with the learning rates of the model's parametrisation if it sets them."""
    decay = default_decay if config.weight_decay is None else config.weight_decay
    eps = ADAM_EPS if config.eps is None else config.eps
    if not has_own_rates(model):
        return [{"params": params, "lr": config.lr, "eps": eps, "weight_decay": decay}]
    return param_groups(model, config.lr, optimizer=config.optimizer_name, eps=eps, weight_decay=decay)


def _muon(model: nn.Module, trainable: list[nn.Parameter], config: Recipe) -> list[Optimizer]:
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(
            "optimizer 'muon'", "torch with torch.optim.Muon (2.9 or later)", "use adamw or upgrade"
        )
    taken = {id(p) for p in hidden_matrices(model)}
    if not taken:
        given = "optimizer 'muon' and a model without a matrix between embedding and output"
        raise UsageError(given, "weights that Muon can step", "use adamw")
    matrices = _among(_groups(model, trainable, config, 0.1), lambda p: id(p) in taken)
    for group in matrices:
        del group["eps"]  # Muon's ε has another meaning
    rest = _among(_groups(model, trainable, config, 0.01), lambda p: id(p) not in taken)
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
    return [muon, _adam(torch.optim.AdamW, rest, config)] if rest else [muon]


def _adam(kind: type[torch.optim.Adam], groups: list[dict[str, Any]], config: Recipe) -> Optimizer:
    """Adam or AdamW, in one pass over the weights where they are float32 or float64 tensors on the CPU.

    PyTorch's default takes about ten passes there. In half precision one pass rounds less often, so that the
    default is kept. So it is where a weight is not contiguous, as a slice of another tensor: the one pass
    would write the memory between its elements.
    """
    params = [p for group in groups for p in group["params"]]
    fuses = all(
        type(p) is nn.Parameter
        and p.device.type == "cpu"
        and p.dtype in (torch.float32, torch.float64)
        and p.is_contiguous()
        for p in params
    )
    return kind(groups, betas=betas(config), fused=fuses or None)


def _among(groups: list[dict[str, Any]], keep: Callable[[nn.Parameter], bool]) -> list[dict[str, Any]]:
    """`groups` with only the parameters to keep, without empty groups."""
    kept = [group | {"params": [p for p in group["params"] if keep(p)]} for group in groups]
    return [group for group in kept if group["params"]]


def betas(config: Recipe) -> tuple[float, float]:
    """Adam's decay rates of the two moments."""
    own = ADAM_BETAS[0] if config.beta1 is None else config.beta1
    return own, ADAM_BETAS[1] if config.beta2 is None else config.beta2
