"""The add of stream and branch in many spellings, with numbers, learnt scales and gates."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from handwritten_base import PRE, WIDTH, Block, Tower, case, pre_tower, reading, token_ids, tower
from handwritten_placements import NoNorm, Post
from torch import Tensor, nn


def joined(join: Callable[[Tensor, Tensor], Tensor], block: type[Block] = Block) -> Callable[[], nn.Module]:
    """A Pre-LN tower whose two branches are added to the stream by `join`."""

    def build() -> nn.Module:
        model = pre_tower(block)
        for member in model.blocks:
            member.join = join  # type: ignore[assignment, method-assign]
        return model

    return build


def iadd(x: Tensor, y: Tensor) -> Tensor:
    """In-place add: autograd's version counter moves, the storage stays."""
    x += y
    return x


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "iadd": iadd,
    "add_": lambda x, y: x.add_(y),
    "add_-into-branch": lambda x, y: y.add_(x),
    "torch.add": torch.add,
    "sub-of-negative": lambda x, y: x - (-y),
    "stack-sum": lambda x, y: torch.stack([x, y]).sum(0),
    "python-sum": lambda x, y: sum([x, y]),  # type: ignore[arg-type, return-value]
    "through-float32": lambda x, y: (x.float() + y.float()).to(x.dtype),
    "through-views": lambda x, y: (x.flatten(0, 1) + y.flatten(0, 1)).view_as(x),
    "dropout": lambda x, y: x + F.dropout(y, 0.1, training=True),
    "clamped": lambda x, y: x + y.clamp(-1e4, 1e4),
    "masked": lambda x, y: x + y.masked_fill(torch.zeros(x.shape[1], 1, dtype=torch.bool), 0.0),
    "out": lambda x, y: torch.add(x, y, out=None),
}
for name, join in JOINS.items():
    case(f"join-{name}", joined(join), PRE)

SCALED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "alpha": (lambda x, y: torch.add(x, y, alpha=0.5), {"branch_scale": 0.5}),
    "mul": (lambda x, y: x + 0.5 * y, {"branch_scale": 0.5}),
    "div": (lambda x, y: x + y / 4, {"branch_scale": 0.25}),
    "sub": (lambda x, y: x - y, {"branch_scale": -1.0}),
    "stream": (lambda x, y: 2.0 * x + y, {"stream_scale": 2.0}),
    "both": (lambda x, y: x.mul(2.0).add_(y, alpha=0.5), {"stream_scale": 2.0, "branch_scale": 0.5}),
    "sum-over-root-2": (
        lambda x, y: (x + y) / math.sqrt(2),
        {"stream_scale": math.sqrt(0.5), "branch_scale": math.sqrt(0.5)},
    ),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.25), {"stream_scale": 0.75, "branch_scale": 0.25}),
    "tensor-factor": (lambda x, y: x + torch.tensor(0.5) * y, {"branch_scale": 0.5}),
    "addcmul": (lambda x, y: torch.addcmul(x, y, torch.tensor(0.5)), {"branch_scale": 0.5}),
}
for name, (join, scales) in SCALED.items():
    case(f"scaled-{name}", joined(join), reading("A.pre F.pre", join="scaled", **scales))


class DeepNorm(Post):
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return 1.5 * x + y


class Learnt(Block):
    """ReZero (`shape` is ()) and LayerScale (`shape` is the width) on a Pre-LN block."""

    def __init__(self, shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full(tuple(shape), 0.1))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.gain * y


class ReZero(Learnt, NoNorm):
    pass


class LayerScaleAddcmul(Learnt):
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.addcmul(x, self.gain, y)


class Admin(Post):
    def __init__(self) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.ones(WIDTH))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x * self.omega + y


class GRUGate(Block):
    """GTrXL's gate around a Pre-LN branch."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.ug = nn.Linear(WIDTH, WIDTH, bias=False)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        wr, wz, wg = self.w(torch.relu(y)).chunk(3, -1)
        ur, uz = self.u(x).chunk(2, -1)
        r, z = torch.sigmoid(wr + ur), torch.sigmoid(wz + uz - 2.0)
        return (1 - z) * x + z * torch.tanh(wg + self.ug(r * x))


class Highway(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        t = torch.sigmoid(self.gate(x))
        return t * y + (1 - t) * x


case(
    "deepnorm",
    lambda: tower(DeepNorm),
    reading("A.post F.post", final=False, join="scaled", stream_scale=1.5),
)
rezero = reading("A.none F.none", final=False, join="learnt", branch_scale="learnt")
case("rezero", lambda: tower(ReZero), rezero)
layerscale = reading("A.pre F.pre", join="learnt", branch_scale="learnt")
case("layerscale", lambda: pre_tower(lambda: Learnt((WIDTH,))), layerscale)
case("layerscale-addcmul", lambda: pre_tower(lambda: LayerScaleAddcmul((WIDTH,))), layerscale)
admin = reading("A.post F.post", final=False, join="learnt", stream_scale="learnt")
case("admin", lambda: tower(Admin), admin)
gated = reading("A.pre F.pre", join="gate", stream_scale="learnt", branch_scale="learnt")
case("gru-gate", lambda: pre_tower(GRUGate), gated)
case("highway", lambda: pre_tower(Highway), gated)


class BiasedScales(Block):
    """(x + b)·s + (F + b')·s', all learnt vectors (Zaya)."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self.shifts = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return (y + self.shifts[0]) * self.scales[0] + (x + self.shifts[1]) * self.scales[1]


class LearntShares(Block):
    """α·x + β·norm(F), with β = σ(w) and α of a learnt w, and a norm without γ (Muse Spark)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        share = torch.sigmoid(self.gate)
        return torch.sqrt(1 - share**2) * x + share * F.layer_norm(y, (WIDTH,))


class OneSequence(Block):
    """The attention gives (T, D), which is added to (1, T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x)).squeeze(0)
        return x + self.feed_forward(self.norm2(x))


class KeptTokens(Tower):
    """Half of the tokens, drawn at random, go through the blocks (masked autoencoders)."""

    def run(self, x: Tensor) -> Tensor:
        kept = torch.argsort(torch.rand(x.shape[:2]), dim=1)[:, : x.shape[1] // 2]
        return super().run(torch.gather(x, 1, kept.unsqueeze(-1).repeat(1, 1, WIDTH)))


SCALED = {"join": "learnt", "stream_scale": "learnt", "branch_scale": "learnt"}
case("biased-scales", lambda: pre_tower(BiasedScales), reading("A.pre F.pre", **SCALED))
case("learnt-shares", lambda: pre_tower(LearntShares), reading("A.peri F.peri", **SCALED))
case("one-sequence", lambda: pre_tower(OneSequence), PRE, batch=lambda: token_ids()[:1])
case("kept-tokens", lambda: KeptTokens(Block(), Block()), PRE)
