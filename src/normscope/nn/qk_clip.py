"""QK-clip (Kimi Team 2025, arXiv:2507.20534): bound the attention logits by the weights of q and k.

Shapes: H heads, G groups of keys.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.attention import Attention


@torch.no_grad()
def clip_queries_and_keys(model: nn.Module, limit: float) -> None:
    """W_q and W_k of each head × √γ, γ = min(1, limit/S), S its largest logit since the last call.

    Heads that share keys share the γ of the largest S among them, as in Megatron-LM; biases are scaled as
    well. Processes that train together take the largest S of all. Call this after the optimiser's step.

    Raises:
        UsageError: the weights are sharded (FSDP).
    """
    for module in model.modules():
        if isinstance(module, Attention) and module.largest_logit is not None:
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(module.largest_logit, dist.ReduceOp.MAX)
            groups = len(module.k.get_parameter("weight")) // module.head_width
            largest_G = module.largest_logit.unflatten(0, (groups, -1)).amax(dim=1)
            factor_G = (limit / largest_G).clamp(max=1.0).sqrt()
            for linear in (module.q, module.k):
                _scale_rows(linear, factor_G)
            module.largest_logit.zero_()


def _scale_rows(linear: nn.Module, factor_G: Tensor) -> None:
    """Multiply the rows of each group."""
    from torch.distributed.tensor import DTensor  # its import takes a third of ours, and few clip

    weight, bias = linear.get_parameter("weight"), linear.bias
    if isinstance(weight, DTensor):
        raise UsageError("qk_clip with sharded weights", "whole weights", "train with DDP")
    rows = factor_G.repeat_interleave(len(weight) // len(factor_G)).to(weight.dtype)
    weight.mul_(rows[:, None])
    if isinstance(bias, Tensor):
        bias.mul_(rows)
