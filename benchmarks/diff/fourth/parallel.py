"""Decoders with parallel branches: Command-R in PaLM's style, GPT-J as functions, Phi as one Sequential."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.diff.fourth.base import VOCABULARY, State, gelu_tanh, no_tied, renamed

WIDTH, HEADS, GROUPS, HIDDEN, LAYERS = 32, 4, 2, 72, 2
SIZE = WIDTH // HEADS
ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def cohere(**changes: Any) -> nn.Module:
    """The published Command-R."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 64}
    rest = {"vocab_size": VOCABULARY, **ENDS, **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("cohere", **sizes, **heads, **rest))


def gptj(**changes: Any) -> nn.Module:
    """The published GPT-J."""
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": 4, "n_positions": 64}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "vocab_size": VOCABULARY}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gptj", **sizes, **none, **ENDS, **changes))


def phi(**changes: Any) -> nn.Module:
    """The published Phi."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "max_position_embeddings": 64, "vocab_size": VOCABULARY}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("phi", **sizes, **heads, **ENDS, **changes))


OPTIONS: dict[str, Any] = (
    {"eps": 1e-5, "theta": 500000.0, "logit_scale": 0.0625, "halves": False, "turned": 4, "act": "tanh"}
    | {"head_bias": True, "serial": False, "rms": False, "above": 1, "tiled": False, "qkv_bias": True}
    | {"heads": HEADS, "cut": False, "final": True, "base": 10000.0, "cap": 0.0, "order": "qkv"}
)


def cosines(n: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions × frequencies."""
    turns = base ** -(torch.arange(0, size, 2, device=like.device, dtype=like.dtype) / size)
    angles = torch.outer(torch.arange(n, device=like.device, dtype=like.dtype), turns)
    return angles.cos(), angles.sin()


def rotate_every_two(x: Tensor, base: float) -> Tensor:
    """Rotate neighbours; x is (batch, heads, time, size)."""
    cos, sin = (t.repeat_interleave(2, dim=-1) for t in cosines(x.shape[-2], x.shape[-1], base, x))
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def rotate_halves(x: Tensor, base: float) -> Tensor:
    """Rotate halves."""
    cos, sin = cosines(x.shape[-2], x.shape[-1], base, x)
    a, b = x.tensor_split(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Gain(nn.Module):
    """LayerNorm without a bias."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.eps, self.rms = o["eps"], o["rms"]

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, (WIDTH,), self.gamma, self.eps)
        return F.layer_norm(x, (WIDTH,), self.gamma, None, self.eps)


class ParallelTransformerBlock(nn.Module):
    """Layer of PaLM's style: one projection for attention and feed-forward."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.norm = Gain(o)
        self.fused_dims = (WIDTH, GROUPS * SIZE, GROUPS * SIZE, 2 * HIDDEN)
        self.fused_attn_ff_proj = nn.Linear(WIDTH, sum(self.fused_dims), bias=False)
        self.attn_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ff_out = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.o = o

    def forward(self, x: Tensor) -> Tensor:
        b, n = x.shape[:2]
        x = self.norm(x)
        q, k, v, ff = self.fused_attn_ff_proj(x).split(self.fused_dims, dim=-1)
        q = q.view(b, n, HEADS, SIZE).transpose(1, 2)
        k, v = (t.view(b, n, GROUPS, SIZE).transpose(1, 2) for t in (k, v))
        turn = rotate_halves if self.o["halves"] else rotate_every_two
        q, k = (turn(t, self.o["theta"]) for t in (q, k))
        if self.o["tiled"]:
            k, v = (t.repeat(1, HEADS // GROUPS, 1, 1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        up, gate = ff.chunk(2, dim=-1)
        return self.attn_out(y.transpose(1, 2).flatten(2)) + self.ff_out(F.silu(gate) * up)


class PaLMStyle(nn.Module):
    """Command-R in PaLM's style."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([ParallelTransformerBlock(o) for _ in range(LAYERS)])
        self.norm = Gain(o)
        self.logit_scale = o["logit_scale"]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_emb(tokens)
        for block in self.layers:
            x = block(x) + x
        return self.norm(x) @ self.token_emb.weight.t() * self.logit_scale


def palm(**options: Any) -> nn.Module:
    """Command-R in PaLM's style."""
    return PaLMStyle({**OPTIONS, **options})


def to_palm(state: State) -> State:
    """The weights of PaLM's style: queries, keys, values, up, gate in one."""
    made = renamed(
        no_tied(state),
        (r"^model\.embed_tokens", "token_emb"),
        (r"^model\.norm\.weight", "norm.gamma"),
        (r"^model\.layers", "layers"),
        (r"input_layernorm\.weight", "norm.gamma"),
        (r"self_attn\.o_proj", "attn_out"),
        (r"mlp\.down_proj", "ff_out"),
    )
    for i in range(LAYERS):
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate_proj")
        parts = [made.pop(f"layers.{i}.{name}.weight") for name in names]
        made[f"layers.{i}.fused_attn_ff_proj.weight"] = torch.cat(parts)
    return made


class FunctionalGPTJ(nn.Module):
    """GPT-J as functions over dictionaries of parameters."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.wte = nn.Parameter(0.02 * torch.randn(VOCABULARY, WIDTH))
        shapes = {"scale": (WIDTH,), "offset": (WIDTH,), "wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH)}
        shapes |= {
            "wv": (WIDTH, WIDTH),
            "wo": (WIDTH, WIDTH),
            "w_in": (WIDTH, 4 * WIDTH),
            "b_in": (4 * WIDTH,),
        }
        shapes |= {"w_out": (4 * WIDTH, WIDTH), "b_out": (WIDTH,)}
        self.blocks = nn.ModuleList(
            nn.ParameterDict({k: nn.Parameter(0.02 * torch.randn(v)) for k, v in shapes.items()})
            for _ in range(LAYERS)
        )
        self.scale, self.offset = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.proj_w = nn.Parameter(0.02 * torch.randn(WIDTH, VOCABULARY))
        self.proj_b = nn.Parameter(torch.zeros(VOCABULARY)) if o["head_bias"] else None
        self.o = o

    def norm(self, x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Layer norm by hand."""
        mean = torch.mean(x, dim=-1, keepdim=True)
        variance = torch.var(x, dim=-1, keepdim=True, unbiased=False)
        return scale * torch.rsqrt(variance + self.o["eps"]) * (x - mean) + offset

    def step(self, x: Tensor, p: Any) -> Tensor:
        """One layer."""
        y = self.norm(x, p["scale"], p["offset"])
        mid = x + self.attend(y, p)
        if self.o["serial"]:
            y = self.norm(mid, p["scale"], p["offset"])
        inner = y @ p["w_in"] + p["b_in"]
        inner = gelu_tanh(inner) if self.o["act"] == "tanh" else F.gelu(inner)
        return mid + inner @ p["w_out"] + p["b_out"]

    def attend(self, y: Tensor, p: Any) -> Tensor:
        """Attention with a rotation of the first entries of each head."""
        heads, n = self.o["heads"], self.o["turned"]
        q, k, v = (torch.einsum("btd,de->bte", y, p[name]) for name in ("wq", "wk", "wv"))
        q, k, v = (t.reshape(*t.shape[:2], heads, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        turn = rotate_halves if self.o["halves"] else rotate_every_two
        q, k = (torch.cat([turn(t[..., :n], self.o["base"]), t[..., n:]], -1) for t in (q, k))
        logits = torch.einsum("bhtd,bhTd->bhtT", q, k)
        T = y.shape[1]
        bias = torch.triu(torch.full((T, T), -1e10, dtype=y.dtype, device=y.device), self.o["above"])
        weights = torch.softmax(logits / math.sqrt(q.shape[-1]) + bias, dim=-1)
        return torch.einsum("bhtT,bhTd->bthd", weights, v).flatten(2) @ p["wo"]

    def forward(self, context: Tensor) -> Tensor:
        x = F.embedding(context, self.wte)
        for p in self.blocks:
            x = self.step(x, p)
        y = self.norm(x, self.scale, self.offset) @ self.proj_w
        return y if self.proj_b is None else y + self.proj_b


def functional(**options: Any) -> nn.Module:
    """GPT-J as functions."""
    return FunctionalGPTJ({**OPTIONS, **options})


def to_functional(state: State) -> State:
    """The weights of the functions: matrices on the right."""
    made = renamed(
        state,
        (r"^transformer\.wte\.weight", "wte"),
        (r"^transformer\.ln_f\.weight", "scale"),
        (r"^transformer\.ln_f\.bias", "offset"),
        (r"^lm_head\.weight", "proj_w"),
        (r"^lm_head\.bias", "proj_b"),
        (r"^transformer\.h", "blocks"),
        (r"ln_1\.weight", "scale"),
        (r"ln_1\.bias", "offset"),
        (r"attn\.out_proj\.weight", "wo"),
        (r"attn\.(.)_proj\.weight", r"w\1"),
        (r"mlp\.fc_in\.weight", "w_in"),
        (r"mlp\.fc_in\.bias", "b_in"),
        (r"mlp\.fc_out\.weight", "w_out"),
        (r"mlp\.fc_out\.bias", "b_out"),
    )
    return {k: v.t().contiguous() if v.dim() == 2 and k != "wte" else v for k, v in made.items()}


class Mixer(nn.Module):
    """Attention of Phi's first code."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.Wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=o["qkv_bias"])
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.o = o

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.Wqkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        parts = dict(zip(self.o["order"], qkv, strict=True))
        n = self.o["turned"]
        turn = rotate_halves if self.o["halves"] else rotate_every_two
        q, k = (
            torch.cat([turn(parts[name][..., :n], self.o["base"]), parts[name][..., n:]], -1) for name in "qk"
        )
        y = F.scaled_dot_product_attention(q, k, parts["v"], is_causal=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class PhiMLP(nn.Module):
    """Feed-forward of Phi's first code."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act: nn.Module = nn.GELU(approximate=o["act"])

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class PhiBlock(nn.Module):
    """Layer of Phi's first code."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.ln, self.mixer, self.mlp = nn.LayerNorm(WIDTH, eps=o["eps"]), Mixer(o), PhiMLP(o)
        self.o = o

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        mixed = self.mixer(y.detach() if self.o["cut"] else y)
        if self.o["serial"]:
            x = x + mixed
            return x + self.mlp(self.ln(x))
        return mixed + self.mlp(y) + x


class PhiHead(nn.Module):
    """Last norm and head."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH, eps=o["eps"]) if o["final"] else nn.Identity()
        self.linear = nn.Linear(WIDTH, VOCABULARY, bias=o["head_bias"])
        self.cap = o["cap"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.ln(x))
        return self.cap * torch.tanh(y / self.cap) if self.cap else y


class PhiSequential(nn.Module):
    """Phi as one Sequential from table to head."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        blocks = [PhiBlock(o) for _ in range(LAYERS)]
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, PhiHead(o))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layers(input_ids)


def sequential(**options: Any) -> nn.Module:
    """Phi as one Sequential."""
    return PhiSequential({**OPTIONS, "halves": True, **options})


def to_sequential(state: State) -> State:
    """The weights of the Sequential: layers count from 1."""
    made = renamed(
        state,
        (r"^model\.embed_tokens", "layers.0"),
        (r"^model\.final_layernorm", f"layers.{LAYERS + 1}.ln"),
        (r"^lm_head", f"layers.{LAYERS + 1}.linear"),
        (r"^model\.layers\.1\.", "layers.2."),
        (r"^model\.layers\.0\.", "layers.1."),
        ("input_layernorm", "ln"),
        (r"self_attn\.dense", "mixer.out_proj"),
    )
    for i in range(1, LAYERS + 1):
        for kind in ("weight", "bias"):
            parts = [made.pop(f"layers.{i}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            made[f"layers.{i}.mixer.Wqkv.{kind}"] = torch.cat(parts)
    return made
