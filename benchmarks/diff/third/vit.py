"""ViT in the styles of timm and vit-pytorch."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, renamed
from benchmarks.diff.third.encoders import initialised, styled

W, L, H, HIDDEN = 48, 2, 4, 128
IMAGE, PATCH, CLASSES = 16, 4, 7
D = W // H


class TimmAttention(nn.Module):
    """Attention of timm."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.scale = D**-0.5
        self.qkv = nn.Linear(W, W * 3, bias=slip != "no bias of qkv")
        self.proj = nn.Linear(W, W)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        q = q * self.scale
        attn = self.attn_drop((q @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(b, n, c)))


class TimmBlock(nn.Module):
    """Block of timm, with LayerScale and DropPath as identities."""

    def __init__(self, norm: partial[nn.LayerNorm], slip: str) -> None:
        super().__init__()
        self.norm1, self.attn = norm(W), TimmAttention(slip)
        self.ls1, self.drop_path1 = nn.Identity(), nn.Identity()
        self.norm2 = norm(W)
        self.mlp = nn.Sequential()
        for name, layer in {
            "fc1": nn.Linear(W, HIDDEN),
            "act": nn.GELU(),
            "drop1": nn.Dropout(0.0),
            "norm": nn.Identity(),
            "fc2": nn.Linear(HIDDEN, W),
        }.items():
            self.mlp.add_module(name, layer)
        self.ls2, self.drop_path2 = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class Timm(nn.Module):
    """ViT in the style of timm."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=1e-5 if slip == "eps of torch" else 1e-12)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, W, kernel_size=PATCH, stride=PATCH)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, W))
        self.pos_embed = nn.Parameter(torch.zeros(1, (IMAGE // PATCH) ** 2 + 1, W))
        self.blocks = nn.Sequential(*[TimmBlock(norm, slip) for _ in range(L)])
        self.norm = norm(W)
        self.head = nn.Linear(W, CLASSES)
        self.slip = slip
        initialised(self)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.norm(self.blocks(x + self.pos_embed))
        return self.head(x[:, 1:].mean(dim=1) if self.slip == "mean of patches" else x[:, 0])


def to_timm(state: State) -> State:
    """The names of timm."""
    outer = {
        "vit.embeddings.position_embeddings": "pos_embed",
        "vit.embeddings.cls_token": "cls_token",
        "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
        "vit.layernorm": "norm",
        "classifier": "head",
    }
    names = {
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "attention.o_proj": "attn.proj",
        "mlp": "mlp",
    }
    made = renamed(state, outer)
    for i, block in enumerate(blocks(state, "vit.layers")):
        made |= renamed(block, names, f"blocks.{i}.")
        for kind in ("weight", "bias"):
            parts = [block[f"attention.{x}_proj.{kind}"] for x in "qkv"]
            made[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
    return made


class PreNorm(nn.Module):
    """LayerNorm before a function."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(W, eps=1e-12), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class PatchAttention(nn.Module):
    """Attention of vit-pytorch with a fused projection with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = H, D**-0.5
        self.to_qkv, self.to_out = nn.Linear(W, 3 * W), nn.Sequential(nn.Linear(W, W), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (H, D)).movedim(-2, 1) for each in self.to_qkv(x).chunk(3, dim=-1))
        attn = (torch.einsum("bhid,bhjd->bhij", q, k) * self.scale).softmax(dim=-1)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", attn, v).movedim(1, -2).flatten(-2))


class PatchViT(nn.Module):
    """ViT in the style of vit-pytorch: patches by unfold and a Linear, pairs of pre-norm branches."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.to_patch_embedding = nn.Linear(3 * PATCH**2, W)
        self.pos_embedding = nn.Parameter(torch.zeros(1, (IMAGE // PATCH) ** 2 + 1, W))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, W))
        self.layers = nn.ModuleList([])
        for _ in range(L):
            feed = nn.Sequential(nn.Linear(W, HIDDEN), nn.GELU(), nn.Dropout(0.0), nn.Linear(HIDDEN, W))
            self.layers.append(nn.ModuleList([PreNorm(PatchAttention()), PreNorm(feed)]))
        self.mlp_head = nn.Sequential(nn.LayerNorm(W, eps=1e-12), nn.Linear(W, CLASSES))
        self.slip = slip
        initialised(self)

    def forward(self, img: Tensor) -> Tensor:
        x = self.to_patch_embedding(F.unfold(img, PATCH, stride=PATCH).transpose(1, 2))
        x = torch.cat((self.cls_token.repeat(len(x), 1, 1), x), dim=1)
        x += self.pos_embedding[:, : x.shape[1]]
        for layer in self.layers:
            for branch in layer:  # type: ignore[attr-defined]
                x = branch(x) + x
        return self.mlp_head(x[:, -1] if self.slip == "last patch" else x[:, 0])


def to_patches(state: State) -> State:
    """The convolution as a matrix, the rest renamed."""
    outer = {
        "vit.embeddings.position_embeddings": "pos_embedding",
        "vit.embeddings.cls_token": "cls_token",
        "vit.embeddings.patch_embeddings.projection.bias": "to_patch_embedding.bias",
        "vit.layernorm": "mlp_head.0",
        "classifier": "mlp_head.1",
    }
    names = {
        "layernorm_before": "0.norm",
        "attention.o_proj": "0.fn.to_out.0",
        "layernorm_after": "1.norm",
        "mlp.fc1": "1.fn.0",
        "mlp.fc2": "1.fn.3",
    }
    made = renamed(state, outer)
    made["to_patch_embedding.weight"] = state["vit.embeddings.patch_embeddings.projection.weight"].flatten(1)
    for i, block in enumerate(blocks(state, "vit.layers")):
        made |= renamed(block, names, f"layers.{i}.")
        for kind in ("weight", "bias"):
            parts = [block[f"attention.{x}_proj.{kind}"] for x in "qkv"]
            made[f"layers.{i}.0.fn.to_qkv.{kind}"] = torch.cat(parts)
    return made


VIT = {
    "timm": Style(
        Timm,
        to_timm,
        *styled("blocks.{}", "attn norm1", "mlp norm2", "patch_embed cls_token pos_embed", "norm head"),
    ),
    "vit-pytorch": Style(
        PatchViT,
        to_patches,
        *styled("layers.{}", "0", "1", "to_patch_embedding cls_token pos_embedding", "mlp_head"),
    ),
}
