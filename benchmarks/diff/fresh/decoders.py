"""Decoders in three styles, with the attention of `diff.fresh.attention`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.fresh.attention import ACTS, Einsum, Fused, Opt, Split, norm_of


class FusedFfn(nn.Module):
    """Feed-forward layer of lit-gpt."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.opt = opt
        self.fc = nn.Linear(opt.width, (1 + opt.gated) * opt.hidden, bias=opt.mlp_bias)
        self.proj = nn.Linear(opt.hidden, opt.width, bias=opt.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTS[self.opt.act]
        if not self.opt.gated:
            return self.proj(act(self.fc(x)))
        gate, up = self.fc(x).chunk(2, -1)
        return self.proj(gate * act(up) if self.opt.up_first else act(gate) * up)


class EinsumFfn(nn.Module):
    """Feed-forward layer with kernels (in, out)."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.opt = opt
        names = ("wg", "wi") if opt.gated else ("wi",)
        for name in names:
            setattr(self, name, nn.Parameter(torch.zeros(opt.width, opt.hidden)))
            setattr(self, f"{name}_bias", nn.Parameter(torch.zeros(opt.hidden)) if opt.mlp_bias else None)
        self.wo = nn.Parameter(torch.zeros(opt.hidden, opt.width))
        self.wo_bias = nn.Parameter(torch.zeros(opt.width)) if opt.mlp_bias else None

    def _map(self, x: Tensor, name: str) -> Tensor:
        y, bias = x @ self.get_parameter(name), getattr(self, f"{name}_bias")
        return y if bias is None else y + bias

    def forward(self, x: Tensor) -> Tensor:
        act, up = ACTS[self.opt.act], self._map(x, "wi")
        if self.opt.gated:
            gate = self._map(x, "wg")
            up = gate * act(up) if self.opt.up_first else act(gate) * up
        else:
            up = act(up)
        return self._map(up, "wo")


class SplitFfn(nn.Module):
    """Feed-forward layer with w1 as gate, w3 as up and w2 as down."""

    def __init__(self, opt: Opt):
        super().__init__()
        self.opt = opt
        self.w1 = nn.Linear(opt.width, opt.hidden, bias=opt.mlp_bias)
        self.w2 = nn.Linear(opt.hidden, opt.width, bias=opt.mlp_bias)
        if opt.gated:
            self.w3 = nn.Linear(opt.width, opt.hidden, bias=opt.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTS[self.opt.act]
        if not self.opt.gated:
            return self.w2(act(self.w1(x)))
        if self.opt.up_first:
            return self.w2(self.w1(x) * act(self.w3(x)))
        return self.w2(act(self.w1(x)) * self.w3(x))


STYLES: dict[str, tuple[Any, Any, tuple[str, str, str, str]]] = {
    "fused": (Fused, FusedFfn, ("norm_a", "mixer", "norm_b", "ffn")),
    "einsum": (Einsum, EinsumFfn, ("ln_att", "att", "ln_mlp", "mlp")),
    "split": (Split, SplitFfn, ("sa_norm", "sa", "ff_norm", "ff")),
}


class Block(nn.Module):
    """A layer."""

    def __init__(self, opt: Opt, style: str):
        super().__init__()
        mixer, ffn, self.names = STYLES[style]
        self.opt = opt
        parts = (norm_of(opt, style), mixer(opt), None if opt.shared else norm_of(opt, style), ffn(opt))
        for name, part in zip(self.names, parts, strict=True):
            if part is not None:
                self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        opt = self.opt
        norm_a, mixer, norm_b, ffn = (self._modules.get(name) for name in self.names)
        assert norm_a is not None
        assert mixer is not None
        assert ffn is not None
        first = norm_a(x)
        added = (
            mixer(first.detach() if opt.cut else first) * opt.branch
            if opt.branch != 1 or opt.cut
            else mixer(first)
        )
        if opt.parallel:
            return x + added + ffn(first if norm_b is None else norm_b(x))
        x = (first if opt.source == "normed" else x) + added
        second = x if norm_b is None else norm_b(x)
        more = ffn(second)
        return x + (more * opt.branch if opt.branch != 1 else more)


class Decoder(nn.Module):
    """The decoder of a style: ids (B, T) → logits (B, T, V)."""

    def __init__(self, opt: Opt, style: str):
        super().__init__()
        self.opt, self.style = opt, style
        blocks = [Block(opt.at(i), style) for i in range(opt.depth)]
        table = None if opt.table is None else torch.zeros(opt.length + 2, opt.width)
        if style == "einsum":
            self.embedding = nn.Parameter(torch.zeros(opt.vocab, opt.width))
            self.positions = None if table is None else nn.Parameter(table)
            for i, block in enumerate(blocks):
                self.add_module(f"layer_{i}", block)
            self.unembed = None if opt.tied else nn.Parameter(torch.zeros(opt.width, opt.vocab))
            self.unembed_bias = nn.Parameter(torch.zeros(opt.vocab)) if opt.head_bias else None
        else:
            self.wte = nn.Embedding(opt.vocab, opt.width)
            self.wpe = None if table is None else nn.Embedding(len(table), opt.width)
            setattr(self, "h" if style == "fused" else "blocks", nn.ModuleList(blocks))
            self.lm_head = nn.Linear(opt.width, opt.vocab, bias=opt.head_bias)
            if opt.tied:
                self.lm_head.weight = self.wte.weight
        self.emb_norm = norm_of(replace(opt, norm="ln", norm_bias=True), style) if opt.emb_norm else None
        self.ln_f = norm_of(opt, style) if opt.final else None
        fresh(self)

    def blocks_of(self) -> list[nn.Module]:
        if self.style == "einsum":
            return [self.get_submodule(f"layer_{i}") for i in range(self.opt.depth)]
        return list(self.get_submodule("h" if self.style == "fused" else "blocks").children())

    def embedded(self, ids: Tensor) -> Tensor:
        opt, flax = self.opt, self.style == "einsum"
        x = self.embedding[ids] if flax else self.wte(ids)
        if opt.emb != 1:
            x = x * opt.emb
        if opt.table is not None:
            rows = torch.arange(ids.shape[1]) + opt.table
            x = x + (self.get_parameter("positions")[rows] if flax else self.get_submodule("wpe")(rows))
        return x if self.emb_norm is None else self.emb_norm(x)

    def read_out(self, x: Tensor) -> Tensor:
        x = x if self.ln_f is None else self.ln_f(x)
        if self.style != "einsum":
            return self.lm_head(x)
        logits = x @ (self.embedding.T if self.unembed is None else self.unembed)
        return logits if self.unembed_bias is None else logits + self.unembed_bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for block in self.blocks_of():
            x = block(x)
        logits = self.read_out(x)
        return logits if self.opt.logits == 1 else logits * self.opt.logits


def fresh(model: nn.Module) -> None:
    """Draw all matrices and kernels from a normal law of deviation 0.02."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
