"""Schemes of the catalogue that are recognised by their own dataflow or by the whole stack."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from handwritten_base import PRE, WIDTH, Attention, Block, Tower, case, pre_tower, reading, tower
from handwritten_joins import Highway, Learnt, joined
from handwritten_norms import ScaleNorm, with_norm
from handwritten_placements import Keel, NoNorm, Post, ResPost
from readings import StackReading, stack
from torch import Tensor, nn


class Scaled(Block):
    """Pre-LN whose normed input is divided by √l."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(index)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x) * self.scale)
        return x + self.feed_forward(self.norm2(x) * self.scale)


class GPAS(Block):
    """After each add x − SiLU(g)·stopgrad(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x - F.silu(self.gates[0]) * x.detach()
        x = x + self.feed_forward(self.norm2(x))
        return x - F.silu(self.gates[1]) * x.detach()


class NormedProjections(Attention):
    """Norms on q, k and, for HybridNorm, on v."""

    def __init__(self, value: bool) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.v_norm = nn.RMSNorm(WIDTH) if value else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v_norm(self.v(x))
        return self.o(self.mix(*map(self.heads, (q, k, v))).transpose(1, 2).flatten(2))


class HybridNorm(Block):
    """y = x + Attn(x) with norms on q, k, v; z = N(y); z + F(z)."""

    def __init__(self) -> None:
        super().__init__(NormedProjections(True))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x + self.attention(x))
        return z + self.feed_forward(z)


class Cosine(Attention):
    """Unit q and k, a learnt temperature of at most 100 (Swin v2)."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(10.0).log())

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        return (logits * self.temperature.clamp(max=math.log(100)).exp()).softmax(-1) @ v


class HeadScaled(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 2, 1, 1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.gain * super().mix(q, k, v)


class NormFormer(Block):
    def __init__(self) -> None:
        inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        )
        super().__init__(HeadScaled(), inner)
        self.norm3 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm3(self.attention(self.norm1(x)))
        return x + self.feed_forward(self.norm2(x))


class Fixup(Block):
    """Scalar biases around the maps, one learnt gain a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.gain = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.attention(x + self.bias[0]) * self.gain[0] + self.bias[1])
        return x + (self.feed_forward(x + self.bias[2]) * self.gain[1] + self.bias[3])


class DyT(nn.Module):
    def __init__(self, squash: Callable[[Tensor], Tensor] = torch.tanh, shift: bool = False) -> None:
        super().__init__()
        self.a, self.weight = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(WIDTH))
        self.bias, self.squash = nn.Parameter(torch.zeros(WIDTH)), squash
        self.shift = nn.Parameter(torch.zeros(())) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a * x if self.shift is None else self.a * x + self.shift
        return self.squash(x) * self.weight + self.bias


class SeeDNorm(nn.Module):
    """[tanh(x·βᵀ)·α + γ] ⊙ x/RMS(x), as the paper writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.gamma = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.beta = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dynamic = torch.tanh(x @ self.beta.T) * self.alpha
        return (dynamic + self.gamma) * (x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class BHyT(nn.Module):
    """γ·tanh(λ/(κ RMS)·x), with the factor first, as the authors' code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.lam, self.weight = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.lam * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6) * 0.1
        return self.weight * torch.tanh(alpha * x).to(x.dtype)


class SigmaLinear(nn.Linear):
    """Ŵ = (γ/σ)·W with σ = uᵀWv."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.gamma = nn.Parameter(torch.ones(()))
        self.register_buffer("u", F.normalize(torch.randn(width_out), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(width_in), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        sigma = self.u @ (self.weight @ self.v)
        return F.linear(x, self.weight * (self.gamma / sigma), self.bias)


def sigma_reparam() -> Block:
    """σReparam on every map of a Post-LN block."""
    block = Post()
    for parent in (block.attention, block.feed_forward):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, SigmaLinear(child.in_features, child.out_features))
    return block


class Siamese(Tower):
    """o = F(N(X + N(Y))); X ← N(X + o/√(l+1)), Y ← Y + o; out X + N(Y)."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.inner = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.entry = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        y, index = x, 0
        for block in self.blocks:
            for branch, norm in ((block.attention, block.norm1), (block.feed_forward, block.norm2)):
                o = branch(self.entry[index](x + self.inner[index](y)))
                x, y = norm(x + o / math.sqrt(index + 2)), y + o
                index += 1
        return x + F.layer_norm(y, (WIDTH,))


class HyperConnections(Tower):
    """n streams, static weights: H ← A_rᵀH + B ⊗ F(A_mᵀH)."""

    n = 3
    dynamic = False

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        read = torch.eye(self.n)[:, [0, 1, 2, 0]].T
        self.read, self.write = nn.Parameter(read.clone()), nn.Parameter(torch.ones(4, self.n))
        self.mixing = nn.Parameter(torch.eye(self.n).repeat(4, 1, 1))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, self.n + 2, bias=False) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        h = x[..., None, :].expand(-1, -1, self.n, -1)
        index = 0
        for block in self.blocks:
            for branch, norm in ((block.attention, block.norm1), (block.feed_forward, block.norm2)):
                h = self.connect(index, h, lambda z, f=branch, norm=norm: f(norm(z)))
                index += 1
        return h.sum(-2)

    def connect(self, i: int, h: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        read, write, mixing = self.read[i], self.write[i], self.mixing[i]
        if self.dynamic:
            found = 0.01 * torch.tanh(self.maps[i](F.rms_norm(h, (WIDTH,))))
            mixing, read, write = mixing + found[..., : self.n], read + found[..., -2], write + found[..., -1]
        z = (read[..., None] * h).sum(-2) if self.dynamic else torch.einsum("n,btnd->btd", read, h)
        return mixing.mT @ h + write[..., None] * f(z)[..., None, :]


class DynamicHyperConnections(HyperConnections):
    dynamic = True


class MeanHyperConnections(HyperConnections):
    """The read weights depend on the mean of the streams, which is no branch's entry."""

    def connect(self, i: int, h: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        read = self.read[i] + torch.tanh(self.maps[i](h.mean(-2)))[..., : self.n]
        z = (read[..., None] * h).sum(-2)
        return self.mixing[i].mT @ h + self.write[i, :, None] * f(z)[..., None, :]


class PermutedConnections(HyperConnections):
    """mHC-lite: the mixing matrix is a convex combination of all n! permutation matrices."""

    def __init__(self) -> None:
        super().__init__()
        orders = torch.tensor(list(itertools.permutations(range(self.n))))
        self.register_buffer("permutations", torch.eye(self.n)[orders])
        self.coefficients = nn.ModuleList(nn.Linear(self.n * WIDTH, len(orders)) for _ in range(4))

    def mix(self, i: int, h: Tensor) -> Tensor:
        share = torch.softmax(self.coefficients[i](F.rms_norm(h.flatten(-2), (self.n * WIDTH,))), dim=-1)
        return torch.einsum("btr,rij->btij", share, self.permutations)

    def connect(self, i: int, h: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        z = (self.read[i].sigmoid()[..., None] * h).sum(-2)
        return self.mix(i, h) @ h + 2 * self.write[i].sigmoid()[..., None] * f(z)[..., None, :]


class KroneckerConnections(PermutedConnections):
    """KromHC: the mixing matrix is a Kronecker product of 2 × 2 matrices."""

    n = 4

    def mix(self, i: int, h: Tensor) -> Tensor:
        logits = self.coefficients[i](F.rms_norm(h.flatten(-2), (self.n * WIDTH,)))[..., :4]
        p = torch.softmax(logits.view(*h.shape[:2], 2, 2), dim=-1)[..., 0]
        factors = torch.stack([torch.stack([p, 1 - p], -1), torch.stack([1 - p, p], -1)], dim=-2)
        product = factors[..., 0, :, :][..., :, None, :, None] * factors[..., 1, :, :][..., None, :, None, :]
        return product.reshape(*h.shape[:2], 4, 4)


class GTrXL(Block):
    """A GRU of the stream and relu(F(N x))."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        maps, y = self.maps, torch.relu(y)
        r, z = torch.sigmoid(maps[0](y) + maps[1](x)), torch.sigmoid(maps[2](y) + maps[3](x) - 2.0)
        return (1 - z) * x + z * torch.tanh(maps[4](y) + maps[5](r * x))


class HighwayNoNorm(Highway, NoNorm):
    pass


class ReZero(Learnt, NoNorm):
    pass


def weighted(stream: float, branch: float, block: type[Block] = Block) -> Callable[[], nn.Module]:
    """αx + βF(x) around every branch."""
    return joined(lambda x, y: stream * x + branch * y, block)


def alternating() -> Tower:
    """The branches' weights fall from block to block."""
    model = pre_tower(Block)
    for index, block in enumerate(model.blocks):
        beta = 0.6 / (index + 1)
        block.join = lambda x, y, b=beta: math.sqrt(1 - b * b) * x + b * y  # type: ignore[method-assign]
    return model


def keel_tower(n: int) -> Tower:
    """KEEL, whose first block is plain Pre-LN."""
    return Tower(Block(), *(Keel() for _ in range(n - 1)), final=nn.Identity())


LEARNT: dict[str, Any] = {"join": "learnt", "stream_scale": "learnt", "branch_scale": "learnt"}
NAMED: dict[str, tuple[Callable[[], nn.Module], StackReading | None, str | None]] = {
    "mix-ln-two": (
        lambda: Tower(Post(), Block()),
        stack("A.post F.post", "A.pre F.pre", final=True),
        "mix-ln",
    ),
    "pre-then-post": (
        lambda: Tower(Block(), Post(), final=nn.Identity()),
        stack("A.pre F.pre", "A.post F.post", final=False),
        None,
    ),
    "layernorm-scaling": (
        lambda: Tower(*map(Scaled, (1, 2, 3))),
        reading("A.pre F.pre", n=3),
        "layernorm-scaling",
    ),
    "gpas": (lambda: pre_tower(GPAS), reading("A.pre F.pre", **LEARNT), "gpas"),
    "hybridnorm": (lambda: tower(HybridNorm), reading("A.post F.none", final=False), "hybridnorm"),
    "swin-v2": (lambda: pre_tower(lambda: ResPost(Cosine())), reading("A.res-post F.res-post"), "swin-v2"),
    "olmo2": (
        lambda: pre_tower(lambda: ResPost(NormedProjections(False))),
        reading("A.res-post F.res-post"),
        "olmo2",
    ),
    "normformer": (lambda: pre_tower(NormFormer), reading("A.peri F.pre"), "normformer"),
    "fixup": (
        lambda: tower(Fixup),
        reading("A.none F.none", final=False, join="learnt", branch_scale="learnt"),
        "fixup",
    ),
    "rezero-name": (
        lambda: tower(ReZero),
        reading("A.none F.none", final=False, join="learnt", branch_scale="learnt"),
        "rezero",
    ),
    "dyt": (lambda: with_norm(Block, DyT), reading("A.pre F.pre", norm="dyt"), "dyt"),
    "derf": (
        lambda: with_norm(Block, lambda: DyT(torch.erf, shift=True)),
        reading("A.pre F.pre", norm="derf"),
        "derf",
    ),
    "seednorm": (lambda: with_norm(Block, SeeDNorm), reading("A.pre F.pre", norm="seednorm"), "seednorm"),
    "bhyt": (lambda: with_norm(Block, BHyT), reading("A.pre F.pre", norm="bhyt"), "bhyt"),
    "scalenorm": (lambda: with_norm(Block, ScaleNorm), reading("A.pre F.pre", norm="l2norm"), "scalenorm"),
    "sigma-reparam": (lambda: tower(sigma_reparam), reading("A.post F.post", final=False), "sigma-reparam"),
    "siamesenorm": (Siamese, None, "siamesenorm"),
    "hyper-connections": (
        HyperConnections,
        reading("A.pre F.pre", **(LEARNT | {"join": "streams"})),
        "hyper-connections",
    ),
    "hyper-connections-dynamic": (
        DynamicHyperConnections,
        reading("A.pre F.pre", **(LEARNT | {"join": "streams"})),
        "hyper-connections",
    ),
    "hyper-connections-mean": (
        MeanHyperConnections,
        reading("A.pre F.pre", **(LEARNT | {"join": "streams"})),
        "hyper-connections",
    ),
    "mhc-lite": (
        PermutedConnections,
        reading("A.pre F.pre", **(LEARNT | {"join": "streams"})),
        "mhc-lite",
    ),
    "kromhc": (
        KroneckerConnections,
        reading("A.pre F.pre", **(LEARNT | {"join": "streams"})),
        "kromhc",
    ),
    "gtrxl": (lambda: pre_tower(GTrXL), reading("A.pre F.pre", **(LEARNT | {"join": "gate"})), "gtrxl"),
    "highway-name": (
        lambda: tower(HighwayNoNorm),
        reading("A.none F.none", final=False, **(LEARNT | {"join": "gate"})),
        "highway",
    ),
    "keel-first-block": (lambda: keel_tower(3), None, "keel"),
    "keel-two": (lambda: keel_tower(2), None, "keel"),
    "dslm": (
        weighted(0.8, 0.6),
        reading("A.pre F.pre", join="scaled", stream_scale=0.8, branch_scale=0.6),
        "dslm",
    ),
    "depth-mup": (weighted(1.0, 0.25), reading("A.pre F.pre", join="scaled", branch_scale=0.25), "depth-mup"),
    "unit-scaling": (alternating, None, "unit-scaling"),
    "unscaled": (
        weighted(0.8, 0.8),
        reading("A.pre F.pre", join="scaled", stream_scale=0.8, branch_scale=0.8),
        None,
    ),
    "no-norm-name": (
        lambda: tower(NoNorm),
        reading("A.none F.none", norm="none", final=False),
        "residual-no-norm",
    ),
    "qk-norm-alone": (lambda: pre_tower(lambda: Block(NormedProjections(False))), PRE, None),
}
for name, (build, expected, scheme) in NAMED.items():
    case(name, build, *([expected] if expected is not None else []), schemes={scheme})
