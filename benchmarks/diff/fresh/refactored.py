"""Parts and whole decoders rewritten in other ways, which compute the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.diff.fresh.attention import ACTS, Mixer, Norm, Opt, Split
from benchmarks.diff.fresh.decoders import Decoder, fresh
from benchmarks.diff.fresh.own import FRESH
from benchmarks.diff.fresh.ports import Form, Reader, ReaderLayer

State = dict[str, Tensor]
Move = Callable[[State], State]


class Kernel(nn.Module):
    """A linear layer of which the matrix is (in, out), as GPT-2's."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().T.contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Pointwise(nn.Module):
    """A feed-forward layer of convolutions of size 1, as in fairseq."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.opt = opt
        self.w1 = nn.Conv1d(opt.width, opt.hidden, 1)
        self.w2 = nn.Conv1d(opt.hidden, opt.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ACTS[self.opt.act](self.w1(x.transpose(1, 2)))).transpose(1, 2)


class Careful(nn.Module):
    """RMSNorm in float32, as LLaMA has it."""

    def __init__(self, norm: Norm):
        super().__init__()
        self.scale, self.eps = norm.scale, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.scale


class Turning(Split):
    """Rotary positions as complex numbers, of neighbours."""

    def turn(self, x: Tensor) -> Tensor:
        rates = self.get_buffer("rates")
        angles = torch.outer(torch.arange(x.shape[1], dtype=rates.dtype), rates)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Lazy(Split):
    """A mask that is built at the first call, and again for longer texts."""

    def bias(self, length: int) -> Tensor:
        known = getattr(self, "known", None)
        if known is None or known.shape[-1] < length:
            known = torch.full((1, length, length), float("-inf")).triu(1)
            self.register_buffer("known", known, persistent=False)
        return known[:, :length, :length]


class Grouped(Split):
    """PyTorch's attention with groups of its own."""

    def forward(self, x: Tensor) -> Tensor:
        size = self.opt.size
        q, k, v = (m(x).unflatten(-1, (-1, size)) for m in (self.q_lin, self.k_lin, self.v_lin))
        q, k = self.prepared(q, k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out_lin(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Head(nn.Module):
    """One head, as in a well-known lecture."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(opt.width, opt.size) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(opt.length, opt.length)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        k, q = self.key(x), self.query(x)
        weights = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        shown = self.get_buffer("tril")[:length, :length]
        return weights.masked_fill(shown == 0, float("-inf")).softmax(-1) @ self.value(x)


class Heads(nn.Module):
    """A list of heads."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.heads = nn.ModuleList(Head(opt) for _ in range(opt.heads))
        self.out_lin = nn.Linear(opt.width, opt.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_lin(torch.cat([head(x) for head in self.heads], -1))


class Named(Decoder):
    """Layers in a dictionary of modules."""

    def __init__(self, opt: Opt, style: str):
        super().__init__(opt, style)
        blocks = self.blocks_of()
        del self.blocks
        self.stages = nn.ModuleDict({f"stage{i}": block for i, block in enumerate(blocks)})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for stage in self.stages.values():
            x = stage(x)
        return self.read_out(x)


class Headless(Decoder):
    """The head reads the embedding's weight."""

    def __init__(self, opt: Opt, style: str):
        super().__init__(opt, style)
        del self.lm_head

    def read_out(self, x: Tensor) -> Tensor:
        return F.linear(x if self.ln_f is None else self.ln_f(x), self.wte.weight)


class Masked(Decoder):
    """One mask, held by the model."""

    def __init__(self, opt: Opt, style: str):
        super().__init__(opt, style)
        hidden = torch.full((opt.length, opt.length), float("-inf")).triu(1)
        self.register_buffer("mask", hidden, persistent=False)
        for block in self.blocks_of():
            for mixer in block.modules():
                if isinstance(mixer, Mixer):
                    mixer.bias = self.mask_of  # type: ignore[method-assign]

    def mask_of(self, length: int) -> Tensor:
        return self.get_buffer("mask")[None, :length, :length]


class Saving(Decoder):
    """Activation checkpointing."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for block in self.blocks_of():
            x = checkpoint(block, x, use_reentrant=False)
        return self.read_out(x)


class Outer(nn.Module):
    """A model in a trainer's module."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.net = inside

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.net(input_ids)


class Start(nn.Module):
    """Embeddings as the first module of a sequence."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(opt.vocab, opt.width), nn.Embedding(opt.length + 2, opt.width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe.weight[None, : ids.shape[1]]


class Inline(nn.Module):
    """A decoder whose layers are functions; the weights of all layers lie in one tensor per role."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.opt, n, d, h = opt, opt.depth, opt.width, opt.hidden
        self.wte, self.wpe = nn.Embedding(opt.vocab, d), nn.Embedding(opt.length + 2, d)
        shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (h, d), "down": (d, h)}
        self.w = nn.ParameterDict({r: torch.empty(n, *s).normal_(std=0.02) for r, s in shapes.items()})
        self.c = nn.ParameterDict({r: torch.zeros(n, s[0]) for r, s in shapes.items()})
        self.g = nn.ParameterDict({r: torch.ones(n, d) for r in ("n1", "n2")})
        self.h = nn.ParameterDict({r: torch.zeros(n, d) for r in ("n1", "n2")})
        self.ln_f = nn.LayerNorm(d, eps=opt.eps)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def norm(self, x: Tensor, role: str, i: int) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.g[role][i], self.h[role][i], self.opt.eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for i in range(self.opt.depth):
            y = self.norm(x, "n1", i)
            q, k, v = (
                F.linear(y, self.w[r][i], self.c[r][i]).unflatten(-1, (self.opt.heads, -1)).transpose(1, 2)
                for r in "qkv"
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.linear(y, self.w["o"][i], self.c["o"][i])
            y = ACTS[self.opt.act](F.linear(self.norm(x, "n2", i), self.w["up"][i], self.c["up"][i]))
            x = x + F.linear(y, self.w["down"][i], self.c["down"][i])
        return F.linear(self.ln_f(x), self.wte.weight)


def changed(opt: Opt, edit: Callable[[nn.Module], None], make: Any = Decoder) -> nn.Module:
    """A decoder after a change of its modules, drawn again."""
    model: nn.Module = make(opt, "split")
    edit(model)
    fresh(model)
    return model


def kernels(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, Kernel(child))


def pointwise(model: Any) -> None:
    for block in model.blocks:
        block.ff = Pointwise(block.opt)


def careful(model: Any) -> None:
    for block in model.blocks:
        block.sa_norm, block.ff_norm = Careful(block.sa_norm), Careful(block.ff_norm)
    model.ln_f = Careful(model.ln_f)


def mixers(make: Any, **options: Any) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        for block in model.blocks:
            block.sa = make(replace(block.opt, **options))

    return edit


def dead(model: Any) -> None:
    model.value_head = nn.Linear(model.opt.width, 1)
    model.old_norm = nn.LayerNorm(model.opt.width)
    for block in model.blocks:
        block.drop = nn.Dropout(0.1)


def sequence(opt: Opt) -> nn.Module:
    inside, start = Decoder(opt, "fused"), Start(opt)
    head = nn.Linear(opt.width, opt.vocab, bias=False)
    model = nn.Sequential(start, *inside.blocks_of(), inside.get_submodule("ln_f"), head)
    fresh(model)
    head.weight = start.wte.weight
    return model


def compiled() -> Any:
    return torch.compile(Decoder(FRESH, "split"), backend="eager")


def backwards(opt: Opt, style: str) -> nn.Module:
    """A decoder whose weights are drawn from the last to the first, and scaled by hand."""
    model = Decoder(opt, style)
    with torch.no_grad():
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.dim() > 1 and not name.endswith("bias"):
                parameter.copy_(
                    torch.randn(parameter.shape[::-1]).permute(*range(parameter.dim())[::-1]) * 0.02
                )
    return model


class TimeFirst(Reader):
    """The encoder with time as its first axis and attention of its own."""

    def __init__(self, form: Form):
        super().__init__(form)
        self.tower = nn.ModuleList(Handmade(form) for _ in range(form.depth))
        fresh(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start_norm((self.words(ids) + self.places.weight[: ids.shape[1]]).transpose(0, 1))
        for layer in self.tower:
            x = layer(x)
        x = x.transpose(0, 1)
        return self.decoder(self.dense_norm(ACTS[self.form.head_act](self.dense(x))))


class Handmade(ReaderLayer):
    """The layer with three projections of (T, B, d)."""

    def __init__(self, form: Form):
        super().__init__(form)
        del self.mha
        self.maps = nn.ModuleDict({r: nn.Linear(form.width, form.width) for r in ("q", "k", "v", "o")})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.maps[r](x).unflatten(-1, (self.form.heads, -1)) for r in "qkv")
        logits = torch.einsum("tbhk,sbhk->bhts", q, k) / q.shape[-1] ** 0.5
        y = torch.einsum("bhts,sbhk->tbhk", logits.softmax(-1), v)
        x = self.mha_norm(x + self.maps["o"](y.flatten(2)))
        return self.wide_norm(x + self.ffn(x))
