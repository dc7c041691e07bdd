"""GPT-2 and BLOOM in the styles of nanoGPT, Megatron (time first) and a Flax port with stacked layers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.diff.fourth.base import VOCABULARY, State, by_head, gelu_tanh, renamed

HEADS, WIDTH, LAYERS, LENGTH = 4, 32, 2, 40


def gpt2(**changes: Any) -> nn.Module:
    """The published GPT-2."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    rest = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model("gpt2", **none, **sizes, **rest, **changes)
    return AutoModelForCausalLM.from_config(config)


@dataclass
class GPTConfig:
    """Configuration of the model in nanoGPT's style; the second half holds mistakes."""

    block_size: int = LENGTH
    vocab_size: int = VOCABULARY
    n_layer: int = LAYERS
    n_head: int = HEADS
    n_embd: int = WIDTH
    dropout: float = 0.0
    bias: bool = True
    eps: float = 1e-5
    approximate: str = "tanh"
    is_tied: bool = True
    is_scaled: bool = True
    is_final: bool = True
    is_normed_residual: bool = False
    start: int = 0
    left_on: float = 0.0
    order: str = "qkv"


class CausalSelfAttention(nn.Module):
    """Attention by PyTorch's kernel."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.config = config.n_head, config.n_embd, config

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        parts = dict(zip(self.config.order, self.c_attn(x).split(self.n_embd, dim=2), strict=True))
        k = parts["k"].view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = parts["q"].view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = parts["v"].view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.config.left_on, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Feed-forward."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate=config.approximate)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.eps, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.eps, bias=config.bias)
        self.mlp = MLP(config)
        self.is_normed_residual = config.is_normed_residual

    def forward(self, x: Tensor) -> Tensor:
        if self.is_normed_residual:
            x = self.ln_1(x)
            x = x + self.attn(x)
        else:
            x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """GPT-2 in nanoGPT's style."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd, eps=config.eps, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.is_tied:
            self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if config.is_scaled and pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor) -> Tensor:
        first = self.config.start
        pos = torch.arange(first, first + idx.shape[1], device=idx.device)
        parts = self.transformer
        x = parts["drop"](parts["wte"](idx) + parts["wpe"](pos))
        for block in parts["h"].children():
            x = block(x)
        if self.config.is_final:
            x = parts["ln_f"](x)
        return self.lm_head(x)


def nano(**options: Any) -> nn.Module:
    """A model in nanoGPT's style."""
    return NanoGPT(GPTConfig(**options))


def linear(state: State) -> State:
    """Weights of PyTorch's linear layers from Conv1D's."""
    inner = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {k: v.t().contiguous() if k.endswith(inner) else v for k, v in state.items()}


class Linear(nn.Linear):
    """Linear layer that returns its bias beside the product."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return F.linear(x, self.weight), self.bias


class ParallelAttention(nn.Module):
    """Attention with time first, scores by `baddbmm` and heads that hold q, k and v together."""

    slopes: Tensor

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.query_key_value = Linear(o["width"], 3 * o["width"])
        self.dense = Linear(o["width"], o["width"])
        self.o = o
        if o["alibi"]:
            self.register_buffer("slopes", slopes(o["heads"], o["slopes"]), persistent=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.o["heads"]
        product, bias = self.query_key_value(hidden)
        mixed = product + bias
        s, b, _ = mixed.shape
        size = mixed.shape[-1] // 3 // heads
        if self.o["order"] == "heads first":
            q, k, v = mixed.view(s, b, heads, 3 * size).split(size, dim=-1)
        else:
            q, k, v = mixed.view(s, b, 3, heads, size).unbind(2)
        q, k, v = (t.reshape(s, b * heads, size).transpose(0, 1) for t in (q, k, v))
        if self.o["alibi"]:
            steps = torch.arange(s, device=hidden.device, dtype=hidden.dtype)
            start = (self.slopes.to(hidden.dtype)[:, None, None] * steps).repeat(b, 1, 1).expand(-1, s, -1)
        else:
            start = torch.zeros(b * heads, s, s, device=hidden.device, dtype=hidden.dtype)
        scores = torch.baddbmm(start, q, k.transpose(1, 2), beta=1.0, alpha=self.o["scale"] / math.sqrt(size))
        above = torch.triu(torch.ones(s, s, dtype=torch.bool, device=hidden.device), self.o["diagonal"])
        probs = torch.softmax(scores.masked_fill(above, torch.finfo(scores.dtype).min), dim=-1)
        context = torch.bmm(probs, v).transpose(0, 1).reshape(s, b, heads * size)
        return self.dense(context)


def slopes(heads: int, how: str) -> Tensor:
    """ALiBi's slopes; "geometric" is the mistake where the number of heads is no power of two."""
    if how == "geometric":
        return torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])
    near = 2 ** math.floor(math.log2(heads))
    shift = 0 if how == "zero" else 1
    first = [2.0 ** (-8 * (h + shift) / near) for h in range(near)]
    more = [2.0 ** (-4 * (2 * h + shift) / near) for h in range(heads - near)]
    return torch.tensor(first + more)


class ParallelMLP(nn.Module):
    """Feed-forward with the bias added by the activation."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.dense_h_to_4h = Linear(o["width"], 4 * o["width"])
        self.dense_4h_to_h = Linear(4 * o["width"], o["width"])
        self.constant, self.kind = o["constant"], o["act"]

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        product, bias = self.dense_h_to_4h(hidden)
        x = product + bias
        return self.dense_4h_to_h(F.gelu(x) if self.kind == "erf" else gelu_tanh(x, self.constant))


class ParallelTransformerLayer(nn.Module):
    """Layer that adds bias and residual together."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(o["width"], eps=o["eps"])
        self.self_attention = ParallelAttention(o)
        self.post_attention_layernorm = nn.LayerNorm(o["width"], eps=o["eps"])
        self.mlp = ParallelMLP(o)
        self.post_residual = o["post_residual"]

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden)
        output, bias = self.self_attention(normed)
        hidden = output + bias.expand_as(output) + (normed if self.post_residual else hidden)
        normed = self.post_attention_layernorm(hidden)
        output, bias = self.mlp(normed)
        return output + bias.expand_as(output) + (normed if self.post_residual else hidden)


class Megatron(nn.Module):
    """GPT-2 or BLOOM in Megatron's style."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, o["width"])
        if o["alibi"]:
            self.embedding_norm = nn.LayerNorm(o["width"], eps=o["eps"]) if o["embedding_norm"] else None
        else:
            self.position_embeddings = nn.Embedding(LENGTH, o["width"])
        self.layers = nn.ModuleList([ParallelTransformerLayer(o) for _ in range(LAYERS)])
        self.final_layernorm = nn.LayerNorm(o["width"], eps=o["eps"])
        self.o = o

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens)
        if not self.o["alibi"]:
            x = x + self.position_embeddings(torch.arange(tokens.shape[1], device=tokens.device))[None]
        elif self.embedding_norm is not None:
            x = self.embedding_norm(x)
        hidden = x.transpose(0, 1).contiguous()
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.final_layernorm(hidden)
        return F.linear(hidden, self.word_embeddings.weight).transpose(0, 1).contiguous()


BASE: dict[str, Any] = (
    {"width": WIDTH, "heads": HEADS, "eps": 1e-5, "scale": 1.0, "diagonal": 1, "act": "tanh"}
    | {"order": "heads first", "alibi": False, "constant": math.sqrt(2 / math.pi)}
    | {"slopes": "paper", "embedding_norm": True, "post_residual": False}
)


def megatron(**options: Any) -> nn.Module:
    """GPT-2 in Megatron's style."""
    return Megatron({**BASE, **options})


def to_megatron(state: State) -> State:
    """Megatron's weights of GPT-2."""
    made = renamed(
        linear(state),
        (r"^transformer\.wte", "word_embeddings"),
        (r"^transformer\.wpe", "position_embeddings"),
        (r"^transformer\.h\.", "layers."),
        (r"^transformer\.ln_f", "final_layernorm"),
        ("ln_1", "input_layernorm"),
        ("ln_2", "post_attention_layernorm"),
        (r"attn\.c_attn", "self_attention.query_key_value"),
        (r"attn\.c_proj", "self_attention.dense"),
        (r"mlp\.c_fc", "mlp.dense_h_to_4h"),
        (r"mlp\.c_proj", "mlp.dense_4h_to_h"),
        drop="lm_head",
    )
    inner = "query_key_value"
    return {k: by_head(list(v.chunk(3)), HEADS) if inner in k else v for k, v in made.items()}


class Stacked(nn.Module):
    """GPT-2 as a Flax port with scanned layers: one parameter of all layers for each weight."""

    def __init__(
        self, length: int = LENGTH, scale: float = 1.0, eps: float = 1e-5, flip: bool = False
    ) -> None:
        super().__init__()
        size, N, E, H = WIDTH // HEADS, LAYERS, WIDTH, HEADS
        shapes = {
            "wte": (VOCABULARY, E),
            "wpe": (length, E),
            "ln1_scale": (N, E),
            "ln1_bias": (N, E),
            "qkv_kernel": (N, E, 3, H, size),
            "qkv_bias": (N, 3, H, size),
            "out_kernel": (N, H, size, E),
            "out_bias": (N, E),
            "ln2_scale": (N, E),
            "ln2_bias": (N, E),
            "up_kernel": (N, E, 4 * E),
            "up_bias": (N, 4 * E),
            "down_kernel": (N, 4 * E, E),
            "down_bias": (N, E),
            "lnf_scale": (E,),
            "lnf_bias": (E,),
        }
        self.params = nn.ParameterDict({k: nn.Parameter(0.02 * torch.randn(v)) for k, v in shapes.items()})
        self.scale, self.eps, self.flip = scale, eps, flip

    def norm(self, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        """Layer norm by hand, with E[x²] − E[x]²."""
        mean = x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True) - mean.square()
        return (x - mean) * (gain * torch.rsqrt(variance + self.eps)) + bias

    def layer(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        """One step of the scan."""
        y = self.norm(x, p["ln1_scale"], p["ln1_bias"])
        q, k, v = (
            torch.einsum("bte,ecnd->cbtnd", y, p["qkv_kernel"]) + p["qkv_bias"][:, None, None]
        ).unbind()
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) * (self.scale / math.sqrt(q.shape[-1]))
        T = x.shape[1]
        mask = torch.arange(T)[:, None] >= torch.arange(T)[None, :]
        scores = torch.where(mask, scores, torch.full_like(scores, -1e10))
        weights = torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))
        y = torch.einsum("bnqk,bknd->bqnd", weights, v)
        if self.flip:
            y = y.flip(2)
        x = x + torch.einsum("bqnd,nde->bqe", y, p["out_kernel"]) + p["out_bias"]
        y = torch.einsum("bte,ef->btf", self.norm(x, p["ln2_scale"], p["ln2_bias"]), p["up_kernel"])
        y = gelu_tanh(y + p["up_bias"])
        return x + torch.einsum("btf,fe->bte", y, p["down_kernel"]) + p["down_bias"]

    def forward(self, tokens: Tensor) -> Tensor:
        p = dict(self.params.items())
        x = p["wte"][tokens] + p["wpe"][: tokens.shape[1]]
        outside = ("wte", "wpe", "lnf_scale", "lnf_bias")
        for layer in range(LAYERS):
            x = self.layer(x, {k: v[layer] for k, v in p.items() if k not in outside})
        x = self.norm(x, p["lnf_scale"], p["lnf_bias"])
        return torch.einsum("bte,ve->btv", x, p["wte"])


def to_stacked(state: State) -> State:
    """Flax's weights of GPT-2."""
    size, E = WIDTH // HEADS, WIDTH

    def stack(name: str, *shape: int) -> Tensor:
        return torch.stack([state[f"transformer.h.{n}.{name}"].reshape(shape) for n in range(LAYERS)])

    made = {
        "wte": state["transformer.wte.weight"],
        "wpe": state["transformer.wpe.weight"],
        "ln1_scale": stack("ln_1.weight", E),
        "ln1_bias": stack("ln_1.bias", E),
        "qkv_kernel": stack("attn.c_attn.weight", E, 3, HEADS, size),
        "qkv_bias": stack("attn.c_attn.bias", 3, HEADS, size),
        "out_kernel": stack("attn.c_proj.weight", HEADS, size, E),
        "out_bias": stack("attn.c_proj.bias", E),
        "ln2_scale": stack("ln_2.weight", E),
        "ln2_bias": stack("ln_2.bias", E),
        "up_kernel": stack("mlp.c_fc.weight", E, 4 * E),
        "up_bias": stack("mlp.c_fc.bias", 4 * E),
        "down_kernel": stack("mlp.c_proj.weight", 4 * E, E),
        "down_bias": stack("mlp.c_proj.bias", E),
        "lnf_scale": state["transformer.ln_f.weight"],
        "lnf_bias": state["transformer.ln_f.bias"],
    }
    return {f"params.{k}": v for k, v in made.items()}
