"""Re-implementations as people write them: nanoGPT, Meta's LLaMA, timm's ViT, and own BERT, Gemma 2 and T5.

Two blocks of width 32 with 4 heads. Each has another way to hold its weights than Hugging Face: fused,
transposed, packed, shared, under other names.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, BLOCKS, VOCABULARY, CONTEXT = 32, 4, 2, 256, 64
HEAD = WIDTH // HEADS


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    """(B, T, H·K) → (B, H, T, K)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """(B, H, T, K) → (B, T, H·K)."""
    return x.transpose(1, 2).flatten(2)


# nanoGPT


class NanoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = map(heads, self.c_attn(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        return self.c_proj(merged(F.softmax(scores, dim=-1) @ v))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), NanoAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT's model.py: `forward(idx, targets=None)` → (logits, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(NanoBlock() for _ in range(BLOCKS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt() -> nn.Module:
    return NanoGPT()


# Meta's LLaMA: rotary positions by complex numbers, of interleaved pairs


class RMSNorm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate (B, T, H, K) by (T, K/2) complex numbers of length one."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[None, :, None, :]).flatten(3).type_as(x)


class MetaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (w(normed).unflatten(-1, (-1, HEAD)) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, angles), turned(k, angles)
        k, v = (each.repeat_interleave(2, dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(HEAD) + mask
        x = x + self.wo(merged(F.softmax(scores.float(), dim=-1).type_as(q) @ v))
        normed = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Meta(nn.Module):
    """Meta's LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MetaBlock() for _ in range(BLOCKS))
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, HEAD, 2).float() / HEAD))
        angles = torch.outer(torch.arange(CONTEXT), frequencies).float()
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.tok_embeddings(tokens), tokens.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1).type_as(x)
        for layer in self.layers:
            x = layer(x, self.freqs_cis[:length], mask)
        return self.output(self.norm(x)).float()


def meta() -> nn.Module:
    return Meta()


# BERT with torch's packed attention


class BertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        mixed = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        x = self.norm_1(x + mixed)
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """BERT with its masked head; `padding_mask` is true at padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.types = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 512, WIDTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(BertBlock() for _ in range(BLOCKS))
        self.dense, self.head_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(
        self, ids: Tensor, padding_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids
        x = self.norm(self.tokens(ids) + self.positions[:, : ids.shape[1]] + self.types(types))
        for layer in self.layers:
            x = layer(x, padding_mask)
        return self.head_norm(F.gelu(self.dense(x))) @ self.tokens.weight.T + self.bias


def bert() -> object:
    return Bert(), torch.randint(0, VOCABULARY, (2, 16))


def bert_padded() -> object:
    padding = torch.zeros(2, 16, dtype=torch.bool)
    padding[1, 10:] = True
    return Bert(), {"ids": torch.randint(0, VOCABULARY, (2, 16)), "padding_mask": padding}


def hf_bert_padded() -> object:
    from transformers import BertConfig, BertForMaskedLM

    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    config = BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        vocab_size=VOCABULARY,
    )
    batch = {"input_ids": torch.randint(0, VOCABULARY, (2, 16)), "attention_mask": mask}
    return BertForMaskedLM(config), batch


# Gemma 2 with plain gains, one matrix for q, k, v and one for gate and up


class GemmaNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class GemmaBlock(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.qkv, self.out = nn.Linear(WIDTH, 8 * HEAD, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(GemmaNorm() for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(self.norms[0](x)).split([4 * HEAD, 2 * HEAD, 2 * HEAD], dim=-1)
        q, k, v = heads(q), heads(k, 2), heads(v, 2)
        q, k = (
            each * cos + torch.cat([-each.chunk(2, -1)[1], each.chunk(2, -1)[0]], -1) * sin for each in (q, k)
        )
        scores = (q * HEAD**-0.5).unflatten(1, (2, 2)) @ k[:, :, None].mT
        scores = 50 * torch.tanh(scores / 50)
        i = torch.arange(length)
        seen = i[:, None] >= i
        if self.window is not None:
            seen = seen & (i[:, None] - i < self.window)
        shares = scores.masked_fill(~seen, -2.38e38).softmax(-1)
        x = x + self.norms[1](self.out(merged((shares @ v[:, :, None]).flatten(1, 2))))
        gate, up = self.gate_up(self.norms[2](x)).chunk(2, -1)
        return x + self.norms[3](self.down(F.gelu(gate, approximate="tanh") * up))


class Gemma(nn.Module):
    """Gemma 2: every second layer has a window of 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(GemmaBlock(8 if i % 2 == 0 else None) for i in range(BLOCKS))
        self.norm = GemmaNorm()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * math.sqrt(WIDTH)
        frequencies = 1 / 10000 ** (torch.arange(0, HEAD, 2).float() / HEAD)
        angles = torch.outer(torch.arange(input_ids.shape[1]).float(), frequencies).repeat(1, 2)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return 30 * torch.tanh(self.norm(x) @ self.embed.weight.T / 30)


def gemma() -> nn.Module:
    return Gemma()


def hf_gemma() -> nn.Module:
    """With eager attention: transformers' SDPA leaves out the soft cap."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD,
        intermediate_size=2 * WIDTH,
        vocab_size=VOCABULARY,
        query_pre_attn_scalar=HEAD,
        sliding_window=8,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


# T5 with one matrix for keys and values


def buckets(distance: Tensor, both_ways: bool, count: int = 32, furthest: int = 128) -> Tensor:
    """T5's bucket of each distance between key and query."""
    found = torch.zeros_like(distance)
    if both_ways:
        count //= 2
        found, distance = found + (distance > 0).long() * count, distance.abs()
    else:
        distance = -torch.minimum(distance, torch.zeros_like(distance))
    half = count // 2
    far = half + (torch.log(distance.float() / half) / math.log(furthest / half) * (count - half)).long()
    return found + torch.where(distance < half, distance, far.clamp(max=count - 1))


class T5Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        k, v = map(heads, self.kv(memory).chunk(2, -1))
        scores = heads(self.q(x)) @ k.mT
        return self.o(merged((scores if bias is None else scores + bias).softmax(-1) @ v))


class T5Block(nn.Module):
    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.norm_1, self.attention = RMSNorm(), T5Attention()
        if is_decoder:
            self.norm_2, self.cross = RMSNorm(), T5Attention()
        self.norm_3 = RMSNorm()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norm_1(x)
        x = x + self.attention(normed, normed, bias)
        if memory is not None:
            x = x + self.cross(self.norm_2(x), memory, None)
        return x + self.down(F.relu(self.up(self.norm_3(x))))


class T5(nn.Module):
    """T5 with a tied, scaled head; `forward(src, tgt)`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(T5Block(False) for _ in range(BLOCKS))
        self.decoder = nn.ModuleList(T5Block(True) for _ in range(BLOCKS))
        self.encoder_bias, self.decoder_bias = nn.Embedding(32, HEADS), nn.Embedding(32, HEADS)
        self.encoder_norm, self.decoder_norm = RMSNorm(), RMSNorm()

    def bias(self, length: int, table: nn.Embedding, both_ways: bool) -> Tensor:
        i = torch.arange(length)
        bias = table(buckets(i - i[:, None], both_ways)).permute(2, 0, 1)[None]
        if both_ways:
            return bias
        return bias + torch.full((length, length), torch.finfo(bias.dtype).min).triu(1)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        x, bias = self.tokens(src), self.bias(src.shape[1], self.encoder_bias, True)
        for block in self.encoder:
            x = block(x, bias)
        memory = self.encoder_norm(x)
        y, bias = self.tokens(tgt), self.bias(tgt.shape[1], self.decoder_bias, False)
        for block in self.decoder:
            y = block(y, bias, memory)
        return (self.decoder_norm(y) * WIDTH**-0.5) @ self.tokens.weight.T


def t5() -> object:
    return T5(), (torch.randint(1, VOCABULARY, (2, 16)), torch.randint(1, VOCABULARY, (2, 12)))


# timm's ViT


class ViTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(merged(F.scaled_dot_product_attention(q, k, v)))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """timm's VisionTransformer for 32 × 32 pixels and patches of 8 × 8."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, WIDTH))
        self.blocks = nn.Sequential(*(ViTBlock() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-12), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit() -> object:
    return ViT(), torch.randn(2, 3, 32, 32)


# x-transformers: positions scaled by 1/√d, no ε in the norm, gains of 1 + γ


class XNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * WIDTH**0.5 * (self.g + 1)


class XBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(XNorm() for _ in range(2))
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.proj, self.out = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (heads(each(normed)) for each in (self.to_q, self.to_k, self.to_v))
        x = x + self.to_out(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        plain, gate = self.proj(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.out(plain * F.silu(gate))


class XTransformer(nn.Module):
    """x-transformers' TransformerWrapper with a Decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(XBlock() for _ in range(BLOCKS))
        self.norm, self.to_logits = XNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1])) * WIDTH**-0.5
        for layer in self.layers:
            y = layer(y)
        return self.to_logits(self.norm(y))


def x_transformer() -> nn.Module:
    return XTransformer()
