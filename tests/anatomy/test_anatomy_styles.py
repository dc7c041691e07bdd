"""Tests of one model, attention and feed-forward in five placements, written in many styles: equal readings.

A style says how a block multiplies, norms and adds, or how its blocks are run; the labels come from the
placement alone. Every reading must be whole, and equal to the label.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normscope.anatomy import read_anatomy

B, T, D, HEADS, HIDDEN, BLOCKS = 2, 6, 8, 2, 12, 2
PLACEMENTS = ("pre", "post", "res-post", "peri", "none")
STYLES: dict[str, type["Block"]] = {}


class Block(nn.Module):
    """The parts of a block. A style overrides one or two of the methods that join them."""

    def __init__(self, placement: str) -> None:
        super().__init__()
        self.placement = placement
        shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (D, HIDDEN), "down": (HIDDEN, D)}
        self.weights = nn.ParameterDict({k: nn.Parameter(torch.randn(s) * 0.3) for k, s in shapes.items()})
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(D)) for _ in range(4))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(D)) for _ in range(4))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        STYLES[cls.__name__] = cls

    def forward(self, x: Any) -> Any:
        return self.sublayer(self.sublayer(x, self.attend, 0), self.feed, 1)

    def sublayer(self, x: Tensor, branch: Callable[[Tensor], Tensor], index: int) -> Tensor:
        before, after = self.placement in ("pre", "peri"), self.placement in ("res-post", "peri")
        y = branch(self.norm(x, index) if before else x)
        x = self.add(x, self.norm(y, 2 + index) if after else y)
        return self.norm(x, index) if self.placement == "post" else x

    def norm(self, x: Tensor, index: int) -> Tensor:
        return F.layer_norm(x, (D,), self.gains[index], self.shifts[index])

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def times(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name]

    def feed(self, x: Tensor) -> Tensor:
        return self.times(self.times(x, "up").relu(), "down")

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(self.times(x, name)) for name in "qkv")
        return self.times(self.mix(q, k, v).transpose(1, 2).flatten(2), "o")

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


STYLES["matmul"] = Block


class Einsum(Block):
    def feed(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("btd,dh->bth", x, self.weights["up"]).relu()
        return torch.einsum("bth,hd->btd", hidden, self.weights["down"])

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhe->bthe", x, self.weights[n].unflatten(1, (HEADS, -1))) for n in "qkv")
        p = torch.einsum("bthe,bshe->bhts", q, k).softmax(-1)
        out = self.weights["o"].unflatten(0, (HEADS, -1))
        return torch.einsum("bthe,hed->btd", torch.einsum("bhts,bshe->bthe", p, v), out)


class EinsumFeaturesFirst(Block):
    """Operands and outputs in another order: (h, b, t)."""

    def feed(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("dh,btd->hbt", self.weights["up"], x).relu()
        return torch.einsum("hd,hbt->btd", self.weights["down"], hidden)


class Einops(Block):
    def heads(self, x: Tensor) -> Tensor:
        return einops.rearrange(x, "b t (h e) -> (b h) t e", h=HEADS)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = einops.einsum(
            einops.einsum(q, k, "n t e, n s e -> n t s").softmax(-1), v, "n t s, n s e -> n t e"
        )
        return einops.rearrange(y, "(b h) t e -> b h t e", h=HEADS)

    def feed(self, x: Tensor) -> Tensor:
        rows = einops.rearrange(x, "b t d -> (b t) d")
        return einops.rearrange(super().feed(rows), "(b t) d -> b t d", b=B)


class WeightFirst(Block):
    """W x with the features in the second-last axis."""

    def times(self, x: Tensor, name: str) -> Tensor:
        return (self.weights[name].T @ x.permute(0, 2, 1)).permute(0, 2, 1)


class ChannelsFirst(Block):
    """Pointwise convolutions of (B, d, T)."""

    def times(self, x: Tensor, name: str) -> Tensor:
        return F.conv1d(x.mT, self.weights[name].T[..., None]).mT


class Linear(Block):
    def times(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name].T)


class Bmm(Block):
    def times(self, x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, self.weights[name].expand(B, -1, -1))


class Addmm(Block):
    def times(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights[name][0]
        return torch.addmm(bias, x.reshape(B * T, -1), self.weights[name]).view(B, T, -1)


class Baddbmm(Block):
    """The product of queries and keys (baddbmm) includes the mask and the scale."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        mask = torch.full((T, T), float("-inf")).triu(1).expand(len(q), -1, -1)
        logits = torch.baddbmm(mask, q, k.mT, beta=1.0, alpha=0.5)
        return torch.bmm(logits.softmax(-1), v).unflatten(0, (B, HEADS))


class Tensordot(Block):
    def times(self, x: Tensor, name: str) -> Tensor:
        return torch.tensordot(x, self.weights[name], dims=1)


class InPlace(Block):
    def feed(self, x: Tensor) -> Tensor:
        return self.times(self.times(x, "up").relu_(), "down")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        x += y
        return x


class OutArgument(Block):
    """The sum is written into an existing buffer."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.copy_(x).add_(y)
        return out


class WrittenNorm(Block):
    def norm(self, x: Tensor, index: int) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        unit = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return torch.addcmul(self.shifts[index], unit, self.gains[index])


class VarMeanNorm(Block):
    def norm(self, x: Tensor, index: int) -> Tensor:
        var, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return self.gains[index] * ((x - mean) / (var + 1e-5).sqrt()) + self.shifts[index]


class EinsumNorm(Block):
    """The variance as a product of the centred vector with itself."""

    def norm(self, x: Tensor, index: int) -> Tensor:
        centred = x - einops.reduce(x, "b t d -> b t 1", "mean")
        var = einops.reduce(centred**2, "b t d -> b t 1", "mean")
        return centred / (var + 1e-5).sqrt() * self.gains[index] + self.shifts[index]


class Tuples(Block):
    def forward(self, state: Any) -> Any:
        x, step = state if isinstance(state, tuple) else (state, 0)
        return super().forward(x), step + 1


@dataclass
class State:
    """A block's output."""

    x: Tensor
    seen: list[Tensor]


class Dataclasses(Block):
    def forward(self, state: Any) -> Any:
        state = state if isinstance(state, State) else State(state, [])
        return State(super().forward(state.x), [*state.seen, state.x])


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Cached(Block):
    """Keys and values are written into a cache and read from it."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.zeros(B, HEADS, 2 * T, D // HEADS) for _ in range(2))
        keys[:, :, :T], values[:, :, :T] = k, v
        return F.scaled_dot_product_attention(q, keys[:, :, :T], values[:, :, :T])


class Packed(Block):
    """One matrix for queries, keys and values, one for the gate and the up projection."""

    def attend(self, x: Tensor) -> Tensor:
        packed = torch.cat([self.weights[name] for name in "qkv"], 1)
        q, k, v = map(self.heads, (x @ packed).chunk(3, -1))
        return self.times(self.mix(q, k, v).transpose(1, 2).flatten(2), "o")


class HeadByHead(Block):
    def attend(self, x: Tensor) -> Tensor:
        heads = []
        for columns in torch.arange(D).chunk(HEADS):
            q, k, v = (x @ self.weights[name][:, columns] for name in "qkv")
            heads.append((q @ k.mT).softmax(-1) @ v)
        return self.times(torch.cat(heads, -1), "o")


class SequenceFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(self.times(x, name)) for name in "qkv")
        return self.times(self.mix(q, k, v).permute(2, 0, 1, 3).flatten(2), "o")


class Rows(Block):
    """The stream is (B·T, d); only the attention separates sequences."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, (B, T))

    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x.view(B, T, D)).view(B * T, D)


class Vmapped(Block):
    """The feed-forward is written for one token, the whole block for one sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(0, 1)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(self.times(x, name)) for name in "qkv")
        p = (q @ k.mT).softmax(-1)
        return self.times((p @ v).transpose(0, 1).flatten(1), "o")


class Compiled(Block):
    def __init__(self, placement: str) -> None:
        super().__init__(placement)
        self.attend = torch.compile(super().attend, backend="eager")  # type: ignore[method-assign]


class Autocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Alpha(Block):
    """torch.add with its factor, the terms swapped."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(y, x, alpha=1)


class StackedSum(Block):
    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([x, y]).sum(0)


class FunctionalCall(Block):
    def feed(self, x: Tensor) -> Tensor:
        layer = nn.Linear(D, HIDDEN, bias=False, device="meta")
        hidden = torch.func.functional_call(layer, {"weight": self.weights["up"].T}, x)
        return self.times(F.gelu(hidden), "down")


class Model(nn.Module):
    """Embeddings, blocks, final norm (but for Post-LN), head; `frozen` runs the embedding under no_grad."""

    def __init__(self, style: type[Block], placement: str, frozen: bool = False) -> None:
        super().__init__()
        self.frozen = frozen
        self.embed, self.positions = nn.Embedding(20, D), nn.Parameter(torch.randn(T, D))
        self.blocks = nn.ModuleList(style(placement) for _ in range(BLOCKS))
        self.final = nn.LayerNorm(D) if placement in ("pre", "peri") else nn.Identity()
        self.head = nn.Linear(D, 20)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.frozen and torch.is_grad_enabled()):
            x: Any = self.embed(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        x = x[0] if isinstance(x, tuple) else x.x if isinstance(x, State) else x
        return self.head(self.final(x.float()))


def ids() -> Tensor:
    """Two sequences."""
    return torch.randint(0, 20, (B, T))


def check(model: nn.Module, placement: str) -> None:
    """Assert that the reading equals the label and is complete."""
    anatomy = read_anatomy(model, ids())
    assert anatomy.unread == ()
    (stack,) = anatomy.stacks
    assert stack.complete
    assert len(stack.blocks) == BLOCKS
    norm = "none" if placement == "none" else "layernorm"
    branches = [("attention", placement, norm, "add"), ("feed-forward", placement, norm, "add")]
    assert [(b.kind, b.placement, b.norm, b.join) for b in anatomy.branches] == BLOCKS * branches
    assert (stack.final_norm is not None) == (placement in ("pre", "peri"))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("style", STYLES)
def test_every_style_reads_as_its_placement(style: str, placement: str) -> None:
    check(Model(STYLES[style], placement), placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_embedding_under_no_grad_is_read(placement: str) -> None:
    check(Model(Block, placement, frozen=True), placement)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_traced_model_is_read(placement: str) -> None:
    traced = torch.jit.trace(Model(Block, placement), (ids(),))
    check(traced, placement)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_scripted_model_is_read(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(D, HEADS, HIDDEN, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
    anatomy = read_anatomy(torch.jit.script(encoder), torch.randn(B, T, D))
    assert anatomy.unread == ()
    assert [b.placement for b in anatomy.branches] == 2 * BLOCKS * ["pre" if norm_first else "post"]


def models() -> Iterator[tuple[str, nn.Module]]:
    """Stacks of feed-forwards only, one for each style."""
    for name, style in STYLES.items():
        if style.feed is not Block.feed or style.times is not Block.times:
            yield name, style("pre")


class FeedForwardOnly(nn.Module):
    """x + F(norm(x)) with the feed-forward of a style."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block.feed(self.block.norm(x, 0))


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("name", [name for name, _ in models()])
def test_a_stack_of_feed_forwards_alone_is_read(name: str, batch: int) -> None:
    if batch != B and name in {"Bmm", "Addmm", "Einops"}:
        pytest.skip("the style is written for one batch size")
    anatomy = read_anatomy(
        nn.Sequential(FeedForwardOnly(STYLES[name]("pre")), FeedForwardOnly(STYLES[name]("pre"))),
        torch.randn(batch, T, D),
    )
    assert anatomy.unread == ()
    assert [(b.kind, b.placement) for b in anatomy.branches] == 2 * [("feed-forward", "pre")]
    assert [p.roles for p in anatomy.branches[0].projections] == [("up",), ("down",)]
