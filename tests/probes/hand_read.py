"""A small Transformer in four placements with a handwritten anatomy, so that tests do not need the reader."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normscope.anatomy import Anatomy, AttentionSites, Block, Branch, Norm, Projection, Site, Stack
from normscope.subjects import Subject

PLACEMENTS = ("pre", "post", "res-post", "peri")
LAYERNORM = "aten.native_layer_norm.default"
ADD = "aten.add.Tensor"
WIDTH, HEADS, VOCAB, EPS = 8, 2, 11, 1e-5


class Attention(nn.Module):
    """Causal attention with one matmul for v, q and k, in this order: the order does not reveal the roles."""

    def __init__(self) -> None:
        super().__init__()
        self.vqk = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.vqk(x).chunk(3, -1))
        logits = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        behind = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        probabilities = logits.masked_fill(behind, -torch.inf).softmax(-1)
        return self.o(torch.matmul(probabilities, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Sublayer(nn.Module):
    """x + F(x) with norms in the slots of the placement."""

    def __init__(self, f: nn.Module, placement: str) -> None:
        super().__init__()
        self.f, self.placement = f, placement
        for name in slots(placement):
            self.add_module(name, nn.LayerNorm(WIDTH, eps=EPS))

    def forward(self, x: Tensor) -> Tensor:
        term = self.f(self.branch_in(x) if "branch_in" in slots(self.placement) else x)
        if "branch_out" in slots(self.placement):
            term = self.branch_out(term)
        total = x + term
        return self.stream(total) if self.placement == "post" else total


class Toy(nn.Module):
    """Token ids (B, T) → logits (B, T, VOCAB)."""

    def __init__(self, placement: str = "pre", depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(Sublayer(Attention(), placement), Sublayer(FeedForward(), placement))
            for _ in range(depth)
        )
        self.final = nn.Identity() if placement == "post" else nn.LayerNorm(WIDTH, eps=EPS)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def slots(placement: str) -> tuple[str, ...]:
    return {
        "pre": ("branch_in",),
        "post": ("stream",),
        "res-post": ("branch_out",),
        "peri": ("branch_in", "branch_out"),
    }[placement]


def toy_anatomy(model: Toy) -> Anatomy:
    """The right reading of a `Toy`."""
    placement = model.blocks[0][0].placement
    blocks = tuple(_block(i, placement) for i in range(len(model.blocks)))
    final = None if placement == "post" else norm_of("final")
    hidden = blocks[-1].exit if final is None else final.output
    return Anatomy((Stack("decoder", blocks, final, hidden),))


def norm_of(path: str, kind: str = "layernorm", eps: float | None = EPS) -> Norm:
    """An `nn.LayerNorm` at `path`."""
    return Norm(
        kind, path, Site(path, 0, LAYERNORM, 0, -1), Site(path, 0, LAYERNORM, 0), eps, f"{path}.weight"
    )


def _block(i: int, placement: str) -> Block:
    attention, feed_forward = f"blocks.{i}.0", f"blocks.{i}.1"
    branches = (_attention(attention, placement), _feed_forward(feed_forward, placement))
    entry = Site(attention, 0, ADD, 0, -1)
    exit = Site(f"{feed_forward}.stream", 0, LAYERNORM, 0) if placement == "post" else branches[1].sum
    return Block(f"blocks.{i}", 0, branches, entry, exit)


def _branch(path: str, kind: Any, placement: Any, **more: Any) -> Branch:
    order = [slot for slot in ("branch_in", "branch_out", "stream") if slot in slots(placement)]
    return Branch(
        kind,
        placement,
        "layernorm",
        f"{path}.f",
        0,
        "add",
        None,
        None,
        None,
        entry=Site(path, 0, ADD, 0, -1),
        output=Site(path, 0, ADD, 0, -2),
        sum=Site(path, 0, ADD, 0),
        norms=tuple(norm_of(f"{path}.{slot}") for slot in order),
        **more,
    )


def _attention(path: str, placement: str) -> Branch:
    f = f"{path}.f"
    seen = AttentionSites(
        query=Site(f, 0, "aten.transpose.int", 1),
        key=Site(f, 0, "aten.transpose.int", 2),
        value=Site(f, 0, "aten.transpose.int", 0),
        logits=Site(f, 0, "aten._softmax.default", 0, -1),
        probabilities=Site(f, 0, "aten._softmax.default", 0),
    )
    projections = (
        linear(f"{f}.vqk", "q", "k", "v"),
        linear(f"{f}.o", "o"),
    )
    return _branch(path, "attention", placement, projections=projections, attention=(seen,))


def _feed_forward(path: str, placement: str) -> Branch:
    f = f"{path}.f"
    return _branch(
        path, "feed-forward", placement, projections=(linear(f"{f}.up", "up"), linear(f"{f}.down", "down"))
    )


def linear(path: str, *roles: str) -> Projection:
    """An `nn.Linear` without bias at `path`."""
    return Projection(f"{path}.weight", roles, Site(path, 0, "aten.mm.default", 0), 0)


def next_token_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def subject_of(model: nn.Module, batch: Any, loss_fn: Any = None) -> Subject:
    """A subject without a feed."""
    return Subject(model, batch, loss_fn, lambda: iter((batch,)), 0, type(model).__name__, "given")


def toy(placement: str = "pre", dtype: torch.dtype = torch.float64) -> tuple[Subject, Anatomy]:
    """A `Toy` in training mode, with its anatomy."""
    torch.manual_seed(0)
    model = Toy(placement).to(dtype)
    for name, parameter in model.named_parameters():  # norms that are not the identity's
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5) if name.endswith("weight") else nn.init.normal_(parameter)
    return subject_of(model, torch.randint(VOCAB, (3, 6)), next_token_loss), toy_anatomy(model)
