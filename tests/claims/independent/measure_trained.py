"""Trained claims measured without normscope: `python tests/claims/independent/measure_trained.py [ID…]`.

Each function returns figures; `trained.json` keeps them, and `test_trained.py` checks what follows from them.
"""

import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from plain_decoder import Lane, V, batches, ends, logits, text, train
from torch import Tensor

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


MEASURES: dict[str, Callable[[], Found]] = {
    "B4": b4, "B5": b5, "C10": c10, "C11": c11, "C18": c18, "C26": c26, "C27": c27,
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
