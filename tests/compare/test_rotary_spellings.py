"""Rotary positions are read however they are written."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.anatomy import Anatomy
from normscope.anatomy.assemble import assemble
from normscope.anatomy.axes import counted
from normscope.anatomy.reading import record_forward
from normscope.compare.structure import read_for_structure, structure_of
from normscope.compare.types import Place
from normscope.subjects import make_subject
from thinned import thinned

HEADS, WIDTH, TOKENS, BASE = 2, 8, 6, 100.0
Turn = Callable[[Tensor], Tensor]
"""Rotation of queries or keys (B, T, H, K)."""


def angles(tokens: int, pairs: int) -> Tensor:
    return torch.arange(tokens)[:, None] * BASE ** (-torch.arange(pairs) / pairs)


def tables(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, 1, K/2)."""
    angle = angles(x.shape[1], x.shape[-1] // 2)[:, None]
    return angle.cos(), angle.sin()


def halves(x: Tensor) -> Tensor:
    cos, sin = (torch.cat((t, t), -1) for t in tables(x))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin


def halves_apart(x: Tensor) -> Tensor:
    cos, sin = tables(x)
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, one * sin + two * cos), -1)


def swapped(x: Tensor) -> Tensor:
    """Halves whose features come out in another order, which queries and keys share."""
    cos, sin = tables(x)
    one, two = x.chunk(2, -1)
    return torch.stack((one * sin + two * cos, one * cos - two * sin), -1).flatten(-2)


def neighbours(x: Tensor) -> Tensor:
    cos, sin = tables(x)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def complex_numbers(x: Tensor) -> Tensor:
    angle = angles(x.shape[1], x.shape[-1] // 2)[:, None]
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def written(x: Tensor) -> Tensor:
    cos, sin = tables(x)
    y = torch.empty_like(x)
    y[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    y[..., 1::2] = x[..., 1::2] * cos + x[..., ::2] * sin
    return y


def matrices(tokens: int, width: int, layout: str = "halves") -> Tensor:
    """One matrix (T, K, K) for each position."""
    angle, half = angles(tokens, width // 2), width // 2
    found = torch.zeros(tokens, width, width)
    for i in range(half):
        one, two = (i, i + half) if layout == "halves" else (2 * i, 2 * i + 1)
        found[:, one, one] = found[:, two, two] = angle[:, i].cos()
        found[:, one, two], found[:, two, one] = -angle[:, i].sin(), angle[:, i].sin()
    return found


def by_matmul(x: Tensor) -> Tensor:
    turn = matrices(x.shape[1], x.shape[-1], "neighbours")
    return (turn[:, None] @ x[..., None]).squeeze(-1)


def by_rows(x: Tensor) -> Tensor:
    """Rows times matrices, tokens in front."""
    turn = matrices(x.shape[1], x.shape[-1])
    rows = x.transpose(0, 1).flatten(1, 2) @ turn.mT
    return rows.unflatten(1, (x.shape[0], -1)).transpose(0, 1)


def by_einsum(x: Tensor) -> Tensor:
    return torch.einsum("tij,bthj->bthi", matrices(x.shape[1], x.shape[-1]), x)


def by_signs(x: Tensor) -> Tensor:
    """The second term by a constant matrix that swaps the features of each pair."""
    cos, sin = (t.repeat_interleave(2, -1) for t in tables(x))
    swap = torch.block_diag(*[torch.tensor([[0.0, 1.0], [-1.0, 0.0]])] * (x.shape[-1] // 2))
    return x * cos + x @ swap * sin


def one_by_one(x: Tensor) -> Tensor:
    """A loop over the positions."""
    turn = matrices(x.shape[1], x.shape[-1])
    return torch.stack([x[:, t] @ turn[t].T for t in range(x.shape[1])], 1)


def partly(turn: Turn, *, behind: bool = False) -> Turn:
    """Half of the features are rotated."""

    def turned(x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat((one, turn(two)) if behind else (turn(one), two), -1)

    return turned


SPELLINGS: dict[str, tuple[Turn, str, int]] = {
    "halves": (halves, "halves", WIDTH),
    "halves, terms apart": (halves_apart, "halves", WIDTH),
    "halves, features in another order": (swapped, "halves", WIDTH),
    "neighbours": (neighbours, "neighbours", WIDTH),
    "complex": (complex_numbers, "neighbours", WIDTH),
    "written in place": (written, "neighbours", WIDTH),
    "matrices, matmul": (by_matmul, "neighbours", WIDTH),
    "matrices, rows": (by_rows, "halves", WIDTH),
    "matrices, einsum": (by_einsum, "halves", WIDTH),
    "a constant swap": (by_signs, "neighbours", WIDTH),
    "one position after another": (one_by_one, "halves", WIDTH),
    "the first half": (partly(halves), "halves", WIDTH // 2),
    "the second half": (partly(neighbours, behind=True), "neighbours", WIDTH // 2),
}


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads in groups of one, whose axis stands behind the queries' tokens in the product."""
    scores = torch.einsum("bqghd,bkgd->bghqk", q[:, :, :, None], k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bghqk,bkgd->bqghd", weights, v).flatten(2, 3)


def into_memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The product is added to memory of any content, times zero."""
    batch, tokens, heads, width = q.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    memory = torch.full((batch * heads, tokens, tokens), 3.0).cumsum(-1) * torch.inf
    scores = torch.baddbmm(memory, q, k.mT, beta=0.0, alpha=1 / math.sqrt(width))
    weights = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
    return (weights @ v).unflatten(0, (batch, heads)).transpose(1, 2)


def evens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The tokens stand in another order."""
    order = torch.cat((torch.arange(0, TOKENS, 2), torch.arange(1, TOKENS, 2)))
    q, k, v = (t.index_select(1, order).transpose(1, 2) for t in (q, k, v))
    seen = order[:, None] >= order
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return y.transpose(1, 2).index_select(1, order.argsort())


ATTENTIONS = {
    "sdpa": sdpa,
    "einsum": einsum,
    "grouped": grouped,
    "into memory": into_memory,
    "evens first": evens_first,
}


class Attention(nn.Module):
    """Pre-norm attention with a rotation of one's own."""

    def __init__(self, turn: Turn, attend: Callable[..., Tensor], fused: bool) -> None:
        super().__init__()
        features = HEADS * WIDTH
        self.norm, self.turn, self.attend = nn.LayerNorm(features), turn, attend
        self.maps = nn.ModuleList(nn.Linear(features, 3 * features // (1 if fused else 3)) for _ in "qkv")
        self.fused, self.out = fused, nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        maps: Any = self.maps
        if self.fused:
            q, k, v = maps[0](y).unflatten(-1, (HEADS, 3 * WIDTH)).chunk(3, -1)
        else:
            q, k, v = (each(y).unflatten(-1, (HEADS, WIDTH)) for each in maps)
        return x + self.out(self.attend(self.turn(q), self.turn(k), v).flatten(-2))


class Model(nn.Module):
    def __init__(self, turn: Turn, attend: Callable[..., Tensor] = sdpa, *, fused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, HEADS * WIDTH)
        self.layers = nn.Sequential(*(Attention(turn, attend, fused) for _ in range(2)))
        self.head = nn.Linear(HEADS * WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids)))


def attentions(model: nn.Module) -> list[dict[str, Any]]:
    """The facts of all attentions."""
    subject = make_subject(model, torch.randint(32, (3, TOKENS), generator=torch.Generator().manual_seed(0)))
    anatomy: Anatomy = read_for_structure(subject)
    found: list[dict[str, Any]] = []

    def walk(place: Place) -> None:
        if place.facts.get("kind") == "attention":
            found.append(dict(place.facts))
        for part in place.parts:
            walk(part)

    walk(structure_of(subject, anatomy))
    return found


@pytest.mark.parametrize(("spelling", "attend"), thinned(SPELLINGS, ATTENTIONS))
def test_rotary_positions_are_read_in_every_spelling(spelling: str, attend: str) -> None:
    turn, layout, width = SPELLINGS[spelling]
    for fused in (False, True):
        found = attentions(Model(turn, ATTENTIONS[attend], fused=fused))
        assert len(found) == 2
        for facts in found:
            read = {
                name: facts.get(name) for name in ("attention_positions", "rotary_layout", "rotary_width")
            }
            assert read == {"attention_positions": "rotary", "rotary_layout": layout, "rotary_width": width}
            assert facts["rotary_base"] == pytest.approx(BASE, rel=1e-3)
            assert facts["rotary_scaling"] is None
            assert (facts["heads"], facts["head_width"]) == (HEADS, WIDTH)


@pytest.mark.parametrize("turn", [by_matmul, by_rows, by_einsum, one_by_one])
def test_a_constant_matrix_keeps_what_an_axis_counts(turn: Turn) -> None:
    graph = record_forward(Model(turn), torch.randint(32, (3, TOKENS)))
    assemble(graph)
    found = {v for s in graph.values if s.sum is not None for b in s.sum.branches for v in b.attentions}
    assert found
    assert all(counted(attention.query, [-1]) == {"feature"} for attention in found)


def scaled(x: Tensor) -> Tensor:
    return x * (1 + torch.arange(x.shape[1]))[:, None, None]


def mixed(x: Tensor) -> Tensor:
    return x + x.roll(1, 1)


STILL: dict[str, Turn] = {
    "nothing": lambda x: x,
    "a factor": lambda x: 2 * x,
    "features moved": lambda x: x.flip(-1),
}
OTHER: dict[str, Turn] = {"a factor for each position": scaled, "tokens mixed": mixed}


@pytest.mark.parametrize("spelling", STILL)
def test_a_way_that_is_the_same_at_all_positions_has_none(spelling: str) -> None:
    assert [facts["attention_positions"] for facts in attentions(Model(STILL[spelling]))] == [None, None]


@pytest.mark.parametrize("spelling", OTHER)
def test_what_is_no_rotation_is_unread(spelling: str) -> None:
    assert all("attention_positions" not in facts for facts in attentions(Model(OTHER[spelling])))


class Normed(nn.Module):
    """A rotation with a norm before it or behind it."""

    def __init__(self, norm: nn.Module, *, behind: bool) -> None:
        super().__init__()
        self.norm, self.behind = norm, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(halves(x)) if self.behind else halves(self.norm(x))


NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "rms with a gain": (lambda: nn.RMSNorm(WIDTH), True),
    "rms without a gain": (lambda: nn.RMSNorm(WIDTH, elementwise_affine=False), False),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_behind_the_rotation_is_told_where_it_differs(norm: str) -> None:
    make, differs = NORMS[norm]
    before, behind = (
        {f["qk_norm"] for f in attentions(Model(Normed(make(), behind=b)))} for b in (False, True)
    )
    assert before == {"head"}
    assert behind == ({"head, behind the rotation"} if differs else {"head"})
