"""Hand-written models: the many ways people write the same residual stream, and the reading each must have."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from readings import StackReading, stack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCABULARY = 16, 2, 32


@dataclass(frozen=True)
class Case:
    """A model and its reading; see `hf_models.HFModel` for the fields they share."""

    name: str
    build: Callable[[], nn.Module]
    stacks: tuple[StackReading, ...]
    batch: Callable[[], Any]
    unread: bool | None = False
    one_stream: bool = True
    scheme: str | None = None


CASES: list[Case] = []


def token_ids() -> Tensor:
    """Two sequences of eight tokens."""
    return torch.randint(0, VOCABULARY, (2, 8))


def case(name: str, build: Callable[[], nn.Module], *stacks: StackReading, **more: Any) -> None:
    """One more row of the table."""
    CASES.append(Case(name, build, stacks, more.pop("batch", token_ids), **more))


# Parts


class Attention(nn.Module):
    """Plain multi-head attention; `memory` makes it cross-attention."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (self.heads(p(y)) for p, y in ((self.q, x), (self.k, memory), (self.v, memory)))
        return self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class FeedForward(nn.Sequential):
    """Linear, GELU, linear."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    """Parts of one block; a case says in `forward` how they are put together. As written: Pre-LN."""

    def __init__(self, attention: nn.Module | None = None, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention or Attention(), feed_forward or FeedForward()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x, self.attention(self.norm1(x)))
        return self.join(x, self.feed_forward(self.norm2(x)))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Tower(nn.Module):
    """Embeddings with positions, blocks, final norm, head."""

    def __init__(self, *blocks: nn.Module, final: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.final = final or nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.final(self.run(x)))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tower(block: Callable[[], nn.Module], final: Callable[[], nn.Module] = nn.Identity, n: int = 2) -> Tower:
    """`n` blocks of one kind."""
    return Tower(*(block() for _ in range(n)), final=final())


def pre_tower(block: Callable[[], nn.Module], n: int = 2) -> Tower:
    """`n` blocks under a final LayerNorm."""
    return tower(block, lambda: nn.LayerNorm(WIDTH), n)


PRE, POST = stack(*2 * ["A.pre F.pre"], final=True), stack(*2 * ["A.post F.post"], final=False)
NONE = stack(*2 * ["A.none F.none"], norm="none", final=False)


def reading(
    block: str, n: int = 2, norm: str = "layernorm", final: bool = True, **scales: Any
) -> StackReading:
    """`n` equal blocks."""
    return stack(*n * [block], norm=norm, final=final, **scales)


# Placements


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
case("residual-dual", lambda: ResiDual(Block(), Block()), unread=True)


# Joins: the same add, written in other ways


def joined(join: Callable[[Tensor, Tensor], Tensor], block: type[Block] = Block) -> Callable[[], nn.Module]:
    """A Pre-LN tower whose two branches meet the stream by `join`."""

    def build() -> nn.Module:
        model = pre_tower(block)
        for member in model.blocks:
            member.join = join  # type: ignore[assignment, method-assign]
        return model

    return build


def iadd(x: Tensor, y: Tensor) -> Tensor:
    """In place: autograd's version counter moves, the storage stays."""
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
    "einsum-with-ones": lambda x, y: torch.einsum("nbtd,n->btd", torch.stack([x, y]), torch.ones(2)),
    "through-float32": lambda x, y: (x.float() + y.float()).to(x.dtype),
    "through-views": lambda x, y: (x.flatten(0, 1) + y.flatten(0, 1)).view_as(x),
    "dropout": lambda x, y: x + F.dropout(y, 0.1, training=True),
    "clamped": lambda x, y: x + y.clamp(-1e4, 1e4),
    "masked": lambda x, y: x + y.masked_fill(torch.zeros(x.shape[1], 1, dtype=torch.bool), 0.0),
    "out": lambda x, y: torch.add(x, y, out=None),
    "foreach": lambda x, y: torch._foreach_add([x], [y])[0],
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


# Norms made by hand


class HandNorm(nn.Module):
    """A norm of the last axis from its formula."""

    def __init__(self, formula: Callable[[Tensor], Tensor], offset: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.formula, self.offset = formula, offset
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 - offset))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.formula(x) * (self.offset + self.weight) if self.offset else self.weight * self.formula(x)
        return y if self.bias is None else y + self.bias


def _mean_variance(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5)


def _centred_then_rms(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _rms_in_float32(x: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


LAYER_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean-variance": _mean_variance,
    "var-rsqrt": lambda x: (
        (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
    ),
    "std": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    "centred-then-rms": _centred_then_rms,
    "functional": lambda x: F.layer_norm(x, (WIDTH,)),
    "in-float64": lambda x: F.layer_norm(x.double(), (WIDTH,)).to(x.dtype),
}
RMS_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "pow-mean-rsqrt": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "square-sqrt-div": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "norm-over-root-d": lambda x: x / (x.norm(dim=-1, keepdim=True) / math.sqrt(WIDTH) + 1e-8),
    "sum-over-d": lambda x: x / (x.square().sum(-1, keepdim=True) / WIDTH + 1e-6) ** 0.5,
    "float-casts": _rms_in_float32,
    "functional": lambda x: F.rms_norm(x, (WIDTH,)),
    "normalize-times-root-d": lambda x: F.normalize(x, dim=-1) * math.sqrt(WIDTH),
}
for name, formula in LAYER_NORMS.items():
    case(f"layernorm-{name}", lambda f=formula: with_norm(Block, lambda: HandNorm(f, bias=True)), PRE)
    case(f"layernorm-post-{name}", lambda f=formula: with_norm(Post, lambda: HandNorm(f, bias=True)), POST)
for name, formula in RMS_NORMS.items():
    rms = reading("A.pre F.pre", norm="rmsnorm")
    case(f"rmsnorm-{name}", lambda f=formula: with_norm(Block, lambda: HandNorm(f)), rms)
case(
    "rmsnorm-one-plus-gamma",
    lambda: with_norm(Block, lambda: HandNorm(_rms_in_float32, offset=1.0)),
    reading("A.pre F.pre", norm="rmsnorm"),
)
case(
    "l2norm",
    lambda: with_norm(Block, lambda: HandNorm(lambda x: F.normalize(x, dim=-1))),
    reading("A.pre F.pre", norm="l2norm"),
)


def with_norm(block: Callable[[], Block], norm: Callable[[], nn.Module]) -> Tower:
    """A tower whose every norm is made by `norm`; without a final one when the block is Post-LN."""
    model = tower(block, nn.Identity if block is Post else norm)
    for member in model.blocks:
        member.norm1, member.norm2 = norm(), norm()
    return model


# Attention and feed-forward written in other ways


class SoftmaxAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.full(logits.shape[-2:], float("-inf")).triu(1)
        return torch.softmax(logits + mask, dim=-1) @ v


class EinsumAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k).tril()
        return torch.einsum("bhqk,bhkd->bhqd", logits.softmax(-1), v)


class LinearAttention(Attention):
    """No softmax: φ(q)(φ(k)ᵀv)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(-2).unsqueeze(-1) + 1e-6)


class RotaryAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angle = (
            torch.arange(q.shape[-2])[:, None]
            * torch.tensor([1.0, 0.1]).repeat(2, 2).flatten()[: q.shape[-1]]
        )

        def rotate(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)


class QKNormAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (F.layer_norm(x, x.shape[-1:]) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v)


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class TanhGELU(nn.Module):
    """GELU's tanh form written out: an add of x and a function of x, but no residual."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def written_out_gelu() -> nn.Sequential:
    """A feed-forward around it."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), TanhGELU(), nn.Linear(WIDTH, WIDTH))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PointwiseConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x.transpose(1, 2)))).transpose(1, 2)


class Mixture(nn.Module):
    """Top-1 routing with a Python loop and index_add: which experts run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(FeedForward() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if rows.numel():
                out.index_add_(0, rows, weight[rows, None] * expert(tokens[rows]))
        return out.view_as(x)


class TokenMixing(nn.Module):
    """MLP-Mixer's: a feed-forward across the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = FeedForward(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.transpose(1, 2)).transpose(1, 2)


for attention in (
    SoftmaxAttention,
    EinsumAttention,
    LinearAttention,
    RotaryAttention,
    QKNormAttention,
    TorchAttention,
):
    case(attention.__name__, lambda a=attention: pre_tower(lambda: Block(a())), PRE)
for feed_forward in (SwiGLU, PointwiseConvolution, Mixture):
    case(feed_forward.__name__, lambda f=feed_forward: pre_tower(lambda: Block(None, f())), PRE)
case("TanhGELU", lambda: pre_tower(lambda: Block(None, written_out_gelu())), PRE)
case("mixer", lambda: pre_tower(lambda: Block(TokenMixing())), reading("O.pre F.pre"))
case("attention-only", lambda: pre_tower(AttentionOnly), reading("A.pre"))


class AttentionOnly(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x))


# Ways to run the same model


class Checkpointed(Tower):
    use_reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class Identity(torch.autograd.Function):
    """A custom function with its own backward, as people write to clip or reverse gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


class NormFunction(torch.autograd.Function):
    """RMSNorm as a custom function; its forward still runs ATen ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        unit, inner = x * scale, grad * weight
        mean = (inner * unit).mean(-1, keepdim=True)
        return scale * (inner - unit * mean), (grad * unit).flatten(0, -2).sum(0)


class FunctionNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return NormFunction.apply(x, self.weight)


class DataDependent(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        if y.abs().max() > 0:
            y = self.feed_forward(y)
        return x + y if y.isfinite().all() else x


class Fused(Block):
    """The residual rides in the addmm of the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = F.gelu(self.up(self.norm2(x)))
        return torch.addmm(x.flatten(0, 1), hidden.flatten(0, 1), self.down).view_as(x)


class Carrying(Block):
    """Hands (hidden, residual) on, as the fused add+norm kernels do: the add is at the next block's head."""

    def forward(self, pair: Any) -> Any:
        hidden, residual = pair if isinstance(pair, tuple) else (pair, None)
        residual = hidden if residual is None else residual + hidden
        residual = residual + self.attention(self.norm1(residual))
        return self.feed_forward(self.norm2(residual)), residual


class CarryingTower(Tower):
    def run(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[0] + x[1]


case("checkpoint", lambda: Checkpointed(Block(), Block()), PRE)
case("checkpoint-reentrant", lambda: CheckpointedReentrant(Block(), Block()), PRE)
case("jit-trace", lambda: torch.jit.trace(pre_tower(Block).eval(), (token_ids(),)), PRE)
case("compile-eager", lambda: torch.compile(pre_tower(Block), backend="eager"), PRE)
case("compile-aot_eager", lambda: torch.compile(pre_tower(Block), backend="aot_eager"), PRE)
case("custom-function", joined(lambda x, y: x + Identity.apply(y)), PRE)
case("custom-function-norm", lambda: with_norm(Block, FunctionNorm), reading("A.pre F.pre", norm="rmsnorm"))
case("data-dependent", lambda: pre_tower(DataDependent), PRE)
case("fused-addmm", lambda: pre_tower(Fused), PRE)
case("carried-residual", lambda: CarryingTower(Carrying(), Carrying()), PRE)
case("bfloat16", lambda: pre_tower(Block).bfloat16(), PRE)
case("float64", lambda: pre_tower(Block).double(), PRE)
case("train-mode-dropout", lambda: Tower(nn.Dropout(0.1), Block(), nn.Dropout(0.1), Block()).train(), PRE)
case("frozen", lambda: pre_tower(Block).requires_grad_(False), PRE)


# Structure around the blocks


class Wrapper(nn.Module):
    """As DataParallel holds its model."""

    def __init__(self, module: nn.Module, wrap: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.module, self.wrap = module, wrap

    def forward(self, ids: Tensor) -> Any:
        return self.wrap(self.module(ids))


class SequenceFirst(Tower):
    """(T, B, d) inside, as nn.Transformer's default."""

    def run(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)


class SequenceFirstAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


class TiedHead(Tower):
    def forward(self, ids: Tensor) -> Tensor:
        return self.final(self.run(self.tokens(ids))) @ self.tokens.weight.T


class Shared(Tower):
    """ALBERT: one module, three calls."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return x


class FlatList(Tower):
    """[attention, feed-forward, attention, feed-forward] with the adds in the tower itself."""

    def __init__(self) -> None:
        super().__init__(Attention(), FeedForward(), Attention(), FeedForward())
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for norm, branch in zip(self.norms, self.blocks, strict=True):
            x = x + branch(norm(x))
        return x


class ResidualWrapper(nn.Module):
    """lucidrains' PreNorm/Residual style: the add is in a module of its own around every branch."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.fn, self.norm = branch, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x)) + x


class LongSkips(Tower):
    """A U-net: the last half adds what the first half left."""

    def run(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.blocks[:2]:
            x = block(x)
            skips.append(x)
        for block in self.blocks[2:]:
            x = block(x + skips.pop())
        return x


class Nested(Block):
    """A residual inside a branch of the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.widen = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.inner, self.inner_norm = FeedForward(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.narrow(self.norm2(x))
        y = y + self.inner(self.inner_norm(y))
        return x + self.widen(y)


class EncoderDecoder(nn.Module):
    """Post- or Pre-LN halves from torch's own layers, with token embeddings."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Transformer(
            WIDTH, HEADS, 2, 2, 2 * WIDTH, batch_first=True, norm_first=norm_first, dropout=0.0
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(self.embed(source), self.embed(target))


class CrossBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cross, self.norm3 = Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm3(x), memory)
        return x + self.feed_forward(self.norm2(x))


class HandEncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.reader, self.writer = (
            nn.ModuleList([Block(), Block()]),
            nn.ModuleList([CrossBlock(), CrossBlock()]),
        )
        self.reader_norm, self.writer_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.tokens(source), self.tokens(target)
        for block in self.reader:
            memory = block(memory)
        memory = self.reader_norm(memory)
        for block in self.writer:
            x = block(x, memory)
        return self.writer_norm(x)


class Patches(Tower):
    """A vision model: patches by a convolution, a class token, the head on that token alone."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.patch, self.cls = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        return self.head(self.final(self.run(x + self.positions.weight[: x.shape[1]]))[:, 0])


class TorchEncoder(nn.Module):
    """torch.nn.TransformerEncoder as people call it, causal mask and all."""

    def __init__(self, norm_first: bool, final: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=norm_first)
        norm = nn.LayerNorm(WIDTH) if final else None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embed(ids), mask=mask, is_causal=True))


def oddly_named() -> nn.Module:
    """Paths that say nothing, or the wrong thing."""
    model = pre_tower(Block)
    for block in model.blocks:
        block.mlp = block.attention
        block.self_attn = block.feed_forward
    return model


def pair_of_ids() -> tuple[Tensor, Tensor]:
    """A source and a target of another length."""
    return torch.randint(0, VOCABULARY, (2, 8)), torch.randint(0, VOCABULARY, (2, 6))


case("wrapped", lambda: Wrapper(pre_tower(Block)), PRE)
case("output-dict", lambda: Wrapper(pre_tower(Block), lambda out: {"logits": out, "none": None}), PRE)
case("output-tuple", lambda: Wrapper(pre_tower(Block), lambda out: (out, [out.sum()])), PRE)
case(
    "output-two-losses", lambda: Wrapper(pre_tower(Block), lambda out: (out.mean(), out.square().mean())), PRE
)
case("output-nan", lambda: Wrapper(pre_tower(Block), lambda out: out * float("nan")), PRE)
case("sequence-first", lambda: SequenceFirst(*(Block(SequenceFirstAttention()) for _ in range(2))), PRE)
case("tied-head", lambda: TiedHead(Block(), Block()), PRE)
case("shared", lambda: Shared(Block()), reading("A.pre F.pre", n=3))
case("flat-list", FlatList, PRE)
case(
    "residual-wrappers",
    lambda: Tower(
        *(nn.Sequential(ResidualWrapper(Attention()), ResidualWrapper(FeedForward())) for _ in range(2))
    ),
    PRE,
)
case(
    "residual-wrappers-flat",
    lambda: Tower(
        *(ResidualWrapper(branch()) for branch in (Attention, FeedForward, Attention, FeedForward))
    ),
    PRE,
)
case("long-skips", lambda: LongSkips(*(Block() for _ in range(4))), reading("A.pre F.pre", n=4), unread=True)
case("nested", lambda: pre_tower(Nested), unread=True)
case(
    "nn.Transformer-post",
    lambda: EncoderDecoder(False),
    stack(*2 * ["A.post F.post"], final=False),
    stack(*2 * ["A.post X.post F.post"], final=False),
    batch=pair_of_ids,
)
PRE_PAIR = (PRE, stack(*2 * ["A.pre X.pre F.pre"], final=True))
case("nn.Transformer-pre", lambda: EncoderDecoder(True), *PRE_PAIR, batch=pair_of_ids)
case("encoder-decoder", HandEncoderDecoder, *PRE_PAIR, batch=pair_of_ids)
case("patches", Patches, PRE, batch=lambda: torch.randn(2, 3, 8, 8))
case("nn.TransformerEncoder-post", lambda: TorchEncoder(False, False), POST)
case("nn.TransformerEncoder-post-norm", lambda: TorchEncoder(False, True), POST)
case("nn.TransformerEncoder-pre", lambda: TorchEncoder(True, True), PRE)
case(
    "nn.TransformerEncoder-pre-no-final",
    lambda: TorchEncoder(True, False),
    reading("A.pre F.pre", final=False),
)
case("odd-names", oddly_named, PRE)
