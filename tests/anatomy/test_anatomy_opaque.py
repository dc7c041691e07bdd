"""Tests of readings with opaque ops, with tensors without data, and of memory."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from normscope.anatomy import capture, measuring, read_anatomy
from normscope.anatomy.opaque import which_norm
from normscope.anatomy.reading import record_forward


@torch.library.custom_op("normscope_test::fused_norm", mutates_args=())
def fused_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@torch.library.custom_op("normscope_test::mystery", mutates_args=())
def mystery(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sin()


fused_norm.register_fake(lambda x, weight: torch.empty_like(x))
mystery.register_fake(lambda x, weight: torch.empty_like(x))


class Layer(nn.Module):
    def __init__(self, op: object) -> None:
        super().__init__()
        self.op = op
        self.gain = nn.Parameter(torch.rand(16) + 0.5)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.op(x, self.gain)).relu())  # type: ignore[operator]


def tower(op: object) -> nn.Sequential:
    return nn.Sequential(*(Layer(op) for _ in range(3)))


@torch.no_grad()
def test_a_fused_norm_is_recognised_by_what_it_does() -> None:
    anatomy = read_anatomy(tower(fused_norm), torch.randn(2, 5, 16))
    assert anatomy.unread == ()
    assert {(b.placement, b.norm) for b in anatomy.branches} == {("pre", "rmsnorm")}
    assert anatomy.branches[0].norms[0].weight == "0.gain"


def test_any_other_opaque_op_is_said() -> None:
    anatomy = read_anatomy(tower(mystery), torch.randn(2, 5, 16))
    assert any("normscope_test.mystery" in line and "3 calls" in line for line in anatomy.unread)
    assert {b.norm for b in anatomy.branches} == {"none"}


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_which_norm_sees_the_gain_and_its_offset(kind: str, offset: float) -> None:
    x, gain, shift = torch.randn(3, 4, 8), torch.randn(8), torch.randn(8)
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6) * (gain + offset) + shift
    assert which_norm((x, gain, shift), y) == kind
    assert which_norm((x, gain, shift), y * x.abs()) is None


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=260, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel._from_config(config)


def test_models_without_data_read_as_those_with() -> None:
    ids = torch.randint(0, 260, (2, 12))
    real = read_anatomy(gpt2(), ids)
    with FakeTensorMode():
        fake = gpt2()
    with torch.device("meta"):
        meta = gpt2()
    assert read_anatomy(fake, ids).to_dict() == real.to_dict()
    assert read_anatomy(meta, ids).to_dict() == real.to_dict()
    assert real.stacks[0].name == "decoder"


def test_recording_keeps_no_activation_alive() -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def look(module: nn.Module, args: object, out: Tensor) -> None:
        gc.collect()
        alive.append(seen[0]() is not None)

    model = tower(fused_norm).requires_grad_(False)
    model[0].register_forward_hook(lambda m, args, out: seen.append(weakref.ref(out)))
    model[2].register_forward_hook(look)
    graph = record_forward(model, torch.randn(2, 5, 16))
    assert alive == [False]
    assert len(graph.ops) > 9


def test_every_branch_adds_up_on_gpt2() -> None:
    """Assert that the captured terms of each sum add up to the captured sum: the sites are right."""
    torch.manual_seed(0)
    model, ids = gpt2(), torch.randint(0, 260, (2, 12))
    anatomy = read_anatomy(model, ids)
    sites = [site for b in anatomy.branches for site in (b.entry, b.output, b.sum)]
    with measuring(model):
        _, got = capture(model, lambda: model(ids), sites)
    for branch in anatomy.branches:
        torch.testing.assert_close(got[branch.sum], got[branch.entry] + got[branch.output])
    roles = [p.roles for b in anatomy.blocks[0].branches for p in b.projections]
    assert roles == [("q", "k", "v"), ("o",), ("up",), ("down",)]
    assert {p.feature_axis for b in anatomy.branches for p in b.projections} == {1}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_b2t_in_any_order_of_its_terms(order: tuple[int, ...]) -> None:
    class Bottom2Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.feed_forward = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            a = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
            terms = (x, a, self.feed_forward(a))
            return self.norm2(terms[order[0]] + terms[order[1]] + terms[order[2]])

    anatomy = read_anatomy(nn.Sequential(*(Bottom2Top() for _ in range(3))), torch.randn(2, 5, 16))
    assert [b.placement for b in anatomy.branches] == ["post"] * 6
    assert [b.scheme for b in anatomy.branches] == ["b2t"] * 6
