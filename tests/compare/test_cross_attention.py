"""Cross-attention with one packed weight, against one with a projection for each operand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normscope
from normscope.compare.function_words import Wording
from normscope.compare.types import Difference, Part

WIDTH, HEADS, VOCABULARY = 32, 4, 40


class Projected(nn.Module):
    """Attention to a memory with four linear layers, in the place of PyTorch's own."""

    def __init__(self, packed: nn.MultiheadAttention, scale: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        weights, biases = (each.detach().chunk(3) for each in (packed.in_proj_weight, packed.in_proj_bias))
        with torch.no_grad():
            for linear, weight, bias in zip((self.q, self.k, self.v), weights, biases, strict=True):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
        self.o.load_state_dict(packed.out_proj.state_dict())
        self.scale = scale

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        parts = (self.q(x), self.k(memory), self.v(memory))
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in parts)
        return self.o((F.softmax(q @ k.mT * self.scale, -1) @ v).transpose(1, 2).flatten(2))


class Block(nn.TransformerDecoderLayer):
    """PyTorch's own decoder block, with another cross-attention where there is one."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        x = self.norm1(x + self.self_attn(x, x, x, need_weights=False)[0])
        if isinstance(self.multihead_attn, Projected):
            y = self.multihead_attn(x, memory)
        else:
            y = self.multihead_attn(x, memory, memory, need_weights=False)[0]
        x = self.norm2(x + y)
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class Reader(nn.Module):
    """Texts (B, T) and (B, S) → logits, by two blocks of an encoder and two of a decoder."""

    def __init__(self, scale: float | None = None, times: tuple[float, float] = (1.0, 1.0)) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {
            "d_model": WIDTH,
            "nhead": HEADS,
            "dim_feedforward": 64,
            "dropout": 0.0,
            "batch_first": True,
        }
        self.times = times
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**options) for _ in range(2))
        self.decoder = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
        for block in self.decoder if scale is not None else ():
            block.multihead_attn = Projected(block.multihead_attn, scale)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory, x = self.times[0] * self.words(src), self.times[1] * self.words(tgt)
        for layer in self.encoder:
            memory = layer(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


def found(a: nn.Module, b: nn.Module) -> tuple[Difference, ...]:
    generator = torch.Generator().manual_seed(1)
    src, tgt = (torch.randint(VOCABULARY, (3, n), generator=generator) for n in (12, 9))
    diff = normscope.diff(a, b, batch={"src": src, "tgt": tgt}, parts="function", reraise=True)
    return diff.of(Part.FUNCTION)


PLAIN = (WIDTH / HEADS) ** -0.5


def test_packed_and_own_projections_are_the_same() -> None:
    assert found(Reader(), Reader(PLAIN)) == ()


@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 8])
@pytest.mark.parametrize("is_of_a", [True, False])
def test_the_scale_of_a_cross_attention_is_named_beside_a_packed_weight(scale: float, is_of_a: bool) -> None:
    pair = (Reader(scale), Reader()) if is_of_a else (Reader(), Reader(scale))
    (each,) = found(*pair)
    assert each.name == "attention-scale"
    assert each.confirmed
    values = (each.a, each.b) if is_of_a else (each.b, each.a)
    assert values == (pytest.approx(scale), pytest.approx(PLAIN))


@pytest.mark.parametrize(
    ("times", "sites"),
    [((3.0, 1.0), ("",)), ((1.0, 3.0), ("decoder",)), ((3.0, 3.0), ("encoder", "decoder"))],
)
@pytest.mark.parametrize("is_of_a", [True, False])
def test_the_scale_of_the_embeddings_is_named_at_the_stacks_that_have_it(
    times: tuple[float, float], sites: tuple[str, ...], is_of_a: bool
) -> None:
    pair = (Reader(times=times), Reader()) if is_of_a else (Reader(), Reader(times=times))
    (each,) = found(*pair)
    assert (each.name, each.sites) == ("embedding-scale", tuple((site, site) for site in sites))
    assert each.confirmed


def test_a_changed_weight_in_a_block_that_a_lacks_has_no_site_there() -> None:
    sides = [SimpleNamespace(site_at={(0, 0, 0): name}.__getitem__) for name in ("a.0", "b.0")]
    sides[1].site_at = {(0, 0, 0): "b.0", (0, 1, 0): "b.1"}.__getitem__
    wording = Wording(sides[0], sides[1], SimpleNamespace(to_a={(0, 0, 0): (0, 0, 0)}))  # type: ignore[arg-type]
    changes: Any = [SimpleNamespace(name="weights", at=(0, i, 0), a=1, b=2, message="") for i in (0, 1)]
    assert wording.changed(changes).sites == (("a.0", "b.0"), (None, "b.1"))
