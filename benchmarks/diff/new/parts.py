"""Norms, attention and feed-forward layers, each written in many ways, with one way to fill them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.diff.fresh.attention import Canon, Opt


@dataclass(frozen=True)
class Spec(Opt):
    """Options of a model: those of `Opt`, and where its norms stand: "pre", "post" or "out" of a branch."""

    place: str = "pre"
    affine: bool = True


@dataclass(frozen=True)
class Style:
    """The code that a model is written in; nothing of it may be reported.

    Attributes:
        box: how the blocks are held: "list", "dict", "sequential", "roles", "wrapped" or "flat".
        norm, proj, rotary, groups, mask, scores, ffn, add, embed, head: ways to write these parts.
        time: whether tensors between blocks are (T, B, D).
        saving: whether blocks are checkpointed.
        dropout: whether modules of rate 0 stand in the branches.
        direct: whether blocks are called by `torch.func.functional_call`.
    """

    box: str = "list"
    norm: str = "module"
    proj: str = "linear"
    rotary: str = "halves"
    groups: str = "repeat"
    mask: str = "causal"
    scores: str = "sdpa"
    ffn: str = "linear"
    add: str = "plus"
    embed: str = "module"
    head: str = "linear"
    time: bool = False
    saving: bool = False
    dropout: bool = False
    direct: bool = False


def parameter(*shape: int, value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value))


class HandNorm(nn.Module):
    """RMSNorm or LayerNorm by hand."""

    def __init__(self, opt: Opt, way: str, width: int):
        super().__init__()
        self.eps, self.way, self.plus, self.width = opt.eps, way, opt.plus, width
        self.gain = parameter(width, value=1.0 - opt.plus)
        self.shift = parameter(width) if opt.norm == "ln" and opt.norm_bias else None
        self.centred = opt.norm == "ln"

    def _centred(self, x: Tensor) -> Tensor:
        if self.way == "moments":
            variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            return (x - mean) / torch.sqrt(variance + self.eps)
        if self.way == "squares":
            mean = x.mean(-1, keepdim=True)
            return (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + self.eps)
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + self.eps) ** 0.5

    def _scaled(self, x: Tensor) -> Tensor:
        if self.way == "moments":
            return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps)
        if self.way == "squares":
            return x * (x.pow(2).sum(-1, keepdim=True) / self.width + self.eps).pow(-0.5)
        if self.way == "length":
            size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x / torch.sqrt(size**2 / self.width + self.eps)
        return x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] / self.width + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        y = self._centred(x) if self.centred else self._scaled(x)
        y = y * (self.gain + self.plus) if self.plus else self.gain * y
        return y if self.shift is None else y + self.shift


class Functional(nn.Module):
    """A norm by PyTorch's functions, with parameters of its own."""

    def __init__(self, opt: Opt, width: int):
        super().__init__()
        self.eps, self.plus, self.centred, self.width = opt.eps, opt.plus, opt.norm == "ln", width
        self.g = parameter(width, value=1.0 - opt.plus)
        self.b = parameter(width) if self.centred and opt.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        gain = self.g + self.plus if self.plus else self.g
        if self.centred:
            return F.layer_norm(x, (self.width,), gain, self.b, self.eps)
        return F.rms_norm(x, (self.width,), gain, self.eps)


def norm_of(opt: Opt, way: str, width: int | None = None) -> nn.Module:
    """A norm, written in one of the ways."""
    width = width or opt.width
    if not getattr(opt, "affine", True):
        return nn.LayerNorm(width, opt.eps, elementwise_affine=False)
    if way == "functional":
        return Functional(opt, width)
    if way == "module" and not opt.plus:
        if opt.norm == "ln":
            return nn.LayerNorm(width, opt.eps, bias=opt.norm_bias)
        return nn.RMSNorm(width, opt.eps)
    return HandNorm(opt, way, width)


def fill_norm(norm: nn.Module, own: Canon, role: str) -> None:
    """Give a norm the weights of a role."""
    for names, end in ((("gain", "g", "weight"), "w"), (("shift", "b", "bias"), "b")):
        for name in names:
            if isinstance(held := getattr(norm, name, None), Tensor) and f"{role}.{end}" in own:
                put(held, own[f"{role}.{end}"])


def put(parameter: Any, value: Tensor) -> None:
    assert parameter.shape == value.shape, (parameter.shape, value.shape)
    with torch.no_grad():
        parameter.copy_(value)


class Rotary(nn.Module):
    """Rotary positions: (B, H, T, K) → the same."""

    def __init__(self, opt: Opt, way: str):
        super().__init__()
        self.turned, self.way, self.pairs = opt.turned, way, opt.pairs
        rates = opt.base ** (-torch.arange(0, opt.turned, 2, dtype=torch.get_default_dtype()) / opt.turned)
        if way == "cached":
            angles = torch.arange(opt.length, dtype=rates.dtype)[:, None] * rates
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        else:
            self.register_buffer("rates", rates, persistent=False)

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        if self.way == "cached":
            return self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        rates = self.get_buffer("rates")
        angles = torch.einsum("t,f->tf", torch.arange(length, dtype=rates.dtype), rates)
        return angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        x, rest = x[..., : self.turned], x[..., self.turned :]
        cos, sin = self.angles(x.shape[-2])
        if self.way == "complex":
            turned = self._complex(x, torch.complex(cos, sin))
        elif self.way == "halves":
            turned = self._halves(x, cos, sin)
        else:
            one, two = (x[..., ::2], x[..., 1::2]) if self.pairs else x.chunk(2, -1)
            parts = (one * cos - two * sin, two * cos + one * sin)
            turned = torch.stack(parts, -1).flatten(-2) if self.pairs else torch.cat(parts, -1)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    def _complex(self, x: Tensor, turns: Tensor) -> Tensor:
        if self.pairs:
            numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
            return torch.view_as_real(numbers * turns).flatten(-2)
        one, two = x.chunk(2, -1)
        found = torch.complex(one.contiguous(), two.contiguous()) * turns
        return torch.cat((found.real, found.imag), -1)

    def _halves(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.pairs:
            cos, sin = (each.repeat_interleave(2, -1) for each in (cos, sin))
            other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        else:
            cos, sin = (torch.cat((each, each), -1) for each in (cos, sin))
            half = x.shape[-1] // 2
            other = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos + other * sin


class Attention(nn.Module):
    """Attention: (B, T, D) → (B, T, D), of `memory` where there is one; time first where the style has it."""

    def __init__(self, opt: Opt, style: Style, *, causal: bool = True):
        super().__init__()
        self.opt, self.style, self.causal = opt, style, causal
        d, k = opt.width, opt.size
        self.rows = (opt.heads, opt.kv, opt.kv)
        if style.proj == "linear":
            for name, heads in zip(("to_q", "to_k", "to_v"), self.rows, strict=True):
                self.add_module(name, nn.Linear(d, heads * k, bias=opt.qkv_bias))
        elif style.proj == "fused":
            self.qkv = nn.Linear(d, sum(self.rows) * k, bias=opt.qkv_bias)
        elif style.proj == "pair":
            self.query = nn.Linear(d, opt.heads * k, bias=opt.qkv_bias)
            self.key_value = nn.Linear(d, 2 * opt.kv * k, bias=opt.qkv_bias)
        elif style.proj == "triple":
            self.w_qkv = parameter(3, opt.heads, k, d)
            self.b_qkv = parameter(3, opt.heads, k) if opt.qkv_bias else None
        else:
            for name, heads in zip("qkv", self.rows, strict=True):
                shape = (heads, k, d) if style.proj == "heads" else (d, heads * k)
                bias = (heads, k) if style.proj == "heads" else (heads * k,)
                self.register_parameter(f"w_{name}", parameter(*shape))
                self.register_parameter(f"b_{name}", parameter(*bias) if opt.qkv_bias else None)
        if style.proj in ("heads", "triple"):
            self.w_o = parameter(opt.heads, k, d)
            self.b_o = parameter(d) if opt.o_bias else None
        elif style.proj == "kernel":
            self.w_o = parameter(opt.heads * k, d)
            self.b_o = parameter(d) if opt.o_bias else None
        else:
            self.out = nn.Linear(opt.heads * k, d, bias=opt.o_bias)
        self.q_norm = norm_of(opt, style.norm, k) if opt.qk else None
        self.k_norm = norm_of(opt, style.norm, k) if opt.qk else None
        self.rotary = Rotary(opt, style.rotary) if opt.turned else None
        self.drop = nn.Dropout(0.0) if style.dropout else nn.Identity()

    def fill(self, own: Canon) -> None:
        """Take the weights of a layer."""
        opt, proj = self.opt, self.style.proj
        for end, leaf, b in (("", "weight", "w"), (".b", "bias", "b")):
            if f"q{end}" in own and (not end or opt.qkv_bias):
                q, k, v = (own[f"{r}{end}"] for r in "qkv")
                if proj == "linear":
                    for name, part in zip(("to_q", "to_k", "to_v"), (q, k, v), strict=True):
                        put(getattr(getattr(self, name), leaf), part)
                elif proj == "fused":
                    put(getattr(self.qkv, leaf), torch.cat((q, k, v)))
                elif proj == "pair":
                    put(getattr(self.query, leaf), q)
                    put(getattr(self.key_value, leaf), torch.cat((k, v)))
                elif proj == "triple":
                    parts = [each.unflatten(0, (opt.heads, opt.size)) for each in (q, k, v)]
                    put(getattr(self, f"{b}_qkv"), torch.stack(parts))
                else:
                    for name, part in zip("qkv", (q, k, v), strict=True):
                        value = (
                            part.unflatten(0, (-1, opt.size))
                            if proj == "heads"
                            else part.mT
                            if not end
                            else part
                        )
                        put(getattr(self, f"{b}_{name}"), value)
        if proj in ("heads", "triple"):
            put(self.w_o, own["o"].T.unflatten(0, (opt.heads, opt.size)))
        elif proj == "kernel":
            put(self.w_o, own["o"].T)
        else:
            put(self.out.weight, own["o"])
        if "o.b" in own and opt.o_bias:
            put(self.out.bias if hasattr(self, "out") else self.b_o, own["o.b"])
        if self.q_norm is not None and self.k_norm is not None:
            fill_norm(self.q_norm, own, "qn")
            fill_norm(self.k_norm, own, "kn")

    def project(self, x: Tensor, memory: Tensor) -> list[Tensor]:
        """Queries, keys and values (…, heads, features)."""
        proj, size = self.style.proj, self.opt.size
        if proj == "linear":
            held = [self.get_submodule(f"to_{name}") for name in "qkv"]
            parts = [linear(source) for linear, source in zip(held, (x, memory, memory), strict=True)]
        elif proj == "fused":
            parts = list(self.qkv(x).split([heads * size for heads in self.rows], -1))
        elif proj == "pair":
            parts = [self.query(x), *self.key_value(memory).chunk(2, -1)]
        elif proj == "triple":
            found = torch.einsum("btd,chkd->cbthk", x, self.w_qkv)
            if self.b_qkv is not None:
                found = found + self.b_qkv[:, None, None]
            return list(found.unbind(0))
        else:
            parts = []
            for name, source in zip("qkv", (x, memory, memory), strict=True):
                weight, bias = getattr(self, f"w_{name}"), getattr(self, f"b_{name}")
                if proj == "heads":
                    part = torch.einsum("btd,hkd->bthk", source, weight)
                else:
                    part = source @ weight
                parts.append(part if bias is None else part + bias)
            if proj == "heads":
                return parts
        return [part.unflatten(-1, (-1, size)) for part in parts]

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        parts = self.project(x, x if memory is None else memory)
        order = (1, 2, 0, 3) if self.style.time else (0, 2, 1, 3)
        q, k, v = (part.permute(order) for part in parts)
        if self.q_norm is not None and self.k_norm is not None and self.opt.qk == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if self.q_norm is not None and self.k_norm is not None and self.opt.qk == "late":
            q, k = self.q_norm(q), self.k_norm(k)
        y = self.mix(q, k, v).permute((2, 0, 1, 3) if self.style.time else (0, 2, 1, 3))
        return self.drop(self.merged(y))

    def merged(self, y: Tensor) -> Tensor:
        """Heads (…, H, K) → (…, D)."""
        if self.style.proj in ("heads", "triple"):
            y = torch.einsum("bthk,hkd->btd", y, self.w_o)
        elif self.style.proj == "kernel":
            y = y.flatten(-2) @ self.w_o
        else:
            return self.out(y.flatten(-2))
        return y if self.b_o is None else y + self.b_o

    def seen(self, rows: int, columns: int) -> Tensor | None:
        """The keys that a query sees; None for all."""
        if not self.causal:
            return None
        gap = torch.arange(rows)[:, None] - torch.arange(columns)
        if self.opt.mask == "none":
            return None
        seen = gap >= 0 if self.opt.mask == "causal" else gap >= -1
        return seen if self.opt.window is None else seen & (gap < self.opt.window)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries, keys and values (B, heads, T, K) → (B, H, T, K)."""
        opt, groups, each = self.opt, self.style.groups, self.opt.heads // self.opt.kv
        if each > 1 and opt.tile:
            k, v = (part.repeat(1, each, 1, 1) for part in (k, v))
        elif each > 1 and groups == "repeat":
            k, v = (part.repeat_interleave(each, 1) for part in (k, v))
        elif each > 1 and groups == "expand":
            k, v = (part[:, :, None].expand(-1, -1, each, -1, -1).flatten(1, 2) for part in (k, v))
        scale = opt.size**-0.5 if opt.scale is None else opt.scale
        seen = self.seen(q.shape[2], k.shape[2])
        if groups == "einsum" or self.style.scores != "sdpa" or opt.cap is not None:
            return self.by_hand(q, k, v, scale, seen)
        more: dict[str, Any] = {"enable_gqa": True} if groups == "gqa" else {}
        if self.style.mask == "causal" and opt.window is None and seen is not None and opt.mask == "causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, **more)
        bias = seen
        if seen is not None and self.style.mask == "float":
            bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, **more)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> Tensor:
        """Scores, softmax and mean."""
        opt, way = self.opt, self.style.scores
        shared = q.shape[1] != k.shape[1]
        if shared:
            q, k, v = q.unflatten(1, (k.shape[1], -1)), k[:, :, None], v[:, :, None]
        if way == "queries":
            scores = (q * scale) @ k.mT
        elif way == "both":
            scores = torch.matmul(q * scale**0.5, (k * scale**0.5).transpose(-1, -2))
        elif way == "divided":
            scores = torch.matmul(q, k.transpose(-2, -1)) / (1 / scale)
        else:
            scores = torch.einsum("...ik,...jk->...ij", q, k) * scale
        if opt.cap is not None:
            scores = opt.cap * torch.tanh(scores / opt.cap)
        if seen is not None and self.style.mask == "float":
            lowest = torch.finfo(scores.dtype).min
            scores = scores + torch.where(seen, 0.0, lowest).to(scores.dtype)
        elif seen is not None and self.style.mask == "where":
            scores = torch.where(seen, scores, float("-inf"))
        elif seen is not None:
            scores = scores.masked_fill(seen.logical_not(), float("-inf"))
        y = torch.softmax(scores, -1) @ v
        return y.flatten(1, 2) if shared else y


def _written(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by hand."""
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        "tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "silu": lambda x: x * torch.sigmoid(x),
        "relu": lambda x: x.clamp(min=0),
        "relu2": lambda x: torch.relu(x).square(),
    }
    return known[name]


class Act(nn.Module):
    """An activation as a module."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * F.relu(x) if self.name == "relu2" else MODULES[self.name](x)


MODULES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "relu2": lambda x: F.relu(x).pow(2),
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU, "relu2": lambda: Act("relu2"),
    "tanh": lambda: nn.GELU("tanh"),
}  # fmt: skip


class FeedForward(nn.Module):
    """Feed-forward layer (…, D) → (…, D)."""

    def __init__(self, opt: Opt, style: Style):
        super().__init__()
        self.opt, self.way = opt, style.ffn
        d, h, bias = opt.width, opt.hidden, opt.mlp_bias
        self.act = _written(opt.act) if self.way == "kernel" else MODULES[opt.act]
        if self.way == "linear":
            self.gate = nn.Linear(d, h, bias=bias) if opt.gated else None
            self.up, self.down = nn.Linear(d, h, bias=bias), nn.Linear(h, d, bias=bias)
        elif self.way == "fused":
            self.wide: nn.Module = nn.Linear(d, (1 + opt.gated) * h, bias=bias)
            self.narrow: nn.Module = nn.Linear(h, d, bias=bias)
        elif self.way == "sequence":
            assert not opt.gated
            rest = (nn.Linear(h, d, bias=bias), nn.Dropout(0.0))
            self.net = nn.Sequential(nn.Linear(d, h, bias=bias), LAYERS[opt.act](), nn.Dropout(0.0), *rest)
        elif self.way == "conv":
            self.wide = nn.Conv1d(d, (1 + opt.gated) * h, 1, bias=bias)
            self.narrow = nn.Conv1d(h, d, 1, bias=bias)
        else:
            for name, shape in (("gate", (d, h)), ("up", (d, h)), ("down", (h, d))):
                if opt.gated or name != "gate":
                    self.register_parameter(f"k_{name}", parameter(*shape))
                    self.register_parameter(f"c_{name}", parameter(shape[1]) if bias else None)

    def fill(self, own: Canon) -> None:
        """Take the weights of a layer."""
        for end, leaf, letter in (("", "weight", "k"), (".b", "bias", "c")):
            if f"up{end}" not in own or (end and not self.opt.mlp_bias):
                continue
            roles = ("gate", "up") if self.opt.gated else ("up",)
            parts, down = [own[f"{role}{end}"] for role in roles], own[f"down{end}"]
            if self.way == "linear":
                for role, part in (*zip(roles, parts, strict=True), ("down", down)):
                    put(getattr(getattr(self, role), leaf), part)
            elif self.way in ("fused", "conv"):
                wide = torch.cat(parts)
                is_kernel = self.way == "conv" and not end
                put(getattr(self.wide, leaf), wide[..., None] if is_kernel else wide)
                put(getattr(self.narrow, leaf), down[..., None] if is_kernel else down)
            elif self.way == "sequence":
                put(getattr(self.net[0], leaf), parts[0])
                put(getattr(self.net[3], leaf), down)
            else:
                for role, part in (*zip(roles, parts, strict=True), ("down", down)):
                    put(getattr(self, f"{letter}_{role}"), part if end else part.T)

    def _kernel(self, x: Tensor, role: str) -> Tensor:
        y, bias = torch.einsum("...i,io->...o", x, getattr(self, f"k_{role}")), getattr(self, f"c_{role}")
        return y if bias is None else bias + y

    def joined(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * self.act(up) if self.opt.up_first else self.act(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        opt = self.opt
        if self.way == "linear":
            return self.down(
                self.joined(self.gate(x), self.up(x)) if self.gate is not None else self.act(self.up(x))
            )
        if self.way == "fused":
            y = self.wide(x)
            return self.narrow(self.joined(*y.split(opt.hidden, -1)) if opt.gated else self.act(y))
        if self.way == "sequence":
            return self.net(x)
        if self.way == "conv":
            y = self.wide(x.mT)
            return self.narrow(self.joined(*y.chunk(2, 1)) if opt.gated else self.act(y)).mT
        up = self._kernel(x, "up")
        up = self.joined(self._kernel(x, "gate"), up) if opt.gated else self.act(up)
        return self._kernel(up, "down")
