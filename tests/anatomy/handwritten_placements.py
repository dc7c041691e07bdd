"""The placements and schemes of the catalogue, each written as a person would."""

import torch
import torch.nn.functional as F
from handwritten_base import (
    NONE,
    POST,
    PRE,
    WIDTH,
    Attention,
    Block,
    FeedForward,
    Tower,
    case,
    pre_tower,
    reading,
    tower,
)
from readings import stack
from torch import Tensor, nn


class Post(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.join(x, self.attention(x)))
        return self.norm2(self.join(x, self.feed_forward(x)))


class ResPost(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attention(x))
        return x + self.norm2(self.feed_forward(x))


class Peri(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm3, self.norm4 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm3(self.attention(self.norm1(x)))
        return x + self.norm4(self.feed_forward(self.norm2(x)))


class NoNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x, self.attention(x))
        return self.join(x, self.feed_forward(x))


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x)) + self.feed_forward(self.norm2(x))


class ParallelShared(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + (self.attention(y) + self.feed_forward(y))


class Macaron(Block):
    """A feed-forward on either side of the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm0 = FeedForward(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.first(self.norm0(x)))


class B2T(Block):
    def forward(self, x: Tensor) -> Tensor:
        a = self.norm1(x + self.attention(x))
        return self.norm2(x + a + self.feed_forward(a))


class Keel(Peri):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm3(4.0 * x + self.attention(self.norm1(x)))
        return self.norm4(4.0 * x + self.feed_forward(self.norm2(x)))


class SubLNAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.q, self.k, self.v))
        return self.o(self.inner(self.mix(q, k, v).transpose(1, 2).flatten(2)))


def sub_ln_block() -> Block:
    """Pre-LN with a norm before both output projections."""
    inner = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    )
    return Block(SubLNAttention(), inner)


class NGPT(Block):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((WIDTH,), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        for branch in (self.attention, self.feed_forward):
            y = F.normalize(branch(x), dim=-1)
            x = F.normalize(x + self.alpha.abs() * (y - x), dim=-1)
        return x


class ResiDual(Tower):
    def run(self, x: Tensor) -> Tensor:
        r = x
        for block in self.blocks:
            y = block.attention(x)
            x, r = block.norm1(x + y), r + y
            y = block.feed_forward(x)
            x, r = block.norm2(x + y), r + y
        return x + F.layer_norm(r, (WIDTH,))


case("post", lambda: tower(Post), POST)
case("pre", lambda: pre_tower(Block), PRE)
case("pre-no-final", lambda: tower(Block), reading("A.pre F.pre", final=False))
case("res-post", lambda: pre_tower(ResPost), reading("A.res-post F.res-post"))
case("peri", lambda: pre_tower(Peri), reading("A.peri F.peri"))
case("no-norm", lambda: tower(NoNorm), NONE)
case("no-norm-final", lambda: pre_tower(NoNorm), reading("A.none F.none"))
case("post-single", lambda: tower(Post, n=1), reading("A.post F.post", n=1, final=False))
case("pre-single", lambda: pre_tower(Block, n=1), reading("A.pre F.pre", n=1))
case("macaron-single", lambda: pre_tower(Macaron, n=1), reading("F.pre A.pre F.pre", n=1))
case(
    "mix-ln",
    lambda: Tower(Post(), Block(), Block(), Block()),
    stack("A.post F.post", *3 * ["A.pre F.pre"], final=True),
)
case("parallel", lambda: pre_tower(Parallel), PRE, scheme="parallel")
case("parallel-shared-norm", lambda: pre_tower(ParallelShared), PRE, scheme="parallel")
case("b2t", lambda: tower(B2T), POST, scheme="b2t")
keel = reading("A.post F.post", final=False, join="scaled", stream_scale=4.0)
case("keel", lambda: tower(Keel), keel, scheme="keel")
case("sub-ln", lambda: pre_tower(sub_ln_block), PRE, scheme="sub-ln")
ngpt = {"norm": "l2norm", "final": False, "stream_scale": "learnt", "branch_scale": "learnt"}
case("ngpt", lambda: tower(NGPT), reading("A.post F.post", join="learnt", **ngpt), scheme="ngpt")
dual = reading("A.post F.post", join="streams")
case("residual-dual", lambda: ResiDual(Block(), Block()), dual, scheme="residual-dual")
