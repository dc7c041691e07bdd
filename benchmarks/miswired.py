"""Training runs that are wired wrongly on purpose, each beside its healthy twin.

The pages of the findings NS7xx (docs/findings) and tests use them. All are byte-level models of width 64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope import Run
from normscope.subjects import Subject, make_subject

WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 64, 4, 256, 4, 64
Loss = Callable[[Any, Any], Tensor]


class Attention(nn.Module):
    """Causal attention; `breaks` may hold "no mask", "no padding mask" or "reshape"."""

    def __init__(self, breaks: str):
        super().__init__()
        self.breaks = breaks
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTC: Tensor, is_real_BT: Tensor | None = None) -> Tensor:
        batch, length, _ = x_BTC.shape
        if self.breaks == "reshape":  # folds samples where heads should be
            qkv = self.qkv(x_BTC).reshape(length, batch, HEADS, -1).permute(1, 2, 0, 3)
        else:
            qkv = self.qkv(x_BTC).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, k, v = qkv.chunk(3, -1)
        shown = torch.ones(length, length, dtype=torch.bool, device=x_BTC.device)
        if self.breaks != "no mask" and is_real_BT is None:
            shown = shown.tril()
        elif is_real_BT is not None and self.breaks != "no padding mask":
            shown = shown & is_real_BT.bool()[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=shown)
        if self.breaks == "reshape":
            return self.out(y.permute(2, 0, 1, 3).reshape(batch, length, WIDTH))
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A Pre-LN block; `breaks` as in `Attention`, or "detach" for the feed-forward branch."""

    def __init__(self, breaks: str):
        super().__init__()
        self.detach = breaks == "detach"
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(breaks)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTC: Tensor, is_real_BT: Tensor | None = None) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC), is_real_BT)
        added = self.mlp(self.norm2(x_BTC))
        return x_BTC + (added.detach() if self.detach else added)


class Model(nn.Module):
    """Six Pre-LN blocks, causal without `attention_mask` and an encoder with it.

    The third block has the break; `skewed` adds a bias whose gradient is 1e7 times its own.
    """

    def __init__(self, breaks: str = "", *, skewed: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(breaks if index == 2 else "") for index in range(6))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.skew = nn.Parameter(torch.zeros(VOCABULARY)) if skewed else None
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC, attention_mask)
        logits_BTV = self.head(self.norm(x_BTC))
        return logits_BTV if self.skew is None else logits_BTV + 1e7 * self.skew


def text() -> Tensor:
    """Bytes of normscope's default text, (B, T)."""
    batch = make_subject(Model(), None, None, seed=0, batch_size=BATCH, seq_len=LENGTH, text=None).batch
    assert isinstance(batch, Tensor)
    return batch


def shifted(shift: int = 1, *, half: bool = False) -> Loss:
    """Mean cross-entropy of the logits at t and the id at t + `shift`, in float32 or in the logits' type."""

    def loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        kept = ids_BT.shape[1] - shift
        rows = logits_BTV[:, :kept].flatten(0, 1)
        return F.cross_entropy(rows if half else rows.float(), ids_BT[:, shift:].flatten())

    return loss


def changed(change: Callable[[Model], Any], breaks: str = "", **options: Any) -> Model:
    """A `Model` after a change of its weights."""
    model = Model(breaks, **options)
    with torch.no_grad():
        change(model)
    return model


def trained(model: nn.Module, loss: Loss | None = None) -> Subject:
    """The subject of a model on the text, by default with next-token loss."""
    return make_subject(model, text(), loss or shifted(), seed=0, batch_size=BATCH, seq_len=LENGTH, text=None)


def stepped(model: Model, optimizer: torch.optim.Optimizer, clip: float | None = None) -> Subject:
    """The same with the user's own optimizer."""
    subject = trained(model)
    subject.run = Run(model=model, batches=subject.batch, optimizer=optimizer, clip=clip)
    return subject


def padded(breaks: str = "", *, in_loss: bool = False) -> Subject:
    """An encoder that predicts hidden bytes; rows are padded on the right to different lengths.

    Padding is not read from the batch's labels: they are the ids before hiding, or -100.
    """
    ids_BT = text() % 250 + 3
    lengths = torch.tensor([64, 48, 32, 16])
    is_real = torch.arange(LENGTH) < lengths[:, None]
    hidden = (torch.arange(LENGTH) % 4 == 0) & (torch.ones_like(is_real) if in_loss else is_real)
    labels = torch.where(is_real, ids_BT, 0).masked_fill(~hidden, -100)
    ids = torch.where(hidden & is_real, 1, torch.where(is_real, ids_BT, 0))
    batch = {"ids_BT": ids, "attention_mask": is_real.long(), "loss inputs": (labels,)}

    def loss(logits_BTV: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits_BTV.flatten(0, 1), batch["loss inputs"][0].flatten(), ignore_index=-100)

    return make_subject(Model(breaks), batch, loss, seed=0, batch_size=BATCH, seq_len=LENGTH, text=None)


def half_trained(model: Model, *, half: bool) -> Subject:
    """A model with bfloat16 weights; its loss in bfloat16 or in float32."""
    return trained(model.to(torch.bfloat16), shifted(half=half))


def adamw(model: Model, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **({"lr": 3e-4} | options))


def freeze_third(model: Model) -> None:
    model.layers[2].requires_grad_(False)


def freeze_lowest(model: Model) -> None:
    for layer in model.layers[:3]:
        layer.requires_grad_(False)


def partly_held() -> Subject:
    """Only the blocks are in the optimizer."""
    model = Model()
    return stepped(model, torch.optim.AdamW(model.layers.parameters(), lr=3e-4))


def wholly_held(**options: Any) -> Subject:
    """One group for every parameter."""
    model = Model()
    return stepped(model, adamw(model, **options))


def two_groups() -> Subject:
    """Decay on matrices only."""
    model = Model()
    kinds = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}]
    return stepped(model, torch.optim.AdamW(groups, lr=1e-3))


def clipped(*, skewed: bool) -> Subject:
    """Gradients clipped to norm 1."""
    model = Model(skewed=skewed)
    return stepped(model, adamw(model), clip=1.0)


def empty(model: Model) -> None:
    """Set a norm's gain to zero and a weight to what memory may hold."""
    model.get_parameter("layers.1.norm1.weight").zero_()
    model.get_parameter("layers.3.mlp.0.weight")[0, :8] = 1e30


def unit_head(model: Model) -> None:
    nn.init.normal_(model.head.weight)


CASES: dict[str, tuple[Callable[[], Subject], Callable[[], Subject]]] = {
    "NS701": (lambda: trained(Model()), lambda: trained(Model("no mask"))),
    "NS702": (lambda: trained(Model()), lambda: trained(Model("reshape"))),
    "NS703": (padded, partial(padded, "no padding mask")),
    "NS704": (lambda: trained(Model()), lambda: trained(Model("detach"))),
    "NS705": (lambda: trained(Model()), lambda: trained(changed(freeze_third))),
    "NS706": (wholly_held, partly_held),
    "NS707": (lambda: trained(Model()), lambda: half_trained(Model(), half=False)),
    "NS708": (lambda: trained(Model()), lambda: trained(changed(unit_head))),
    "NS709": (lambda: trained(Model()), lambda: trained(changed(empty))),
    "NS710": (partial(clipped, skewed=False), partial(clipped, skewed=True)),
    "NS711": (two_groups, partial(wholly_held, lr=1e-3, weight_decay=0.1)),
    "NS712": (lambda: trained(Model()), lambda: trained(Model(), shifted(0))),
    "NS713": (partial(half_trained, Model(), half=False), partial(half_trained, Model(), half=True)),
}
"""Healthy twin and broken run of each finding."""
