"""Notes on weights that load by name and shape, but that the two models use in other ways."""

from collections.abc import Callable
from typing import Any

import pytest
import reimplemented
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normscope

IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
END = ": a checkpoint of A that is loaded by names would compute something else in B."


def notes(a: nn.Module, b: nn.Module, **options: Any) -> list[str]:
    """The notes of two models with fresh weights that compute the same function."""
    found = normscope.diff(a, b, batch=IDS, parts="function", reraise=True, **options)
    assert found.differences == ()
    return [note.removesuffix(END) for note in found.notes if note.endswith(END)]


class Exchanged(reimplemented.NanoAttention):
    """Its rows are q, v, k."""

    def forward(self, x: Tensor) -> Tensor:
        q, v, k = map(reimplemented.heads, self.c_attn(x).chunk(3, -1))
        return self.c_proj(reimplemented.merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class ByHead(reimplemented.NanoAttention):
    """Its rows are those of q, k and v of the first head, of the second, …"""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.c_attn(x).unflatten(-1, (reimplemented.HEADS, 3, reimplemented.HEAD))
        q, k, v = rows.permute(3, 0, 2, 1, 4)
        return self.c_proj(reimplemented.merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Turned(nn.Linear):
    """A square weight that is multiplied without a transpose, as Conv1D's."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class OneMore(nn.LayerNorm):
    """Its gain is 1 + w."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class Swapped(reimplemented.MetaBlock):
    """w3 is the gate, and w1 is not."""

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        self.w1, self.w3 = self.w3, self.w1
        y = super().forward(x, angles, mask)
        self.w1, self.w3 = self.w3, self.w1
        return y


def _attention(kind: type[nn.Module]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for block in model.h:
            block.attn.__class__ = kind

    return change


def _turned(model: Any) -> None:
    model.h[0].attn.c_proj.__class__ = Turned


def _one_more(model: Any) -> None:
    for block in model.h:
        block.ln_1.__class__ = OneMore
        block.ln_1.weight.data.zero_()


def _swapped(model: Any) -> None:
    for block in model.layers:
        block.__class__ = Swapped


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], list[str]]] = {
    "order": (
        reimplemented.NanoGPT,
        _attention(Exchanged),
        ["B reads h.0.attn.c_attn.weight (and 3 more) as q, v, k where A reads q, k, v"],
    ),
    "by head": (
        reimplemented.NanoGPT,
        _attention(ByHead),
        ["B reads h.0.attn.c_attn.weight (and 3 more) as q, k, v of each head where A reads q, k, v"],
    ),
    "transposed": (reimplemented.NanoGPT, _turned, ["B needs A's h.0.attn.c_proj.weight transposed"]),
    "1 + w": (reimplemented.NanoGPT, _one_more, ["B needs A's h.0.ln_1.weight (and 1 more) minus 1"]),
    "gate and up": (
        reimplemented.Meta,
        _swapped,
        [
            "B uses layers.0.w1.weight (and 1 more) as A uses w3.weight",
            "B uses layers.0.w3.weight (and 1 more) as A uses w1.weight",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_weight_of_one_name_and_shape_that_is_used_otherwise_is_noted(name: str) -> None:
    build, change, expected = CASES[name]
    a, b = build(), build()
    change(b)
    assert notes(a, b) == expected
    assert notes(b, a) != []


@pytest.mark.parametrize("build", [reimplemented.NanoGPT, reimplemented.Meta, reimplemented.Gemma])
def test_nothing_is_noted_where_a_checkpoint_fits_or_does_not_load(build: Callable[[], nn.Module]) -> None:
    assert notes(build(), build()) == []


def test_nothing_is_noted_where_the_names_are_others() -> None:
    ours = "nn:decoder,scheme=gpt2,depth=2,width=32,heads=4,tie=true,activation=gelu-tanh"
    found = normscope.diff("hf:gpt2,n_layer=2,n_embd=32,n_head=4,vocab_size=256", ours, parts="function")
    assert not any(note.endswith(END) for note in found.notes)


class Renamed(reimplemented.NanoGPT):
    """Most of its names are others: `blocks` for `h`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self._modules.pop("h")

    @property
    def h(self) -> nn.Module:
        return self.blocks


def test_nothing_is_noted_where_most_names_are_others() -> None:
    a, b, renamed = reimplemented.NanoGPT(), reimplemented.NanoGPT(), Renamed()
    for model in (b, renamed):
        model.ln_f.__class__ = OneMore
        model.ln_f.weight.data.zero_()
    assert notes(a, b) == ["B needs A's ln_f.weight minus 1"]
    assert notes(a, renamed) == []


def test_nothing_is_noted_of_a_weight_that_the_user_mapped() -> None:
    a, b = reimplemented.Meta(), reimplemented.Meta()
    _swapped(b)
    given = {
        f"layers.0.{one}.weight": f"layers.0.{other}.weight" for one, other in (("w1", "w3"), ("w3", "w1"))
    }
    assert notes(a, b, map=given) == [
        "B uses layers.1.w1.weight as A uses w3.weight",
        "B uses layers.1.w3.weight as A uses w1.weight",
    ]
