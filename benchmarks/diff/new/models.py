"""Models of the parts of `diff.new.parts`, their blocks held and called in many ways."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from benchmarks.diff.families import Places
from benchmarks.diff.fresh.attention import Canon
from benchmarks.diff.new.parts import (
    Attention,
    FeedForward,
    Spec,
    Style,
    fill_norm,
    norm_of,
    parameter,
    put,
)

NAMES = {
    "list": ("layers.{}", "norm1", "attn", "norm2", "ffn"),
    "dict": ("stack.block_{}", "pre_mixer", "mixer", "pre_channel", "channel"),
    "sequential": ("trunk.{}", "ln1", "self_attention", "ln2", "feed_forward"),
    "wrapped": ("layers.{}", "0.fn.norm", "0.fn.fn", "1.fn.norm", "1.fn.fn"),
    "flat": ("steps", "", "", "", ""),
    "roles": ("", "", "", "", ""),
}


def joined(x: Tensor, y: Tensor, way: str) -> Tensor:
    """The sum of stream and branch."""
    if way == "torch":
        return torch.add(x, y)
    if way == "method":
        return y.add(x)
    if way == "inside":
        y = y.clone()
        y += x
        return y
    return x + y


def branched(x: Tensor, norm: nn.Module, layer: nn.Module, opt: Spec, way: str) -> Tensor:
    """The stream after a branch."""
    if opt.place == "post":
        return norm(joined(x, layer(x), way))
    if opt.place == "out":
        return joined(x, norm(layer(x)), way)
    y = norm(x)
    found = layer(y)
    return joined(y if opt.source == "normed" else x, found if opt.branch == 1 else found * opt.branch, way)


class Block(nn.Module):
    """Both branches, under the names of a style."""

    def __init__(self, opt: Spec, style: Style):
        super().__init__()
        self.opt, self.style, self.names = opt, style, NAMES[style.box][1:]
        for name, part in zip(self.names, parts_of(opt, style), strict=True):
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        norm1, attention, norm2, ffn = (getattr(self, name) for name in self.names)
        if self.opt.parallel:
            y = norm1(x)
            return joined(joined(x, attention(y), self.style.add), ffn(norm2(x)), self.style.add)
        x = branched(x, norm1, attention, self.opt, self.style.add)
        return branched(x, norm2, ffn, self.opt, self.style.add)


class Before(nn.Module):
    """A norm before a layer."""

    def __init__(self, norm: nn.Module, fn: nn.Module):
        super().__init__()
        self.norm, self.fn = norm, fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class Residual(nn.Module):
    """A layer and the stream around it."""

    def __init__(self, fn: nn.Module, opt: Spec, way: str):
        super().__init__()
        self.fn, self.scale, self.way = fn, opt.branch, way

    def forward(self, x: Tensor) -> Tensor:
        y = self.fn(x)
        return joined(x, y if self.scale == 1 else y * self.scale, self.way)


def parts_of(opt: Spec, style: Style) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
    """Norm, attention, norm and feed-forward layer."""
    attention = Attention(opt, style, causal=opt.mask != "none")
    return norm_of(opt, style.norm), attention, norm_of(opt, style.norm), FeedForward(opt, style)


class Embed(nn.Module):
    """Ids (B, T) → (B, T, D)."""

    def __init__(self, opt: Spec, style: Style):
        super().__init__()
        self.opt, self.way = opt, style.embed
        rows = opt.length + 2
        if self.way == "module":
            self.tokens = nn.Embedding(opt.vocab, opt.width)
            self.places = None if opt.table is None else nn.Embedding(rows, opt.width)
        else:
            self.w_tokens = parameter(opt.vocab, opt.width)
            self.w_places = None if opt.table is None else parameter(rows, opt.width)
        self.norm = norm_of(opt, style.norm) if opt.emb_norm else None

    def table(self) -> Any:
        return self.tokens.weight if self.way == "module" else self.w_tokens

    def rows(self) -> Any:
        return self.places.weight if self.way == "module" and self.places is not None else self.w_places

    def fill(self, canon: Canon) -> None:
        put(self.table(), canon["emb"])
        if self.opt.table is not None:
            put(self.rows(), canon["pos"])
        if self.norm is not None:
            fill_norm(self.norm, canon, "emb_norm")

    def forward(self, ids: Tensor) -> Tensor:
        opt = self.opt
        if self.way == "module":
            x = self.tokens(ids) * opt.emb if opt.emb != 1 else self.tokens(ids)
        elif self.way == "inside":
            x = F.embedding(ids, self.w_tokens * opt.emb)
        elif self.way == "hot":
            x = F.one_hot(ids, opt.vocab).to(self.w_tokens.dtype) @ self.w_tokens * opt.emb
        else:
            x = self.w_tokens[ids]
            x = opt.emb * x if opt.emb != 1 else x
        if opt.table is not None:
            if self.way == "module" and self.places is not None:
                x = x + self.places(torch.arange(ids.shape[1]) + opt.table)
            else:
                x = x + self.rows()[opt.table : opt.table + ids.shape[1]]
        return x if self.norm is None else self.norm(x)


class Model(nn.Module):
    """Ids (B, T) → logits (B, T, V)."""

    def __init__(self, opt: Spec, style: Style):
        super().__init__()
        self.opt, self.style = opt, style
        self.embed = Embed(opt, style)
        specs: list[Any] = [opt.at(i) for i in range(opt.depth)]
        self.specs, self.owned = specs, ()
        if style.box in ("list", "dict", "sequential"):
            blocks = [Block(each, style) for each in specs]
            if style.box == "list":
                self.layers = nn.ModuleList(blocks)
            elif style.box == "dict":
                self.stack = nn.ModuleDict({f"block_{i}": block for i, block in enumerate(blocks)})
            else:
                self.trunk = nn.Sequential(*blocks)
        else:
            self._bare([parts_of(each, style) for each in specs])
        self.final = norm_of(opt, style.norm) if opt.final else None
        self._head()

    def _bare(self, parts: list[Any]) -> None:
        way = self.style.box
        if way == "wrapped":
            self.layers = nn.ModuleList(
                nn.ModuleList(Residual(Before(part[i], part[i + 1]), spec, self.style.add) for i in (0, 2))
                for spec, part in zip(self.specs, parts, strict=True)
            )
        elif way == "flat":
            self.steps = nn.ModuleList(each for part in parts for each in part)
        else:
            for i, name in enumerate(("attention_norms", "attentions", "ffn_norms", "ffns")):
                self.add_module(name, nn.ModuleList(part[i] for part in parts))

    def _head(self) -> None:
        opt = self.opt
        if self.style.head == "linear":
            self.lm_head = nn.Linear(opt.width, opt.vocab, bias=opt.head_bias)
            if opt.tied:
                self.lm_head.weight = self.embed.table()
        else:
            self.unembed = None if opt.tied else parameter(opt.vocab, opt.width)
            self.unembed_bias = parameter(opt.vocab) if opt.head_bias else None

    def parts(self, layer: int) -> list[Any]:
        """Norm, attention, norm and feed-forward layer of a block."""
        if self.style.box == "flat":
            return list(self.steps[4 * layer : 4 * layer + 4])
        if self.style.box == "roles":
            names = ("attention_norms", "attentions", "ffn_norms", "ffns")
            return [self.get_submodule(f"{name}.{layer}") for name in names]
        prefix, *own = NAMES[self.style.box]
        return [self.get_submodule(f"{prefix.format(layer)}.{name}") for name in own]

    def fill(self, canon: Canon) -> "Model":
        """Take weights."""
        self.embed.fill(canon)
        for i in range(self.opt.depth):
            own = {k.partition(".")[2]: v for k, v in canon.items() if k.startswith(f"{i}.")}
            norm1, attention, norm2, ffn = self.parts(i)
            fill_norm(norm1, own, "n1")
            fill_norm(norm2, own, "n2")
            attention.fill(own)
            ffn.fill(own)
        if self.final is not None:
            fill_norm(self.final, canon, "final")
        linear = self.style.head == "linear"
        if not self.opt.tied:
            put(self.lm_head.weight if linear else self.unembed, canon["head"])
        if self.opt.head_bias:
            put(self.lm_head.bias if linear else self.unembed_bias, canon["head.b"])
        return self

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        """A block of the stream, as the style calls it."""
        if self.style.direct:
            held = dict(block.named_parameters()) | dict(block.named_buffers())
            return functional_call(block, held, (x,))
        if self.style.saving and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    def walked(self, x: Tensor) -> Tensor:
        """The stream after all blocks."""
        box = self.style.box
        if box == "sequential":
            return self.trunk(x)
        if box in ("list", "dict"):
            for block in self.layers if box == "list" else self.stack.values():
                x = self.called(block, x)
        elif box == "wrapped":
            for pair in self.layers:
                held: Any = pair
                x = held[1](held[0](x))
        else:
            for i, spec in enumerate(self.specs):
                norm1, attention, norm2, ffn = self.parts(i)
                x = branched(x, norm1, attention, spec, self.style.add)
                x = branched(x, norm2, ffn, spec, self.style.add)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.style.time:
            x = self.walked(x.transpose(0, 1)).transpose(0, 1)
        else:
            x = self.walked(x)
        x = x if self.final is None else self.final(x)
        logits = self.read(x)
        return logits if self.opt.logits == 1 else logits * self.opt.logits

    def read(self, x: Tensor) -> Tensor:
        """The logits of the last stream."""
        if self.style.head == "linear":
            return self.lm_head(x)
        weight: Any = self.embed.table() if self.opt.tied else self.unembed
        if self.style.head == "functional":
            return F.linear(x, weight, self.unembed_bias)
        logits = x @ weight.T if self.style.head == "matmul" else torch.einsum("btd,vd->btv", x, weight)
        return logits if self.unembed_bias is None else logits + self.unembed_bias

    def places(self, where: str) -> Places:
        """Modules of "attention 0", "mlp 1", "first" or "last"."""
        if where == "first":
            return ("embed",)
        if where == "last":
            return ("final", "lm_head", "unembed", "unembed_bias", "embed")
        branch, _, layer = where.partition(" ")
        known = {id(module): name for name, module in self.named_modules()}
        norm1, attention, norm2, ffn = (known[id(part)] for part in self.parts(int(layer)))
        pair = [attention, norm1] if branch == "attention" else [ffn, norm2]
        if self.style.box == "wrapped":
            pair.append(f"layers.{layer}.{0 if branch == 'attention' else 1}")
        return tuple(pair)


class Raw(nn.Module):
    """A decoder with LayerNorm of which the layers are lists of parameters, read in a loop."""

    def __init__(self, opt: Spec, stacked: bool = False):
        super().__init__()
        self.opt, self.stacked = opt, stacked
        d, n, k, h = opt.width, opt.heads, opt.size, opt.hidden
        self.shapes = {"q": (d, n, k), "k": (d, n, k), "v": (d, n, k), "o": (n, k, d), "up": (d, h)}
        self.shapes |= {"down": (h, d), "bq": (n, k), "bk": (n, k), "bv": (n, k), "bo": (d,), "bup": (h,)}
        self.shapes |= {"bdown": (d,), "g1": (d,), "s1": (d,), "g2": (d,), "s2": (d,)}
        for name, shape in self.shapes.items():
            if stacked:
                self.register_parameter(f"all_{name}", parameter(opt.depth, *shape))
            else:
                self.add_module(name, nn.ParameterList(parameter(*shape) for _ in range(opt.depth)))
        self.vocabulary, self.positions = parameter(opt.vocab, d), parameter(opt.length + 2, d)
        self.g, self.s = parameter(d), parameter(d)

    def fill(self, canon: Canon) -> "Raw":
        """Take weights."""
        put(self.vocabulary, canon["emb"])
        put(self.positions, canon["pos"])
        put(self.g, canon["final.w"])
        put(self.s, canon["final.b"])
        names = {"g1": "n1.w", "s1": "n1.b", "g2": "n2.w", "s2": "n2.b"}
        names |= {f"b{r}": f"{r}.b" for r in ("q", "k", "v", "o", "up", "down")}
        for i in range(self.opt.depth):
            for name, shape in self.shapes.items():
                value = canon[f"{i}.{names.get(name, name)}"]
                put(self.held(i, name), (value.T if value.dim() > 1 else value).reshape(shape))
        return self

    def held(self, layer: int, name: str) -> Any:
        if self.stacked:
            return self.get_parameter(f"all_{name}")[layer]
        return self.get_submodule(name)[layer]  # type: ignore[index]

    def forward(self, ids: Tensor) -> Tensor:
        eps, shape = self.opt.eps, (self.opt.width,)
        x = self.vocabulary[ids] + self.positions[: ids.shape[1]]
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        for i in range(self.opt.depth):
            w = {name: self.held(i, name) for name in self.shapes}
            y = F.layer_norm(x, shape, w["g1"], w["s1"], eps)
            q, k, v = (torch.einsum("btd,dhk->bhtk", y, w[r]) + w[f"b{r}"][:, None] for r in "qkv")
            scores = torch.einsum("bhik,bhjk->bhij", q, k) / self.opt.size**0.5 + mask
            y = torch.einsum("bhij,bhjk->bihk", scores.softmax(-1), v)
            x = x + torch.einsum("bihk,hkd->bid", y, w["o"]) + w["bo"]
            y = F.layer_norm(x, shape, w["g2"], w["s2"], eps)
            x = x + F.gelu(y @ w["up"] + w["bup"]) @ w["down"] + w["bdown"]
        x = F.layer_norm(x, shape, self.g, self.s, eps)
        return x @ self.vocabulary.T


class Torch(nn.Module):
    """The same of PyTorch's own layers, batch or time first."""

    def __init__(self, opt: Spec, time: bool = False):
        super().__init__()
        self.opt, self.time = opt, time
        self.emb, self.pos = nn.Embedding(opt.vocab, opt.width), nn.Embedding(opt.length + 2, opt.width)
        options: dict[str, Any] = {"dropout": 0.0, "activation": opt.act, "layer_norm_eps": opt.eps}
        options |= {"batch_first": not time, "norm_first": opt.place == "pre"}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(opt.width, opt.heads, opt.hidden, **options) for _ in range(opt.depth)
        )
        self.last = nn.LayerNorm(opt.width, opt.eps)
        self.out = nn.Linear(opt.width, opt.vocab, bias=False)
        self.out.weight = self.emb.weight

    def fill(self, canon: Canon) -> "Torch":
        """Take weights."""
        put(self.emb.weight, canon["emb"])
        put(self.pos.weight, canon["pos"])
        fill_norm(self.last, canon, "final")
        for i, block in enumerate(self.blocks):
            own = {k.partition(".")[2]: v for k, v in canon.items() if k.startswith(f"{i}.")}
            layer: Any = block
            fill_norm(layer.norm1, own, "n1")
            fill_norm(layer.norm2, own, "n2")
            put(layer.self_attn.in_proj_weight, torch.cat([own[r] for r in "qkv"]))
            put(layer.self_attn.in_proj_bias, torch.cat([own[f"{r}.b"] for r in "qkv"]))
            pairs = ((layer.self_attn.out_proj, "o"), (layer.linear1, "up"), (layer.linear2, "down"))
            for linear, role in pairs:
                put(linear.weight, own[role])
                put(linear.bias, own[f"{role}.b"])
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos.weight[: ids.shape[1]]
        x = x.transpose(0, 1) if self.time else x
        mask = None
        if self.opt.mask == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        x = x.transpose(0, 1) if self.time else x
        return self.out(self.last(x))


class Shared(nn.Module):
    """Another model inside a trainer's class."""

    def __init__(self, model: Any):
        super().__init__()
        self.backbone = model

    def fill(self, canon: Canon) -> "Shared":
        """Take weights."""
        self.backbone.fill(canon)
        return self

    def forward(self, ids: Tensor) -> Tensor:
        held = dict(self.backbone.named_parameters())
        return functional_call(self.backbone, held, (ids,))


class Translator(nn.Module):
    """An encoder and a decoder that share one table; norms stand before the branches."""

    def __init__(self, opt: Spec, style: Style, causal: bool = True):
        super().__init__()
        self.opt, self.style = opt, style
        self.shared = Embed(opt, style)
        plain = [opt.at(i) for i in range(opt.depth)]
        self.encoder = nn.ModuleList(self._layer(each, False, False) for each in plain)
        self.decoder = nn.ModuleList(self._layer(each, True, causal) for each in plain)
        self.encoder_norm, self.decoder_norm = norm_of(opt, style.norm), norm_of(opt, style.norm)

    def _layer(self, opt: Any, decodes: bool, causal: bool) -> nn.ModuleDict:
        opt_, style = opt, self.style
        made: dict[str, nn.Module] = {"ln_self": norm_of(opt_, style.norm)}
        made["self_attn"] = Attention(opt_, style, causal=causal)
        if decodes:
            made |= {"ln_cross": norm_of(opt_, style.norm)}
            made["cross"] = Attention(opt_, self.cross_style(), causal=False)
        return nn.ModuleDict(made | {"ln_ff": norm_of(opt_, style.norm), "ff": FeedForward(opt_, style)})

    def cross_style(self) -> Style:
        return replace(
            self.style, proj={"fused": "pair", "triple": "heads"}.get(self.style.proj, self.style.proj)
        )

    def fill(self, canon: Canon) -> "Translator":
        """Take weights: `e0.` and `d0.` are layers of the encoder and decoder."""
        self.shared.fill(canon)
        fill_norm(self.encoder_norm, canon, "e.final")
        fill_norm(self.decoder_norm, canon, "d.final")
        for letter, layers in (("e", self.encoder), ("d", self.decoder)):
            for i, layer in enumerate(layers):
                head = f"{letter}{i}."
                own = {k.removeprefix(head): v for k, v in canon.items() if k.startswith(head)}
                held: Any = layer
                fill_norm(held["ln_self"], own, "n1")
                fill_norm(held["ln_ff"], own, "n2")
                held["self_attn"].fill(own)
                held["ff"].fill(own)
                if "cross" in held:
                    fill_norm(held["ln_cross"], own, "n3")
                    held["cross"].fill({k[1:]: v for k, v in own.items() if k.startswith("x")})
        return self

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        way, time = self.style.add, self.style.time
        x, y = self.shared(input_ids), self.shared(decoder_input_ids)
        if time:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        for layer in self.encoder:
            held: Any = layer
            x = joined(x, held["self_attn"](held["ln_self"](x)), way)
            x = joined(x, held["ff"](held["ln_ff"](x)), way)
        memory = self.encoder_norm(x)
        for layer in self.decoder:
            held = layer
            y = joined(y, held["self_attn"](held["ln_self"](y)), way)
            y = joined(y, held["cross"](held["ln_cross"](y), memory), way)
            y = joined(y, held["ff"](held["ln_ff"](y)), way)
        y = self.decoder_norm(y)
        y = y.transpose(0, 1) if time else y
        return F.linear(y, self.shared.table())
