"""A small byte-level decoder, its text and its training, written without normscope.

Several runs ("lanes") of one shape are trained side by side: every weight has a leading axis S.

Shapes: S lanes, B batch, T tokens, D width, V = 256 bytes.
"""

import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

Weights, State = dict[str, Tensor], dict[str, list[Tensor]]
V, D, HEADS, B, T = 256, 32, 2, 4, 32


@dataclass(frozen=True)
class Lane:
    """One run: its seed and how it is trained."""

    seed: int
    lr: float = 3e-3
    warmup: int = 0
    clip: float = math.inf


def text() -> Tensor:
    """The bytes of the first 2 MB of the standard library's modules, in alphabetical order."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size > 2_000_000:
            break
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).long()


def batches(seed: int) -> Iterator[Tensor]:
    """Windows (B, T + 1) drawn at random."""
    generator, data = torch.Generator().manual_seed(1000 + seed), text()
    while True:
        starts = torch.randint(len(data) - T - 1, (B,), generator=generator)
        yield torch.stack([data[start : start + T + 1] for start in starts])


def weights(depth: int, init: str, seed: int, width: int = D) -> dict[str, Tensor]:
    """Xavier or N(0, 0.02²) maps, embeddings N(0, 0.02²), γ = 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    found = {"tokens": (V, width), "places": (T, width), "head": (width, V)}
    for b in range(depth):
        found |= {f"{b}.qkv": (width, 3 * width), f"{b}.o": (width, width)}
        found |= {f"{b}.up": (width, 4 * width), f"{b}.down": (4 * width, width)}
    drawn = {}
    for name, (rows, columns) in found.items():
        branch = "." in name
        std = math.sqrt(2 / (rows + columns)) if init == "xavier" and branch else 0.02
        if name.endswith("qkv") and init == "xavier":
            std = math.sqrt(1 / width)  # three square maps
        drawn[name] = std * torch.randn(rows, columns, generator=generator)
    for name in [f"{b}.{place}" for b in range(depth) for place in ("a", "f")] + ["final"]:
        drawn[f"{name}.gain"], drawn[f"{name}.shift"] = torch.ones(1, width), torch.zeros(1, width)
    return drawn


def stacked(depth: int, init: str, lanes: Sequence[Lane]) -> dict[str, Tensor]:
    """The weights of every lane, (S, …)."""
    drawn = [weights(depth, init, lane.seed) for lane in lanes]
    return {name: torch.stack([each[name] for each in drawn]).requires_grad_() for name in drawn[0]}


def norm(x_SND: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    """LayerNorm with γ and β."""
    return F.layer_norm(x_SND, x_SND.shape[-1:]) * w[f"{name}.gain"] + w[f"{name}.shift"]


def attention(x_SND: Tensor, w: dict[str, Tensor], b: int, tokens: int) -> Tensor:
    """Causal self-attention of sequences of `tokens`, written out."""
    lanes, rows, width = x_SND.shape
    qkv = (x_SND @ w[f"{b}.qkv"]).view(lanes, rows // tokens, tokens, 3, HEADS, width // HEADS)
    q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)
    scores = q @ k.mT / math.sqrt(width // HEADS)
    mask = torch.full((tokens, tokens), -math.inf, dtype=x_SND.dtype).triu(1)
    mixed = (scores + mask).softmax(-1) @ v
    return mixed.transpose(-2, -3).reshape(lanes, rows, width) @ w[f"{b}.o"]


def feed_forward(x_SND: Tensor, w: dict[str, Tensor], b: int) -> Tensor:
    """Two maps with a GELU between them."""
    return F.gelu(x_SND @ w[f"{b}.up"]) @ w[f"{b}.down"]


def blocks(x: Tensor, w: dict[str, Tensor], placement: str, depth: int, tokens: int = T) -> list[Tensor]:
    """The stream (S, N, D) before the first block and after each; "none" has no norms, "plain" nothing."""
    streams = [x]
    for b in range(depth):
        for place in ("a", "f"):
            name = f"{b}.{place}"
            u = norm(x, w, name) if placement == "pre" else x
            y = attention(u, w, b, tokens) if place == "a" else feed_forward(u, w, b)
            if placement == "res-post":
                y = norm(y, w, name)
            if placement == "plain":
                x = y
            else:
                x = norm(x + y, w, name) if placement == "post" else x + y
        streams.append(x)
    return streams


def logits(ids_SBT: Tensor, w: dict[str, Tensor], placement: str, depth: int, *, final: bool) -> Tensor:
    """(S, B, T) → (S, B·T, V)."""
    lanes, batch, tokens = ids_SBT.shape
    flat = ids_SBT.reshape(lanes, -1)
    x = torch.stack([w["tokens"][s][flat[s]] for s in range(lanes)])
    x = x + w["places"][:, :tokens].repeat(1, batch, 1)
    x = blocks(x, w, placement, depth, tokens)[-1]
    return (norm(x, w, "final") if final else x) @ w["head"]


def adamw(w: Weights, state: State, grads: list[Tensor], rates: Tensor, step: int) -> None:
    """Loshchilov & Hutter 2019, betas 0.9 and 0.95, no decay; a rate a lane."""
    for (name, value), gradient in zip(w.items(), grads, strict=True):
        first, second = state.setdefault(name, [torch.zeros_like(value), torch.zeros_like(value)])
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.05)
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        value.data -= rates.view(-1, *[1] * (value.dim() - 1)) * update


def sgd(w: Weights, state: State, grads: list[Tensor], rates: Tensor, step: int) -> None:
    """Momentum 0.9; a rate a lane."""
    for (name, value), gradient in zip(w.items(), grads, strict=True):
        (held,) = state.setdefault(name, [torch.zeros_like(value)])
        held.mul_(0.9).add_(gradient)
        value.data -= rates.view(-1, *[1] * (value.dim() - 1)) * held


STEPS = {"adamw": adamw, "sgd": sgd}


def train(
    placement: str,
    depth: int,
    lanes: Sequence[Lane],
    *,
    init: str = "xavier",
    steps: int = 300,
    optimizer: str = "adamw",
    final: bool | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses (S, steps) less those of the byte frequencies on the same batches, and the weights after."""
    final = placement == "pre" if final is None else final
    w, state = stacked(depth, init, lanes), {}
    feeds = [batches(lane.seed) for lane in lanes]
    counts = text().bincount(minlength=V).double() + 1
    alone = -(counts / counts.sum()).log().float()
    rates, caps = torch.tensor([lane.lr for lane in lanes]), torch.tensor([lane.clip for lane in lanes])
    warm = torch.tensor([max(lane.warmup, 1) for lane in lanes])
    losses = []
    for step in range(1, steps + 1):
        ids = torch.stack([next(feed) for feed in feeds])
        targets = ids[:, :, 1:].reshape(len(lanes), -1)
        out = logits(ids[:, :, :-1], w, placement, depth, final=final)
        each = -out.log_softmax(-1).gather(-1, targets[..., None])[..., 0].mean(-1)
        losses.append(each.detach() - alone[targets].mean(-1))
        found = torch.autograd.grad(each.sum(), list(w.values()), allow_unused=True)  # the final norm may be
        grads = [torch.zeros_like(v) if g is None else g for v, g in zip(w.values(), found, strict=True)]
        length = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
        scale = (caps / length).clamp(max=1)
        grads = [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in grads]
        STEPS[optimizer](w, state, grads, rates * (step / warm).clamp(max=1), step)
    return torch.stack(losses, 1), w


def ends(losses: Tensor) -> list[float]:
    """Mean of the last 20 steps of each lane, infinite where it is not finite."""
    return [float(x) if x.isfinite() else math.inf for x in losses[:, -20:].mean(1)]
