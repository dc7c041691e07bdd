"""LLaMA in the styles of gpt-fast, course assignments, x-transformers, and closures over lists."""

from collections.abc import Callable

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, in_layer, neighbours, renamed
from benchmarks.diff.third.llama import EPS, HIDDEN, KV, META, OUTER, D, H, L, T, V, W


def rotated_pairs(x: Tensor, table: Tensor) -> Tensor:
    """Neighbours rotated with real numbers."""
    xs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = table.view(1, xs.size(1), 1, xs.size(3), 2)
    out = torch.stack(
        [
            xs[..., 0] * table[..., 0] - xs[..., 1] * table[..., 1],
            xs[..., 1] * table[..., 0] + xs[..., 0] * table[..., 1],
        ],
        -1,
    )
    return out.flatten(3).type_as(x)


class FastLayer(nn.Module):
    """Block of gpt-fast: wqkv, SDPA with a mask and grouped keys, gate and up in one matrix."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.wqkv = nn.Linear(W, (H + 2 * KV) * D, bias=False)
        self.wo = nn.Linear(W, W, bias=False)
        self.w13, self.w2 = nn.Linear(W, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, W, bias=False)
        self.attention_norm = nn.RMSNorm(W, EPS)
        self.ffn_norm = nn.RMSNorm(W, EPS)
        self.slip = slip

    def attend(self, x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.wqkv(x).split([W, KV * D, KV * D], dim=-1)
        q, k, v = q.view(b, s, H, D), k.view(b, s, KV, D), v.view(b, s, KV, D)
        q, k = rotated_pairs(q, table), rotated_pairs(k, table)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, s, W))

    def forward(self, x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attend(self.attention_norm(x), table, mask)
        gate, up = self.w13(self.ffn_norm(h)).chunk(2, dim=-1)
        if self.slip == "halves of w13":
            gate, up = up, gate
        return h + self.w2(F.silu(gate) * up)


class Fast(nn.Module):
    """LLaMA in the style of gpt-fast."""

    table: Tensor
    causal_mask: Tensor

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(V, W)
        self.layers = nn.ModuleList(FastLayer(slip) for _ in range(L))
        self.norm = nn.RMSNorm(W, eps=EPS)
        self.output = nn.Linear(W, V, bias=False)
        freqs = 1.0 / (10000 ** (torch.arange(0, D, 2)[: D // 2].float() / D))
        angles = torch.outer(torch.arange(T).float(), freqs)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)
        mask = torch.tril(torch.ones(T, T, dtype=torch.bool))
        if slip == "window":
            mask = mask & ~torch.tril(torch.ones(T, T, dtype=torch.bool), -8)
        self.register_buffer("causal_mask", mask, persistent=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        if slip == "wo starts at zero":
            for layer in self.layers:
                nn.init.zeros_(layer.wo.weight)  # type: ignore[union-attr, arg-type]

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        input_pos = torch.arange(idx.shape[1]) if input_pos is None else input_pos
        mask = self.causal_mask[None, None, input_pos, : idx.shape[1]]
        table = self.table[input_pos]
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, table, mask)
        return self.output(self.norm(x))


def to_fast(state: State) -> State:
    """Fused projections; queries and keys in the order of neighbours."""
    made = renamed(state, OUTER)
    names = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "wo",
        "mlp.down_proj": "w2",
    }
    for i, block in enumerate(blocks(state, "model.layers")):
        made |= renamed(block, names, f"layers.{i}.")
        q, k, v = (block[f"self_attn.{name}_proj.weight"] for name in "qkv")
        made[f"layers.{i}.wqkv.weight"] = torch.cat((neighbours(q, H), neighbours(k, KV), v))
        gate, up = block["mlp.gate_proj.weight"], block["mlp.up_proj.weight"]
        made[f"layers.{i}.w13.weight"] = torch.cat((gate, up))
    return made


class Linear(nn.Module):
    """Linear of the course: a matrix (out, in) and an einsum."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """Table of the course."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]


class CourseNorm(nn.Module):
    """RMSNorm by its definition, with a sum of squares by einsum."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(W))
        self.slip = slip

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        if self.slip == "layer norm":
            x = x - x.mean(-1, keepdim=True)
        rms = torch.sqrt(einsum("...d,...d->...", x, x) / W + EPS)
        return (x / rms.unsqueeze(-1) * self.weight).to(kind)


def softmax(x: Tensor, dim: int) -> Tensor:
    """Softmax with the maximum taken off."""
    shifted = torch.exp(x - x.max(dim=dim, keepdim=True).values)
    return shifted / shifted.sum(dim=dim, keepdim=True)


class CourseAttention(nn.Module):
    """Attention of the course, rotated by one matrix for each position."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.q_proj, self.output_proj = Linear(W, H * D), Linear(H * D, W)
        self.k_proj, self.v_proj = Linear(W, KV * D), Linear(W, KV * D)
        self.slip = slip

    def rotations(self, n: int) -> Tensor:
        """Matrices [n, D, D]."""
        half = D // 2
        base = 1000.0 if self.slip == "base of 1000" else 10000.0
        angles = torch.arange(n)[:, None] * base ** (-torch.arange(half) / half)
        cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
        return torch.cat((torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)), -2)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-2]
        q = self.q_proj(x).unflatten(-1, (KV, H // KV, D))
        k, v = (proj(x).unflatten(-1, (KV, D)) for proj in (self.k_proj, self.v_proj))
        turn = self.rotations(n)
        q, k = einsum("tij,btghj->btghi", turn, q), einsum("tij,btgj->btgi", turn, k)
        scores = einsum("bqghd,bkgd->bghqk", q, k) / D**0.5
        rows, columns = torch.arange(n)[:, None], torch.arange(n)[None]
        seen = columns < rows if self.slip == "own key hidden" else columns <= rows
        if self.slip == "own key hidden":
            seen = seen | (columns == 0)
        weights = softmax(scores.masked_fill(~seen, float("-inf")), -1)
        return self.output_proj(einsum("bghqk,bkgd->bqghd", weights, v).flatten(-3))


class SwiGLU(nn.Module):
    """SwiGLU of the course, SiLU spelled out."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(W, HIDDEN), Linear(HIDDEN, W), Linear(W, HIDDEN)
        self.slip = slip

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        gate = gate * torch.sigmoid(gate)
        if self.slip == "gate without its factor":
            gate = torch.sigmoid(self.w1(x))
        return self.w2(gate * self.w3(x))


class CourseBlock(nn.Module):
    """Pre-norm block of the course; residuals are added in place."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.ln1, self.attn = CourseNorm(slip), CourseAttention(slip)
        self.ln2, self.ffn = CourseNorm(slip), SwiGLU(slip)
        self.slip = slip

    def forward(self, x: Tensor) -> Tensor:
        if self.slip == "norm behind the branch":
            x = x + self.ln1(self.attn(x))
            return x + self.ln2(self.ffn(x))
        y = self.attn(self.ln1(x))
        y += x
        z = self.ffn(self.ln2(y))
        z += y
        return z


class Course(nn.Module):
    """LLaMA in the style of a course assignment that writes each layer itself."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.token_embeddings = Embedding(V, W)
        self.layers = nn.Sequential(*[CourseBlock(in_layer(slip, i)) for i in range(L)])
        self.ln_final, self.lm_head = CourseNorm(slip), Linear(W, V)

    def forward(self, in_indices: Tensor) -> Tensor:
        return self.lm_head(self.ln_final(self.layers(self.token_embeddings(in_indices))))


COURSE = META | {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "self_attn.o_proj": "attn.output_proj",
    "self_attn": "attn",
    "mlp.gate_proj": "ffn.w1",
    "mlp.up_proj": "ffn.w3",
    "mlp.down_proj": "ffn.w2",
}


def to_course(state: State) -> State:
    """New names alone."""
    outer = {"model.embed_tokens": "token_embeddings", "model.norm": "ln_final", "lm_head": "lm_head"}
    names = {k: v for k, v in COURSE.items() if not v.startswith("attention.")}
    made = renamed(state, outer)
    for i, block in enumerate(blocks(state, "model.layers")):
        made |= renamed(block, names, f"layers.{i}.")
    return made


class Closures(nn.Module):
    """LLaMA whose layers are closures over parameters in plain lists; heads are batches of bmm."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.slip = slip
        shapes = {"q": (W, W), "kv": (W, 2 * KV * D), "o": (W, W), "gate": (W, HIDDEN), "up": (W, HIDDEN)}
        shapes["down"] = (HIDDEN, W)
        self.table = nn.Parameter(torch.randn(V, W) * 0.02)
        self.head = nn.Parameter(torch.randn(W, V) * 0.02)
        self.gains = nn.ParameterList([torch.ones(W) for _ in range(2 * L + 1)])
        self.weights = nn.ModuleList(
            nn.ParameterDict({name: torch.randn(shape) * 0.02 for name, shape in shapes.items()})
            for _ in range(L)
        )

    def normed(self, x: Tensor, number: int) -> Tensor:
        return F.rms_norm(x, (W,), eps=EPS) * self.gains[number]

    def branches(self, i: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        p = self.weights[i]

        def attend(x: Tensor) -> Tensor:
            b, n, _ = x.shape
            q = (x @ p["q"]).view(b, n, KV, H // KV, D)  # type: ignore[index]
            k, v = (x @ p["kv"]).view(b, n, 2, KV, D).unbind(2)  # type: ignore[index]
            q, k = (turned(each.view(b, n, -1, D)) for each in (q, k))
            q = q.view(b, n, KV, H // KV, D).permute(0, 2, 3, 1, 4).reshape(b * KV, -1, D)
            k, v = (each.transpose(1, 2).reshape(b * KV, n, D) for each in (k, v))
            scores = torch.bmm(q, k.mT).div(D**0.5).view(b * KV, H // KV, n, n)
            scores = scores + torch.full((n, n), float("-inf")).triu(1)
            out = torch.bmm(scores.softmax(-1).view(b * KV, -1, n), v)
            return out.view(b, H, n, D).transpose(1, 2).reshape(b, n, W) @ p["o"]  # type: ignore[index]

        def feed(x: Tensor) -> Tensor:
            gate = x @ p["gate"]  # type: ignore[index]
            return (gate / (1 + torch.exp(-gate)) * (x @ p["up"])) @ p["down"]  # type: ignore[index]

        return attend, feed

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table)
        for i in range(L):
            attend, feed = self.branches(i)
            x = x + attend(self.normed(x, 2 * i))
            x = x + feed(self.normed(x, 2 * i + 1))
        return self.normed(x, 2 * L) @ self.head


def turned(x: Tensor) -> Tensor:
    """Rotated halves, each half apart."""
    one, two = x.chunk(2, -1)
    freqs = torch.exp(-torch.arange(D // 2) * (2 / D) * torch.log(torch.tensor(10000.0)))
    angles = (torch.arange(x.shape[1])[:, None] * freqs)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def to_closures(state: State) -> State:
    """Transposed matrices, keys and values together."""
    made = {
        "table": state["model.embed_tokens.weight"],
        "head": state["lm_head.weight"].t(),
        f"gains.{2 * L}": state["model.norm.weight"],
    }
    for i, block in enumerate(blocks(state, "model.layers")):
        made[f"gains.{2 * i}"] = block["input_layernorm.weight"]
        made[f"gains.{2 * i + 1}"] = block["post_attention_layernorm.weight"]
        q, k, v, o = (block[f"self_attn.{name}_proj.weight"] for name in "qkvo")
        made[f"weights.{i}.q"], made[f"weights.{i}.o"] = q.t(), o.t()
        made[f"weights.{i}.kv"] = torch.cat((k, v)).t()
        for name in ("gate", "up", "down"):
            made[f"weights.{i}.{name}"] = block[f"mlp.{name}_proj.weight"].t()
    return made


STYLES = {
    "gpt-fast": Style(
        Fast,
        to_fast,
        ("layers.{}",),
        ("layers.{}.wqkv", "layers.{}.wo", "layers.{}.attention_norm"),
        ("layers.{}.w13", "layers.{}.w2", "layers.{}.ffn_norm"),
        ("tok_embeddings",),
        ("norm", "output"),
    ),
    "course": Style(
        Course,
        to_course,
        ("layers.{}",),
        ("layers.{}.attn", "layers.{}.ln1"),
        ("layers.{}.ffn", "layers.{}.ln2"),
        ("token_embeddings",),
        ("ln_final", "lm_head"),
    ),
    "closures": Style(
        Closures,
        to_closures,
        ("weights.{}",),
        ("weights.{}",),
        ("weights.{}",),
        ("table",),
        ("head", "gains"),
    ),
}
