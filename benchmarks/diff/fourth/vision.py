"""ViT and DINOv2 in the styles of timm and vit-pytorch, and CLIP's text model in open_clip's."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, CLIPTextConfig, CLIPTextModel

from benchmarks.diff.fourth.base import VOCABULARY, State, fused, renamed

WIDTH, HEADS, HIDDEN, LAYERS, PATCH = 32, 4, 64, 2, 4


def images() -> Tensor:
    """Two images."""
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))


def vit(**changes: Any) -> nn.Module:
    """The published ViT."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    rest = {"num_attention_heads": HEADS, "image_size": 16, "patch_size": PATCH, "num_labels": 10}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return AutoModelForImageClassification.from_config(
        AutoConfig.for_model("vit", **sizes, **rest, **none, **changes)
    )


def dinov2(**changes: Any) -> nn.Module:
    """The published DINOv2."""
    sizes = {"hidden_size": WIDTH, "mlp_ratio": 2, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    rest = {"image_size": 16, "patch_size": PATCH, **changes}
    return AutoModel.from_config(AutoConfig.for_model("dinov2", **sizes, **rest))


def clip(**changes: Any) -> nn.Module:
    """The published text model of CLIP."""
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    rest: dict[str, Any] = {
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 40,
    }
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "projection_dim": WIDTH}
    return CLIPTextModel(CLIPTextConfig(**sizes, **rest, **ends, **changes))


OPTIONS: dict[str, Any] = (
    {"eps": 1e-12, "act": "none", "scaled": True, "pool": "cls", "final": True, "bias": True}
    | {"layer_scale": False, "classes": 10, "positions": True, "last_first": False, "quick": True}
    | {"masked": True, "above": 1, "order": "qkv", "start": "normal"}
)


class PatchEmbed(nn.Module):
    """Patches by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Attention of timm."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=o["bias"])
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.proj_drop = nn.Dropout(0.0)
        self.scale = (WIDTH // HEADS) ** -0.5 if o["scaled"] else 1.0

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(B, N, C)))


class LayerScale(nn.Module):
    """Learnt scale of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    """Feed-forward of timm."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act = nn.GELU(approximate=o["act"])

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class TimmBlock(nn.Module):
    """Layer of timm."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=o["eps"]) for _ in range(2))
        self.attn, self.mlp = Attention(o), Mlp(o)
        self.ls1 = LayerScale() if o["layer_scale"] else nn.Identity()
        self.ls2 = LayerScale() if o["layer_scale"] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class TimmViT(nn.Module):
    """ViT or DINOv2 in timm's style."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        drawn = torch.zeros(1, 17, WIDTH) if o["start"] == "zeros" else 0.02 * torch.randn(1, 17, WIDTH)
        self.pos_embed = nn.Parameter(drawn) if o["positions"] else None
        self.pos_drop = nn.Dropout(p=0.0)
        self.blocks = nn.Sequential(*[TimmBlock(o) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH, eps=o["eps"]) if o["final"] else nn.Identity()
        self.head = nn.Linear(WIDTH, o["classes"]) if o["classes"] else nn.Identity()
        self.o = o

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x if self.pos_embed is None else x + self.pos_embed)
        x = self.norm(self.blocks(x))
        if not self.o["classes"]:
            return x
        return self.head(x[:, 1:].mean(dim=1) if self.o["pool"] == "avg" else x[:, 0])


def timm(**options: Any) -> nn.Module:
    """ViT in timm's style."""
    return TimmViT({**OPTIONS, **options})


def timm_dinov2(**options: Any) -> nn.Module:
    """DINOv2 in timm's style."""
    return TimmViT({**OPTIONS, "eps": 1e-6, "layer_scale": True, "classes": 0, **options})


def to_timm(state: State) -> State:
    """Timm's weights of ViT."""
    made = renamed(
        state,
        (r"^vit\.", ""),
        (r"^embeddings\.cls_token", "cls_token"),
        (r"^embeddings\.position_embeddings", "pos_embed"),
        (r"^embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
        (r"^(encoder\.)?layers?\.", "blocks."),
        (r"^layernorm", "norm"),
        (r"^classifier", "head"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        (r"attention\.o_proj", "attn.proj"),
        (r"layer_scale(.)\.lambda1", r"ls\1.gamma"),
        drop="mask_token",
    )
    fused(made, "blocks.{}.attn.qkv.{}", *(f"blocks.{{}}.attention.{part}_proj.{{}}" for part in "qkv"))
    return made


class PlainAttention(nn.Module):
    """Attention of vit-pytorch, which holds its norm."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=o["eps"])
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.0)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
        self.order = o["order"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        parts = dict(zip(self.order, self.to_qkv(x).chunk(3, dim=-1), strict=True))
        q, k, v = (parts[name].unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
        dots = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        out = torch.matmul(self.dropout(self.attend(dots)), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class PlainViT(nn.Module):
    """ViT in vit-pytorch's style: patches by reshaping, layers as pairs of modules."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.to_patch = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, 17, WIDTH))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layers = nn.ModuleList([])
        for _ in range(LAYERS):
            net = nn.Sequential(
                nn.LayerNorm(WIDTH, eps=o["eps"]),
                nn.Linear(WIDTH, HIDDEN),
                nn.ReLU() if o["act"] == "relu" else nn.GELU(approximate=o["act"]),
                nn.Linear(HIDDEN, WIDTH),
            )
            self.layers.append(nn.ModuleList([PlainAttention(o), net]))
        self.norm = nn.LayerNorm(WIDTH, eps=o["eps"])
        self.mlp_head = nn.Linear(WIDTH, 10)
        self.o = o

    def forward(self, img: Tensor) -> Tensor:
        b = img.shape[0]
        x = img.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # b c h w p1 p2
        x = self.to_patch(x.permute(0, 2, 3, 4, 5, 1).reshape(b, 16, -1))
        x = torch.cat((self.cls_token.repeat(b, 1, 1), x), dim=1)
        x = x + self.pos_embedding[:, : x.shape[1]]
        for pair in self.layers:
            attn, ff = pair.children()
            x = attn(x) + x
            x = ff(x) + x
        if self.o["pool"] == "avg":
            return self.mlp_head(self.norm(x.mean(dim=1)))
        return self.mlp_head(self.norm(x)[:, 0])


def plain(**options: Any) -> nn.Module:
    """ViT in vit-pytorch's style."""
    return PlainViT({**OPTIONS, **options})


def to_plain(state: State) -> State:
    """The weights of vit-pytorch."""
    made = renamed(
        to_timm(state),
        (r"^blocks\.(.)\.norm1", r"layers.\1.0.norm"),
        (r"^blocks\.(.)\.attn\.qkv", r"layers.\1.0.to_qkv"),
        (r"^blocks\.(.)\.attn\.proj", r"layers.\1.0.to_out.0"),
        (r"^blocks\.(.)\.norm2", r"layers.\1.1.0"),
        (r"^blocks\.(.)\.mlp\.fc1", r"layers.\1.1.1"),
        (r"^blocks\.(.)\.mlp\.fc2", r"layers.\1.1.3"),
        (r"^head", "mlp_head"),
        (r"^pos_embed$", "pos_embedding"),
        (r"^patch_embed\.proj", "to_patch"),
    )
    made["to_patch.weight"] = made["to_patch.weight"].permute(0, 2, 3, 1).flatten(1)
    return made


class QuickGELU(nn.Module):
    """The activation of OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ResidualAttentionBlock(nn.Module):
    """Layer of open_clip: PyTorch's attention, time first."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.ln_1, self.ln_2 = (nn.LayerNorm(WIDTH, eps=o["eps"]) for _ in range(2))
        act = QuickGELU() if o["quick"] else nn.GELU()
        layers = [("c_fc", nn.Linear(WIDTH, HIDDEN)), ("gelu", act), ("c_proj", nn.Linear(HIDDEN, WIDTH))]
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.masked = o["masked"]

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        y = self.ln_1(x)
        mask = attn_mask.to(x.dtype) if self.masked else None
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class OpenClipText(nn.Module):
    """CLIP's text model in open_clip's style."""

    attn_mask: Tensor

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(40, WIDTH)) if o["positions"] else None
        self.resblocks = nn.ModuleList([ResidualAttentionBlock(o) for _ in range(LAYERS)])
        self.ln_final = nn.LayerNorm(WIDTH, eps=o["eps"])
        mask = torch.full((40, 40), float("-inf")).triu_(o["above"])
        self.register_buffer("attn_mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token_embedding(text)
        n = text.shape[1]
        if self.positional_embedding is not None:
            x = x + self.positional_embedding[:n]
        x = x.permute(1, 0, 2)
        for block in self.resblocks:
            x = block(x, self.attn_mask[:n, :n])
        return self.ln_final(x.permute(1, 0, 2))


def open_clip(**options: Any) -> nn.Module:
    """CLIP's text model in open_clip's style."""
    return OpenClipText({**OPTIONS, "eps": 1e-5, **options})


def to_open_clip(state: State) -> State:
    """Open_clip's weights of CLIP's text model."""
    made = renamed(
        state,
        (r"^embeddings\.token_embedding", "token_embedding"),
        (r"^embeddings\.position_embedding\.weight", "positional_embedding"),
        (r"^encoder\.layers", "resblocks"),
        (r"^final_layer_norm", "ln_final"),
        (r"self_attn\.out_proj", "attn.out_proj"),
        (r"layer_norm(.)", r"ln_\1"),
        (r"mlp\.fc1", "mlp.c_fc"),
        (r"mlp\.fc2", "mlp.c_proj"),
    )
    name = "resblocks.{}."
    fused(made, name + "attn.in_proj_{}", *(name + f"self_attn.{part}_proj.{{}}" for part in "qkv"))
    return made
