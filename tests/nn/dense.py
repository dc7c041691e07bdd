"""Dense float64 references of branches and norms, from the formulas; normscope gives only the parameters.

Shapes: B batch, T tokens, D width, H heads, K width of a head.
"""

import math

import torch
from torch import Tensor, nn


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """Expected output of a norm, by its kind."""
    name = type(module).__name__
    if name == "NoNorm":
        return x
    if name == "LayerNorm":
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        return (x - mean) / (var + module.eps).sqrt() * module.weight + module.bias
    if name in ("RMSNorm", "RMSNormPlusOne"):
        gain = module.weight + (name == "RMSNormPlusOne")
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * gain
    if name == "ScaleNorm":
        return module.weight * x / x.norm(dim=-1, keepdim=True)
    if name == "UnitNorm":
        return x / x.norm(dim=-1, keepdim=True)
    if name == "DyT":
        return torch.tanh(module.scale * x) * module.weight + module.bias
    if name == "Derf":
        return torch.erf(module.scale * x + module.shift) * module.weight + module.bias
    if name in ("SeeDNorm", "BHyT"):
        normed = x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt()
        if name == "BHyT":
            return module.weight * torch.tanh(module.scale * normed / 10)
        amount = torch.tanh((x * module.direction).sum(-1, keepdim=True))
        return (module.weight + module.scale * amount) * normed
    raise NotImplementedError(name)


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """x Wᵀ + b, with W by the kind of map."""
    weight = module.weight
    if type(module).__name__ == "SigmaLinear":
        sigma = module.u @ weight @ module.v
        weight = module.gain / sigma * weight
    y = x @ weight.T
    return y if module.bias is None else y + module.bias


def attention(
    module: nn.Module, x_BTD: Tensor, *, causal: bool = True, first: Tensor | None = None
) -> Tensor:
    """Causal attention row by row: each query sees the keys up to its own position.

    `first`: values (B, T, H, K) of block 1, for a value residual.
    """
    batch, tokens, _ = x_BTD.shape
    q, k, v = (linear(m, x_BTD) for m in (module.q, module.k, module.v))
    if module.qk_norm == "full":
        q, k = norm(module.q_norm, q), norm(module.k_norm, k)
    q, k, v = (t.unflatten(-1, (module.heads, -1)) for t in (q, k, v))
    if module.qk_norm == "head":
        q, k = norm(module.q_norm, q), norm(module.k_norm, k)
    v = norm(module.v_norm, v)
    if first is not None:
        share = 0.5 if module.value_mix is None else module.value_mix
        v = (1 - share) * v + share * first
    scale = torch.full((module.heads,), module.head_width**-0.5, dtype=x_BTD.dtype)
    if module.qk_norm == "cosine":
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        scale = module.logit_scale.log_temperature.flatten().clamp(max=math.log(100)).exp()
    if module.qk_norm == "unit":
        gain = math.sqrt(x_BTD.shape[-1]) * module.logit_scale.gain.weight.squeeze(1)
        q, k = (t / t.norm(dim=-1, keepdim=True) * gain for t in (q, k))
        scale = torch.full((module.heads,), module.head_width**0.5, dtype=x_BTD.dtype)
    y = torch.zeros_like(q)
    for b in range(batch):
        for h in range(module.heads):
            for t in range(tokens):
                seen = t + 1 if causal else tokens
                weights = torch.softmax(scale[h] * (k[b, :seen, h] @ q[b, t, h]), dim=0)
                y[b, t, h] = weights @ v[b, :seen, h]
    if getattr(module, "head_gain", None) is not None:
        y = y * module.head_gain.flatten()[:, None]
    if module.output_gate is not None:
        y = y / (1 + torch.exp(-linear(module.output_gate, x_BTD).unflatten(-1, (module.heads, -1))))
    return linear(module.o, norm(module.inner_norm, y.flatten(2)))


def feed_forward(module: nn.Module, x: Tensor) -> Tensor:
    """down(GELU(up(x))), with the erf written out."""
    up = linear(module.up, x)
    if len(module.gains):
        up = up * math.sqrt(x.shape[-1]) * module.gains[0].weight
    hidden = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
    return linear(module.down, norm(module.inner_norm, hidden))
