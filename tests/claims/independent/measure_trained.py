"""Trained claims measured without normscope: `python tests/claims/independent/measure_trained.py [ID…]`.

Each function returns figures; `trained.json` keeps them, and `test_trained.py` checks what follows from them.
"""

import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from plain_decoder import HEADS, D, Lane, V, batches, ends, logits, norm, text, train
from torch import Tensor, nn

Found = dict[str, list[float]]
KEPT = Path(__file__).with_name("trained.json")
SEEDS = (11, 12, 13)
"""None of these is a seed of the suite of claims."""
LADDER = (1e-3, 3e-3, 1e-2, 3e-2)


def of(placement: str, depth: int, *, seeds: tuple[int, ...] = SEEDS, **how: object) -> list[float]:
    """Train one run a seed and return where each ends; `lr`, `warmup` and `clip` go to its lane."""
    lane = {name: how.pop(name) for name in ("lr", "warmup", "clip") if name in how}
    return ends(train(placement, depth, [Lane(seed, **lane) for seed in seeds], **how)[0])  # type: ignore[arg-type]


def b4() -> Found:
    """Post-LN with and without warm-up, and Pre-LN without."""
    return {
        "post, 4 blocks, no warm-up": of("post", 4),
        "post, 12 blocks, no warm-up": of("post", 12),
        "post, 4 blocks, N(0, 0.02²), no warm-up": of("post", 4, init="normal"),
        "pre, 12 blocks, no warm-up": of("pre", 12),
    }


def b5() -> Found:
    """Deep Post-LN from two kinds of weights."""
    return {
        "post, 12 blocks, Xavier": of("post", 12, warmup=200, lr=1e-3),
        "post, 12 blocks, N(0, 0.02²)": of("post", 12, warmup=200, init="normal"),
    }


def c10() -> Found:
    """Every rate of the ladder, with the norm before the branch, on the stream, and without norms."""
    found = {}
    for placement in ("pre", "post", "none"):
        lanes = [Lane(seed, lr=lr) for lr in LADDER for seed in SEEDS]
        result = ends(train(placement, 4, lanes)[0])
        for k, lr in enumerate(LADDER):
            found[f"{placement}, {lr:g}"] = result[k * len(SEEDS) : (k + 1) * len(SEEDS)]
    return found


def c11() -> Found:
    """Steps until the mean of 20 is 0.3 nats under the byte frequencies, 300 for never."""
    return {placement: _steps(placement) for placement in ("pre", "none", "plain")}


def _steps(placement: str) -> list[float]:
    by_rate = []
    for lr in (3e-3, 1e-2):
        losses, _ = train(placement, 4, [Lane(seed, lr=lr) for seed in SEEDS])
        means = losses.unfold(1, 20, 1).mean(-1)
        by_rate.append([float((row > -0.3).long().cumprod(0).sum()) + 20 for row in means])
    return [min(both) for both in zip(*by_rate, strict=True)]


def c18() -> Found:
    """Pre-LN of 6 blocks with a norm at the end and without."""
    return {"with": of("pre", 6, final=True), "without": of("pre", 6, final=False)}


def c26() -> Found:
    """The same runs with and without clipping, under both optimisers."""
    return {
        "adamw, post, 8 blocks": of("post", 8),
        "adamw, post, 8 blocks, clipped": of("post", 8, clip=1.0),
        "sgd, no norms, 6 blocks": of("none", 6, lr=0.3, optimizer="sgd"),
        "sgd, no norms, 6 blocks, clipped": of("none", 6, lr=0.3, optimizer="sgd", clip=1.0),
    }


def c27() -> Found:
    """Post-LN of 4 blocks as trained, and with its norms read as Pre-LN's."""
    losses, w = train("post", 4, [Lane(seed, lr=1e-3) for seed in SEEDS], steps=200)
    return {"trained": ends(losses), "moved": [float(x) for x in _moved(w)]}


@torch.no_grad()
def _moved(w: dict[str, Tensor]) -> Tensor:
    """Each norm of a branch moves before it; the last one becomes the final norm."""
    moved = dict(w)
    names = [f"{b}.{place}" for b in range(4) for place in ("a", "f")]
    for part in ("gain", "shift"):
        for before, after in zip([None, *names[:-1]], names, strict=True):
            one = torch.ones_like if part == "gain" else torch.zeros_like
            moved[f"{after}.{part}"] = one(w[f"{after}.{part}"]) if before is None else w[f"{before}.{part}"]
        moved[f"final.{part}"] = w[f"{names[-1]}.{part}"]
    feeds = [batches(500 + seed) for seed in SEEDS]
    counts = text().bincount(minlength=V).double() + 1
    alone = -(counts / counts.sum()).log().float()
    total = torch.zeros(len(SEEDS))
    for _ in range(16):
        ids = torch.stack([next(feed) for feed in feeds])
        targets = ids[:, :, 1:].reshape(len(SEEDS), -1)
        out = logits(ids[:, :, :-1], moved, "pre", 4, final=True)
        each = -out.log_softmax(-1).gather(-1, targets[..., None])[..., 0].mean(-1)
        total += (each - alone[targets].mean(-1)) / 16
    return total


QUANTISED = ("norm inputs", "norm outputs", "sums", "hidden", "attention outputs", "queries, keys, values")


def c31() -> Found:
    """Divergence of the predictions, in nats a token, with one part of a Pre-LN decoder in INT4."""
    _, w = train("pre", 4, [Lane(seed) for seed in SEEDS], steps=200)
    with torch.no_grad():
        feeds = [batches(700 + seed) for seed in SEEDS]
        ids = torch.stack([next(feed) for feed in feeds])[:, :, :-1]
        truth = _rounded_logits(ids, w, "").log_softmax(-1)
        moved = {part: _rounded_logits(ids, w, part).log_softmax(-1) for part in QUANTISED}
        return {
            part: (truth.exp() * (truth - found)).sum(-1).mean(-1).tolist() for part, found in moved.items()
        }


def _int4(x_SND: Tensor) -> Tensor:
    """Symmetric integers of 4 bits, one scale for the tensor of each run."""
    scale = x_SND.abs().amax((1, 2), keepdim=True) / 7
    return (x_SND / scale).round() * scale


def _rounded_logits(ids_SBT: Tensor, w: dict[str, Tensor], part: str) -> Tensor:
    """The logits of a Pre-LN decoder of 4 blocks with `part` rounded wherever it occurs; none for ""."""
    rounded = lambda x, name: _int4(x) if name == part else x  # noqa: E731
    lanes, batch, tokens = ids_SBT.shape
    x = torch.stack([w["tokens"][s][ids_SBT[s].flatten()] for s in range(lanes)])
    x = x + w["places"][:, :tokens].repeat(1, batch, 1)
    for b in range(4):
        u = rounded(norm(rounded(x, "norm inputs"), w, f"{b}.a"), "norm outputs")
        qkv = rounded(u @ w[f"{b}.qkv"], "queries, keys, values")
        shape = (lanes, batch, tokens, 3, HEADS, D // HEADS)
        q, k, v = qkv.view(shape).permute(3, 0, 1, 4, 2, 5)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).reshape(x.shape)
        x = rounded(x + rounded(mixed, "attention outputs") @ w[f"{b}.o"], "sums")
        u = rounded(norm(rounded(x, "norm inputs"), w, f"{b}.f"), "norm outputs")
        x = rounded(x + rounded(F.gelu(u @ w[f"{b}.up"]), "hidden") @ w[f"{b}.down"], "sums")
    return norm(x, w, "final") @ w["head"]


class PlainViT(nn.Module):
    """Two Pre-LN blocks on the 16 patches of an 8 × 8 image, with LayerNorm or BatchNorm in every slot."""

    def __init__(self, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(4, 32), nn.Parameter(0.02 * torch.randn(16, 32))
        self.norms = nn.ModuleList([make_norm(32) for _ in range(5)])
        self.qkv = nn.ModuleList([nn.Linear(32, 96) for _ in range(2)])
        self.out = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(32, 128) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(128, 32) for _ in range(2)])
        self.head = nn.Linear(32, 10)
        for matrix in (*self.out, *self.up, *self.down):
            nn.init.xavier_normal_(matrix.weight)
        for matrix in self.qkv:
            nn.init.normal_(matrix.weight, std=32**-0.5)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 8, 8) → (B, 10)."""
        x = self.patches(images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)) + self.positions
        for b in range(2):
            u = self._normed(x, 2 * b)
            q, k, v = self.qkv[b](u).view(-1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
            x = x + self.out[b](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + self.down[b](F.gelu(self.up[b](self._normed(x, 2 * b + 1))))
        return self.head(self._normed(x, 4).mean(1))

    def _normed(self, x: Tensor, number: int) -> Tensor:
        return self.norms[number](x.flatten(0, 1)).view_as(x)


def c32() -> Found:
    """Points of accuracy of a small ViT on digits, at the better of two rates, by norm and seed."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    images, end = (pixels.float() / 16 - 0.5).view(-1, 8, 8), int(0.8 * len(labels))
    kinds = {"layernorm": nn.LayerNorm, "batchnorm": nn.BatchNorm1d}
    return {
        name: [max(_accuracy(kind, seed, lr, images, labels, end) for lr in (3e-3, 1e-2)) for seed in SEEDS]
        for name, kind in kinds.items()
    }


def _accuracy(
    kind: Callable[[int], nn.Module], seed: int, lr: float, images: Tensor, labels: Tensor, end: int
) -> float:
    """Points of accuracy behind `end` after 300 steps of AdamW on 32 images before it."""
    torch.manual_seed(seed)
    model = PlainViT(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        chosen = torch.randint(end, (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return 100 * float((model.eval()(images[end:]).argmax(-1) == labels[end:]).float().mean())


MEASURES: dict[str, Callable[[], Found]] = {
    "B4": b4, "B5": b5, "C10": c10, "C11": c11, "C18": c18, "C26": c26, "C27": c27, "C31": c31, "C32": c32,
}  # fmt: skip


def main(ids: list[str]) -> None:
    """Measure `ids`, or all, and keep what was found."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for id in ids or MEASURES:
        found = MEASURES[id]()
        kept[id] = {name: [min(round(x, 4), 1e9) for x in values] for name, values in found.items()}
        kept["measured"] = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(id, kept[id], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
