"""Figures of a model in training between two of its steps, in eval mode on a fixed batch.

Shapes: B sequences, T tokens, V ids, H heads.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.regimes.data import next_token
from normscope.anatomy.measuring import measuring
from normscope.nn import Decoder
from normscope.probes.sharpness import loss_eigenvalue
from normscope.probes.signal import diversity

PRODUCTS = 8
"""Products with the Hessian of one measurement of the sharpness."""
Figures = dict[str, float]


@torch.no_grad()
def observe(model: Decoder, ids: Tensor) -> Figures:
    """Figures of one forward pass on `ids` (B, T), and of the weights.

    `logit/rms`, `logit/max` and `logit/z2` (mean of log² Z) are of the output; `attention/max-logit` and
    `attention/min-entropy` are over all blocks, the latter the lowest of a head's means over the largest
    possible; `stream/rms` and `stream/max` are of the last block's output, before the final norm.
    """
    found: Figures = {}
    streams: list[Tensor] = []
    hook = model.blocks[-1].register_forward_hook(lambda *call: streams.append(_tensor(call[2])))
    with measuring(model), _Attention() as seen:
        logits_BTV: Tensor = model(ids).logits
    hook.remove()
    found["loss"] = float(next_token(logits_BTV, ids))
    found["logit/rms"] = _rms(logits_BTV)
    found["logit/max"] = float(logits_BTV.abs().max())
    found["logit/z2"] = float(logits_BTV.logsumexp(-1).square().mean())
    found["attention/max-logit"] = max(seen.largest)
    found["attention/min-entropy"] = min(seen.entropies)
    found["stream/rms"], found["stream/max"] = _rms(streams[-1]), float(streams[-1].abs().max())
    shares = [share for share in map(diversity, streams[-1]) if share is not None]
    found["diversity"] = sum(shares) / len(shares) if shares else 0.0
    matrices = matrices_of(model)
    found["weight/blocks"] = math.sqrt(
        sum(float(p.square().sum()) for p in matrices) / sum(p.numel() for p in matrices)
    )
    found["weight/head"], found["weight/embedding"] = (
        _rms(model.head.weight),
        _rms(model.embedding.tokens.weight),
    )
    gains = [p.abs() for name, p in model.named_parameters() if p.ndim == 1 and name.endswith("weight")]
    if gains:
        found["gain/max"] = max(float(gain.max()) for gain in gains)
        found["gain/min"] = min(float(gain.min()) for gain in gains)
    return found


def sharpness(model: Decoder, ids: Tensor, squares: dict[str, Tensor], eps: float) -> float:
    """λ_max(P⁻¹H) with P = √v̂ + ε, by Lanczos iteration.

    Args:
        squares: v̂ of Adam, by parameter.
    """
    named = dict(model.named_parameters())
    weights = [named[name] for name in squares]
    scale = torch.cat([(square.sqrt() + eps).reshape(-1) for square in squares.values()])
    with measuring(model), torch.enable_grad():
        gradients = torch.autograd.grad(next_token(model(ids).logits, ids), weights, create_graph=True)
        flat = torch.cat([g.reshape(-1) for g in gradients])
        return loss_eigenvalue(flat, weights, scale, steps=PRODUCTS).value


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of the blocks."""
    return [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]


class _Attention(TorchFunctionMode):
    """Mode that notes the largest causal attention logit of each call, and its heads' lowest entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []
        self.entropies: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self._note(args[0], args[1], (kwargs or {}).get("scale"))
        return func(*args, **(kwargs or {}))

    def _note(self, query: Tensor, key: Tensor, scale: float | None) -> None:
        length = query.shape[-2]
        logits = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        self.largest.append(float(logits.abs().masked_fill(~seen, 0.0).max()))
        chances = logits.masked_fill(~seen, -math.inf).softmax(-1)
        entropy = torch.special.entr(chances).sum(-1)[..., 1:] / torch.arange(2, length + 1).log()
        self.entropies.append(float(entropy.mean((0, 2)).min()))


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else _tensor(output[0])


def _rms(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def finite(figures: Figures, digits: int = 4) -> dict[str, float | None]:
    """The figures to a number of significant digits, None in place of those that are not finite."""
    return {
        name: float(f"{value:.{digits}g}") if math.isfinite(value) else None
        for name, value in figures.items()
    }


def rounded(values: Sequence[float], digits: int) -> list[float | None]:
    """A row of `finite` figures."""
    return list(finite(dict(enumerate(values)), digits).values())  # type: ignore[arg-type]
