"""Padding and masks: shapes that do not fit, rows without a token, queries that see nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from normscope.errors import UsageError
from normscope.nn import Attention, Context, build
from normscope.nn.attention import attend

SMALL: dict[str, Any] = {"depth": 2, "width": 16, "heads": 4, "vocab": 11, "context": 16}
TEXT_MODELS = ("decoder", "encoder", "encoder-decoder")


def _call(kind: str, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    if kind == "encoder-decoder":
        decoder_ids = torch.arange(6, device=ids.device).expand(ids.shape[0], 6)
        return model(ids, decoder_ids=decoder_ids, attention_mask=mask).logits
    return model(ids, attention_mask=mask).logits


def _float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))


def _visible() -> Tensor:
    """A mask (B, 1, T, S) whose first row has a query without visible keys, and one with few."""
    visible = torch.rand(2, 1, 5, 7) > 0.3
    visible[:, 0, 0, 0] = True
    visible[0, 0, 2] = False
    visible[1, 0, 3] = False
    visible[1, 0, 3, 0] = True
    return visible


def _reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float | None) -> Tensor:
    """Attention query by query, over the visible keys only."""
    y = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        at = visible[b, 0, t]
        logits = 0.5 * k[b, h // group, at] @ q[b, h, t]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        y[b, h, t] = torch.softmax(logits, dim=0) @ v[b, h // group, at]
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_float", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("groups", [4, 2])
def test_a_query_that_sees_nothing_reads_zeros(
    dtype: torch.dtype, as_float: bool, softcap: float | None, groups: int
) -> None:
    q, k, v = (
        torch.randn(2, heads, tokens, 4).to(dtype).requires_grad_()
        for heads, tokens in ((4, 5), (groups, 7), (groups, 7))
    )
    visible = _visible()
    mask = _float(visible, dtype) if as_float else visible
    y = attend(q, k, v, mask=mask, causal=False, scale=0.5, softcap=softcap)
    assert (y[0, :, 2] == 0).all()
    expected = _reference(*(t.detach().double() for t in (q, k, v)), visible, softcap)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        y.square().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))
    assert q.grad is not None
    assert (q.grad[0, :, 2] == 0).all()
    assert (q.grad[0, :, 1] != 0).any()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_cross_attention_to_a_memory_that_is_all_padding(softcap: float | None) -> None:
    attention = Attention(8, 2, causal=False, cross=True, softcap=softcap)
    memory_mask = torch.tensor([[False, False, False], [True, True, False]])[:, None, None, :]
    memory = torch.randn(2, 3, 8, requires_grad=True)
    y = attention(torch.randn(2, 4, 8), Context(memory=memory, memory_mask=memory_mask))
    torch.testing.assert_close(y[0], attention.o.bias.expand(4, 8))
    y.square().sum().backward()
    assert memory.grad is not None
    assert (memory.grad[0] == 0).all()
    assert (memory.grad[1, 2] == 0).all()
    assert (memory.grad[1, :2] != 0).any()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_causal_attention_stays_causal_under_a_mask(softcap: float | None) -> None:
    attention = Attention(8, 2, causal=True, softcap=softcap).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    seen = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    torch.testing.assert_close(attention(x, Context(mask=seen)), attention(x), rtol=1e-12, atol=1e-12)
    y = attention(x, Context(mask=_float(seen, x.dtype)))
    torch.testing.assert_close(y, attention(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 4), (5, 5), (3, 4, 5), (2, 3, 4, 5), (2, 4, 4, 4)])
def test_an_attention_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 4, tokens, 4) for tokens in (4, 5, 5))
    with pytest.raises(UsageError, match=r"an attention mask of shape .*T=4, S=5"):
        attend(q, k, v, mask=torch.ones(shape, dtype=torch.bool), causal=False, scale=0.5)


def test_an_attention_mask_of_whole_numbers() -> None:
    q, k, v = (torch.randn(2, 4, 3, 4) for _ in range(3))
    with pytest.raises(UsageError, match=r"int64.*mask\.bool\(\)"):
        attend(q, k, v, mask=torch.ones(3, 3, dtype=torch.long), causal=False, scale=0.5)


@pytest.mark.parametrize("kind", TEXT_MODELS)
@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 4), r"attention_mask of shape \(2, 4\).*\(2, 5\).*padding"),
        (torch.ones(1, 5), r"attention_mask of shape \(1, 5\).*\(2, 5\)"),
        (torch.ones(2, 1, 1, 5), r"attention_mask of shape \(2, 1, 1, 5\)"),
        (torch.tensor([[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]), "without a token in row 1.*drop the row"),
        (torch.zeros(2, 5, dtype=torch.bool), "without a token in row 0"),
    ],
)
def test_masks_of_tokens_that_do_not_fit(kind: str, mask: Tensor, words: str) -> None:
    model = build(kind, **SMALL)
    with pytest.raises(ValueError, match=words):
        _call(kind, model, torch.zeros(2, 5, dtype=torch.long), mask)


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_masks_without_values_are_not_looked_at(kind: str) -> None:
    with torch.device("meta"):
        model, ids = build(kind, **SMALL), torch.zeros(2, 5, dtype=torch.long)
    assert _call(kind, model, ids, torch.ones_like(ids)).is_meta
    with FakeTensorMode():
        model, ids = build(kind, **SMALL), torch.zeros(2, 5, dtype=torch.long)
        assert _call(kind, model, ids, torch.ones_like(ids)).shape[-1] == 11


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_a_compiled_model_takes_a_mask(kind: str) -> None:
    torch._dynamo.reset()
    model = build(kind, **SMALL).double()
    ids, mask = torch.randint(11, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(_call(kind, compiled, ids, mask), _call(kind, model, ids, mask))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("positions", ["learnt", "rotary", "sinusoidal"])
def test_an_encoder_decoder_does_not_see_padding(left: bool, positions: str) -> None:
    model = build("encoder-decoder", positions=positions, softcap=3.0, **SMALL).double().eval()
    ids, decoder_ids = torch.randint(11, (1, 4)), torch.randint(11, (1, 3))
    alone = model(ids, decoder_ids=decoder_ids).logits
    sides = (2, 0) if left else (0, 2)
    pad = torch.nn.functional.pad
    masked = model(
        pad(ids, sides, value=3),
        decoder_ids=pad(decoder_ids, sides, value=5),
        attention_mask=pad(torch.ones_like(ids), sides),
        decoder_attention_mask=pad(torch.ones_like(decoder_ids), sides),
    ).logits
    real = slice(2, None) if left else slice(0, 3)
    torch.testing.assert_close(masked[:, real], alone, rtol=1e-11, atol=1e-11)


def test_gradients_of_a_padded_batch_are_finite() -> None:
    """With left padding and a causal mask, the padded queries see no key."""
    for softcap in (None, 2.0):
        model = build("decoder", softcap=softcap, **SMALL)
        ids, mask = torch.randint(11, (2, 5)), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        model(ids, ids.masked_fill(mask == 0, -100), mask).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
