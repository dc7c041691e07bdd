"""Learning rates of the parametrisations μP and depth-μP."""

from typing import Any

from torch import nn

from normscope.errors import UsageError
from normscope.nn.config import ModelConfig
from normscope.nn.schemes import scheme_named
from normscope.nn.stack import Stack


def param_groups(
    model: nn.Module, lr: float, *, optimizer: str = "adamw", eps: float = 1e-8, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser, each with its learning rate, ε and weight decay.

    With the width multiplier m_N = width/base_width (`init="mup"`, else 1), the depth multiplier
    m_L = depth/base_depth and exponent a (scheme `depth-mup`, else m_L = 1), as in the authors' code
    (nanoGPT-mup, branch completep):

    | parameters | rate | weight decay |
    |---|---|---|
    | embeddings, head, final norm | lr | as given; none on vectors |
    | matrices of the blocks | lr · m_L^(a−1) / m_N | as given · m_N |
    | biases, norms and other vectors of the blocks | lr · m_L^(a−1) | none |

    and ε · m_L^-a / m_N for all: the gradients of the blocks' matrices shrink by that.
    Yang et al. 2022 (arXiv:2203.03466), Dey et al. 2025 (arXiv:2505.01618). Others get lr and ε as given.

    Muon's matrices use √m_N instead of m_N: σ_max of the update should not depend on the width (Yang et al.
    2023, arXiv:2310.17813), but at the update RMS of AdamW σ_max of an orthogonal update grows as √width.
    SGD's step shrinks with the gradient, to which the branches add a factor m_L^-a, so SGD uses m_L^(2a−1)
    instead of m_L^(a−1).

    Args:
        model: a normscope model.
        lr: learning rate at base_width and base_depth.
        optimizer: "adamw", "adam", "sgd", or "muon" for the matrices of the blocks with AdamW for the rest.

    Raises:
        UsageError: it is not a normscope model, or SGD is used at another width than μP's base.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise UsageError(
            f"param_groups of a {type(model).__name__}",
            "a model of normscope.nn",
            "set its learning rates yourself",
        )
    m_width, sgd = config.width_multiplier, optimizer == "sgd"
    if sgd and m_width != 1:
        raise UsageError("μP with optimizer sgd", "adamw, adam or muon", "change the optimizer or init")
    exponent = scheme_named(config.scheme).depth_exponent
    m_depth = 1.0 if exponent is None else config.num_blocks / config.base_depth
    a = exponent or 0.0
    eps = eps * m_depth**-a / m_width
    depth_rate = 1.0 if exponent is None else m_depth ** (2 * a - 1 if sgd else a - 1)
    shrink = m_width**0.5 if optimizer == "muon" else m_width
    matrices = block_matrices(model)
    taken = {id(p) for p in matrices}
    blocks = {id(p) for block in _blocks(model) for p in block.parameters()}
    outside = [p for p in model.parameters() if id(p) not in blocks]
    kinds = (
        ([p for p in outside if p.dim() >= 2], 1.0, weight_decay),
        ([p for p in outside if p.dim() < 2], 1.0, 0.0),
        (matrices, depth_rate / shrink, weight_decay * shrink),
        ([p for p in model.parameters() if id(p) in blocks - taken], depth_rate, 0.0),
    )
    return [
        {"params": params, "lr": lr * factor, "eps": eps, "weight_decay": decay}
        for params, factor, decay in kinds
        if params
    ]


def has_own_rates(model: nn.Module) -> bool:
    """True for a normscope model in μP or depth-μP, which set learning rates."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return False
    return config.mup or scheme_named(config.scheme).depth_exponent is not None


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of the linear maps in the blocks, whose two dimensions both grow with the width."""
    maps = (m for block in _blocks(model) for m in block.modules() if isinstance(m, nn.Linear))
    return list({id(m.weight): m.get_parameter("weight") for m in maps}.values())


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for stack in model.modules() if isinstance(stack, Stack) for block in stack.blocks]
