"""`EncoderDecoder` and `Vision`: their data flow, and invalid options."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope.anatomy import read_anatomy
from normscope.errors import UsageError
from normscope.nn import Block, EncoderDecoder, ModelConfig, Vision, Where, build
from normscope.nn.encoder_decoder import START, shifted

SMALL: dict[str, Any] = {"depth": 2, "width": 16, "heads": 2}
TEXT: dict[str, Any] = {**SMALL, "vocab": 11, "context": 16}
IMAGES: dict[str, Any] = {**SMALL, "image": 12, "patch": 4, "channels": 2, "classes": 5}


def test_deepnorm_knows_both_depths() -> None:
    """α and β of the paper's table for N encoder and M decoder blocks (three branches per decoder block)."""
    model = build("encoder-decoder", scheme="deepnorm", depth=3, encoder_depth=5, width=256)
    assert isinstance(model, EncoderDecoder)
    assert (len(model.encoder.blocks), len(model.decoder.blocks)) == (5, 3)
    n, m = 5, 3
    encoder, decoder = model.encoder.blocks[1], model.decoder.blocks[1]
    for residual in (encoder.attention_residual, encoder.feed_forward_residual):
        assert residual.join.stream_scale == pytest.approx(0.81 * (n**4 * m) ** (1 / 16))
    for residual in (decoder.attention_residual, decoder.cross_residual, decoder.feed_forward_residual):
        assert residual.join.stream_scale == pytest.approx((3 * m) ** 0.25)
    square = math.sqrt(2 / 512)
    for attention, beta in (
        (encoder.attention, 0.87 * (n**4 * m) ** (-1 / 16)),
        (decoder.attention, (12 * m) ** -0.25),
        (decoder.cross, (12 * m) ** -0.25),
    ):
        assert attention.v.weight.std().item() == pytest.approx(beta * square, rel=0.03)
        assert attention.q.weight.std().item() == pytest.approx(square, rel=0.03)


@pytest.mark.parametrize("given", [{}, {"encoder_depth": 3}])
def test_deepnorm_without_its_depth(given: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="without depth"):
        build("encoder-decoder", scheme="deepnorm", width=16, **given)


def test_deepnorms_encoder_without_the_depth_of_its_decoder() -> None:
    where = Where(1, depth=2, stack="encoder")
    with pytest.raises(UsageError, match="without depth"):
        Block(ModelConfig(scheme="deepnorm", width=16), where, causal=False)


def test_the_decoder_reads_the_labels_one_place_later() -> None:
    labels = torch.tensor([[4, 5, -100, 7], [-100, 2, 3, 1]])
    assert shifted(labels).tolist() == [[START, 4, 5, START], [START, START, 2, 3]]
    assert labels[0, 2] == -100
    model = build("encoder-decoder", **TEXT).double()
    ids = torch.randint(11, (2, 5))
    implied, said = model(ids, labels), model(ids, labels, decoder_ids=shifted(labels))
    assert torch.equal(implied.logits, said.logits)
    logs = implied.logits.log_softmax(-1)
    at = [(b, t) for b in range(2) for t in range(4) if labels[b, t] >= 0]
    expected = -torch.stack([logs[b, t, labels[b, t]] for b, t in at]).mean()
    torch.testing.assert_close(implied.loss, expected)


def test_who_sees_whom_in_an_encoder_decoder() -> None:
    model = build("encoder-decoder", **TEXT).double().eval()
    ids, decoder_ids = torch.randint(11, (2, 5)), torch.randint(11, (2, 4))
    before = model(ids, decoder_ids=decoder_ids).logits

    def moved(ids: Tensor, decoder_ids: Tensor) -> list[list[bool]]:
        return (model(ids, decoder_ids=decoder_ids).logits != before).any(-1).tolist()

    other = ids.clone()
    other[0, 4] = (other[0, 4] + 1) % 11
    assert moved(other, decoder_ids) == [[True] * 4, [False] * 4]
    other = decoder_ids.clone()
    other[1, 2] = (other[1, 2] + 1) % 11
    assert moved(ids, other) == [[False] * 4, [False, False, True, True]]


def test_tokens_are_shared_and_positions_are_not() -> None:
    model = build("encoder-decoder", **TEXT)
    assert isinstance(model, EncoderDecoder)
    assert model.embedding.tokens is model.decoder_embedding.tokens
    assert model.embedding.positions is not model.decoder_embedding.positions


def test_an_encoder_decoder_needs_something_to_say() -> None:
    with pytest.raises(UsageError, match="labels or decoder_ids"):
        build("encoder-decoder", **TEXT)(torch.zeros(1, 3, dtype=torch.long))


def test_vision_is_its_formula() -> None:
    model = build("vision", scheme="pre", **IMAGES).double().eval()
    assert isinstance(model, Vision)
    images = torch.randn(2, 2, 12, 12, dtype=torch.float64)
    patches = [images[:, :, i : i + 4, j : j + 4].flatten(1) for i in (0, 4, 8) for j in (0, 4, 8)]
    project, positions = model.patches.project, model.patches.positions
    assert positions is not None
    x = torch.stack(patches, dim=1) @ project.weight.flatten(1).T + project.bias + positions.weight
    for block in model.blocks:
        x = block(x)
    norm = nn.functional.layer_norm(x, (16,), model.final_norm.weight, model.final_norm.bias)
    expected = norm.mean(dim=1) @ model.head.weight.T
    output = model(images, torch.tensor([1, 4]))
    torch.testing.assert_close(output.logits, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(output.loss, -expected.log_softmax(-1)[[0, 1], [1, 4]].mean())


@pytest.mark.parametrize("positions", ["learnt", "rotary", "sinusoidal"])
def test_vision_knows_where_a_patch_is(positions: str) -> None:
    model = build("vision", positions=positions, **IMAGES).double().eval()
    images = torch.randn(1, 2, 12, 12, dtype=torch.float64)
    turned = images.roll(4, dims=3)
    assert not torch.allclose(model(images).logits, model(turned).logits, rtol=1e-9, atol=0)
    lost = build("vision", positions="none", **IMAGES).double().eval()
    torch.testing.assert_close(lost(images).logits, lost(turned).logits, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 12, 12), (1, 3, 12, 12), (1, 2, 16, 16), (1, 2, 12, 8)])
def test_images_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"images of shape .*\(B, 2, 12, 12\)"):
        build("vision", **IMAGES)(torch.zeros(shape))


def test_labels_of_another_shape() -> None:
    with pytest.raises(UsageError, match=r"labels of shape \(1, 4\).*\(1, 5\)"):
        build("decoder", **TEXT)(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(UsageError, match=r"labels of shape \(2,\).*\(1,\)"):
        build("vision", **IMAGES)(torch.zeros(1, 2, 12, 12), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("decodr", {}, ('"nn:decodr"', 'the nearest name is "decoder"')),
        ("vison", {}, ('the nearest name is "vision"',)),
        ("decoder", {"scheme": "deepnrm"}, ('scheme "deepnrm"', 'the nearest name is "deepnorm"')),
        ("decoder", {"hedas": 2}, ('option "hedas" of nn:decoder', 'the nearest name is "heads"')),
        ("decoder", {"encoder_depth": 2}, ('option "encoder_depth" of nn:decoder',)),
        ("decoder", {"patch": 2}, ('option "patch" of nn:decoder',)),
        ("encoder-decoder", {"classes": 2}, ('option "classes" of nn:encoder-decoder',)),
        ("encoder-decoder", {"encoder_depth": 0}, ("encoder_depth 0", "from 1")),
        ("vision", {"vocab": 2}, ('option "vocab" of nn:vision',)),
        ("vision", {"tie": True}, ('option "tie" of nn:vision',)),
        ("vision", {"patch": 5}, ("patch=5 for image=12", "divide")),
        ("vision", {"patch": 24}, ("patch=24 for image=12", "divide")),
        ("vision", {"image": 0}, ("image 0", "from 1")),
        ("vision", {"classes": 2.5}, ("classes 2.5", "whole number")),
        ("vision", {"heads": 3}, ("heads=3 for width=16", "divide")),
        ("encoder", {"kv_heads": 3}, ("kv_heads=3 for heads=2", "divide")),
        ("encoder", {"heads": 4, "kv_heads": 8}, ("kv_heads=8 for heads=4", "divide")),
        ("vision", {"scheme": "deepnorm", "depth": None}, ('"deepnorm" without depth',)),
    ],
)
def test_options_that_no_model_has(kind: str, options: dict[str, Any], words: tuple[str, ...]) -> None:
    base = IMAGES if kind == "vision" else SMALL
    with pytest.raises(UsageError) as caught:
        build(kind, **{**base, **options})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_loss_of_half_precision_is_taken_in_float32() -> None:
    model = build("decoder", **TEXT).bfloat16()
    ids = torch.randint(11, (2, 5))
    output = model(ids, ids)
    assert output.logits.dtype == torch.bfloat16
    assert output.loss is not None
    assert output.loss.dtype == torch.float32
    wide = nn.functional.cross_entropy(output.logits.float().flatten(0, 1), ids.flatten())
    assert output.loss.item() == wide.item()


@pytest.mark.parametrize(("kind", "kinds"), [("encoder-decoder", 5), ("vision", 2)])
def test_the_anatomy_reads_them(kind: str, kinds: int) -> None:
    model = build(kind, scheme="pre", **(TEXT if kind != "vision" else IMAGES))
    ids = torch.randint(11, (2, 5))
    batch = {"images": torch.randn(2, 2, 12, 12)} if kind == "vision" else {"ids": ids, "labels": ids}
    anatomy = read_anatomy(model, batch)
    branches = [branch for block in anatomy.blocks for branch in block.branches]
    assert len(branches) == kinds * 2
    assert {branch.placement for branch in branches} == {"pre"}
    assert sum(branch.kind == "cross-attention" for branch in branches) == (2 if kind != "vision" else 0)
    assert anatomy.final_norm
