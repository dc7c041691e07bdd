"""Verdicts about norms and blocks as PyTorch has them, confirmed without normscope."""

import pytest
import torch
from plain_decoder import B, Lane, T, blocks, stacked
from torch import Tensor, nn


def test_c4_batch_norm_sees_its_batch_and_layer_norm_does_not():
    torch.manual_seed(41)
    x = torch.randn(512, 32) * torch.linspace(0.5, 2, 32) + torch.linspace(-1, 1, 32)
    batch, layer = nn.BatchNorm1d(32), nn.LayerNorm(32)
    whole = batch(x)[0]
    for size in (2, 8, 64):
        assert (batch(x[:size])[0] - whole).norm() / whole.norm() > 1e-3
        assert torch.allclose(layer(x[:size])[0], layer(x)[0], atol=1e-6)
    assert torch.allclose(layer(x[:1]), layer(x)[:1], atol=1e-6)
    with pytest.raises(ValueError, match="more than 1 value"):
        batch(x[:1])


def test_c5_padding_moves_the_real_tokens_of_batch_norm():
    torch.manual_seed(42)
    x, pad = torch.randn(4, 32, 16), torch.randn(16)
    padded = torch.cat((x, pad.expand(4, 16, 16)), 1)
    batch, layer = nn.BatchNorm1d(16), nn.LayerNorm(16)
    real, moved = batch(x.mT).mT, batch(padded.mT).mT[:, :32]
    assert (moved - real).norm() / real.norm() > 0.1
    assert torch.equal(layer(padded)[:, :32], layer(x))


class Snippet(nn.Module):
    """004 §3.3, `SublayerConnection`, which its own comment calls Post-LN; dropout is off."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, sublayer: nn.Module) -> Tensor:
        """The block as the paper prints it."""
        return x + sublayer(self.norm(x))


@torch.no_grad()
def test_c7_the_snippet_called_post_ln_is_torchs_pre_ln():
    torch.manual_seed(43)
    x = torch.randn(2, 5, 16)
    outputs = {}
    for first in (True, False):
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=first).eval()
        for bias in (layer.self_attn.out_proj.weight, layer.self_attn.out_proj.bias):
            bias.zero_()  # so that the feed-forward is all that the layer adds
        snippet = Snippet()
        feed_forward = nn.Sequential(layer.linear1, nn.ReLU(), layer.linear2)
        outputs[first] = (layer(x), snippet(x, feed_forward))
    assert torch.allclose(*outputs[True], atol=1e-5)
    assert not torch.allclose(*outputs[False], atol=1e-2)


@torch.no_grad()
def test_b18_the_template_of_004_is_pre_ln_and_mixes_a_batch():
    torch.manual_seed(44)
    x = torch.randn(5, 5, 16)
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=False, norm_first=True).eval()

    def template(x: Tensor) -> Tensor:
        normed = layer.norm1(x)
        x = x + layer.self_attn(normed, normed, normed)[0]
        return x + layer.linear2(torch.relu(layer.linear1(layer.norm2(x))))

    assert torch.allclose(template(x), layer(x), atol=1e-5)
    other = torch.cat((torch.randn(1, 5, 16), x[1:]))
    assert not torch.allclose(template(other)[1:], template(x)[1:], atol=1e-3), "sequences see one another"


@torch.no_grad()
def test_c8_the_first_block_of_pre_ln_adds_to_the_variance():
    x = torch.randn(1, B * T, 32)
    w = stacked(12, "xavier", [Lane(45)])
    after = {p: [float(s.var(-1).mean()) for s in blocks(x, w, p, 12)] for p in ("pre", "post")}
    assert after["pre"][1] > 1.05 * after["pre"][0]
    assert after["post"][1:] == pytest.approx([after["post"][1]] * 12, rel=0.05)


def gradients(placement: str, depth: int) -> list[float]:
    """‖∂(a random read-out)/∂W₂‖ by block, and ‖∂x_0‖/‖∂x_L‖ at the end of the list."""
    w = stacked(depth, "xavier", [Lane(46)])
    x = torch.randn(1, B * T, 32, generator=torch.Generator().manual_seed(46)).requires_grad_()
    streams = blocks(x, w, placement, depth)
    read = torch.randn(streams[-1].shape, generator=torch.Generator().manual_seed(47))
    downs = [w[f"{b}.down"] for b in range(depth)]
    *found, at_entry = torch.autograd.grad((streams[-1] * read).sum(), [*downs, x])
    return [*(float(g.norm()) for g in found), float(at_entry.norm() / read.norm())]


def test_b3_post_ln_alone_has_no_tilt():
    found = gradients("post", 12)[:-1]
    assert found[-1] < 2 * found[0], "the last gradient is not the very large one"


def test_c17_post_ln_alone_does_not_decay_exponentially():
    assert gradients("post", 32)[-1] > 0.1
    assert gradients("pre", 32)[-1] >= 1


@torch.no_grad()
def test_c19_a_gain_of_zero_is_the_identity_only_inside_the_branch():
    x = torch.randn(1, B * T, 32)
    for placement, shifted, same in (
        ("pre", 0.0, True),
        ("pre", 0.5, False),
        ("res-post", 0.0, True),
        ("post", 0.0, False),
    ):
        w = stacked(3, "xavier", [Lane(48)])
        for name, value in w.items():
            if name.endswith(".gain"):
                value.zero_()
            if name.endswith(".shift"):
                value.fill_(shifted)
        assert torch.allclose(blocks(x, w, placement, 3)[-1], x) is same, (placement, shifted)
