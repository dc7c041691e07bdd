"""Generation gives the same with and without cache, with padding on either side, for every scheme."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.nn import SCHEMES, Attention, Cache, Context, Decoder, EncoderDecoder, build
from normscope.nn.encoder_decoder import START
from normscope.nn.generate import choose

SMALL = {"depth": 2, "width": 16, "heads": 2, "vocab": 11, "context": 16}
names = pytest.mark.parametrize("name", sorted(SCHEMES))


def _model(kind: str, name: str, **options: object) -> Decoder | EncoderDecoder:
    """Model in float64 with all parameters changed from their initial values: no branch gives zero."""
    model = build(kind, scheme=name, **{**SMALL, **options}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert isinstance(model, Decoder | EncoderDecoder)
    return model


def _greedy(logits: Callable[[Tensor], Tensor], ids: Tensor, steps: int) -> Tensor:
    """Generate without a cache: compute everything again for each token."""
    for _ in range(steps):
        ids = torch.cat([ids, logits(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


@names
@pytest.mark.parametrize("positions", ["learnt", "rotary"])
def test_the_cache_changes_no_logit(name: str, positions: str) -> None:
    model = _model("decoder", name, positions=positions, kv_heads=1).eval()
    ids, cache = torch.randint(11, (2, 9)), Cache()
    parts = [model(ids[:, at], cache=cache).logits for at in (slice(0, 4), slice(4, 7), slice(7, 8))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits[:, :8], rtol=1e-9, atol=1e-10)
    assert cache.length == 8


def test_an_attention_of_its_own_goes_on_from_its_cache() -> None:
    attention = Attention(16, 2, causal=True, rope_base=100.0).double()
    x, context = torch.randn(1, 6, 16, dtype=torch.float64), Context(cache=Cache())
    parts = [attention(x[:, at], context) for at in (slice(0, 3), slice(3, 5), slice(5, 6))]
    torch.testing.assert_close(torch.cat(parts, dim=1), attention(x), rtol=1e-11, atol=1e-12)


@names
def test_a_decoder_writes_as_without_a_cache(name: str) -> None:
    model, ids = _model("decoder", name), torch.randint(11, (3, 4))
    written = model.generate(ids, 7, temperature=0)
    model.eval()
    assert torch.equal(written, _greedy(lambda each: model(each).logits, ids, 7))


@names
def test_an_encoder_decoder_writes_as_without_a_cache(name: str) -> None:
    model, ids = _model("encoder-decoder", name), torch.randint(11, (3, 4))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]])
    written = model.generate(ids, 5, temperature=0, attention_mask=mask)
    model.eval()

    def logits(decoder_ids: Tensor) -> Tensor:
        return model(ids, decoder_ids=decoder_ids, attention_mask=mask).logits

    assert torch.equal(written, _greedy(logits, torch.full((3, 1), START), 5))


@pytest.mark.parametrize("positions", ["learnt", "rotary", "sinusoidal"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_prompts_padded_on_the_left(positions: str, dtype: torch.dtype) -> None:
    model = _model("decoder", "pre", positions=positions)
    short, long = torch.randint(11, (1, 3)), torch.randint(11, (1, 5))
    ids = torch.cat([torch.cat([torch.zeros(1, 2, dtype=torch.long), short], dim=1), long])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).to(dtype)
    together = model.generate(ids, 6, temperature=0, attention_mask=mask)
    assert torch.equal(together[0, 2:], model.generate(short, 6, temperature=0)[0])
    assert torch.equal(together[1], model.generate(long, 6, temperature=0)[0])


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    generator = torch.Generator().manual_seed(0)

    def shares(temperature: float, top_k: int | None) -> Tensor:
        drawn = choose(logits.expand(20_000, 4), temperature, top_k, generator)
        return drawn.flatten().bincount(minlength=4) / 20_000

    torch.testing.assert_close(shares(2.0, None), (logits[0] / 2).softmax(-1), rtol=0, atol=0.015)
    two = torch.tensor([2.0, float("-inf"), 1.0, float("-inf")]).softmax(-1)
    torch.testing.assert_close(shares(1.0, 2), two, rtol=0, atol=0.015)
    torch.testing.assert_close(shares(1.0, 9), logits[0].softmax(-1), rtol=0, atol=0.015)


def test_a_generator_of_ones_own_leaves_the_global_one_alone() -> None:
    model, ids = _model("decoder", "pre"), torch.randint(11, (1, 4))
    before = torch.get_rng_state()
    first, second = (model.generate(ids, 9, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, model.generate(ids, 9, temperature=0))


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_modes_come_back_and_dropout_is_off(kind: str) -> None:
    model = _model(kind, "pre", dropout=0.5).train()
    model.head.eval()
    ids = torch.randint(11, (1, 4))
    one, two = (model.generate(ids, 8, temperature=0) for _ in range(2))
    assert torch.equal(one, two)
    assert model.training
    assert not model.head.training


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 16}, ("tokens", "context=16")),
        ({"max_new_tokens": -1}, ("max_new_tokens=-1", "from 0")),
        ({"temperature": -0.5}, ("temperature=-0.5", "from 0")),
        ({"temperature": float("nan")}, ("temperature=nan", "from 0")),
        ({"top_k": 0}, ("top_k=0", "from 1")),
        ({"attention_mask": torch.ones(1, 3)}, ("attention_mask of shape (1, 3)", "(1, 4)")),
        ({"attention_mask": torch.zeros(1, 4)}, ("without a token in row 0",)),
    ],
)
def test_bad_requests(kind: str, options: dict[str, object], words: tuple[str, ...]) -> None:
    model, ids = _model(kind, "pre"), torch.randint(11, (1, 4))
    with pytest.raises(UsageError) as caught:
        model.generate(ids, **{"max_new_tokens": 2, **options})  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
    assert model.training


def test_prompts_padded_on_the_right_and_empty_ones_are_refused() -> None:
    model = _model("decoder", "pre")
    with pytest.raises(UsageError, match="padded on the right"):
        model.generate(torch.zeros(1, 3, dtype=torch.long), 2, attention_mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(UsageError, match=r"shape \(1, 0\)"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 2)


def test_rotary_positions_have_no_end() -> None:
    model = _model("decoder", "pre", positions="rotary")
    assert model.generate(torch.zeros(1, 1, dtype=torch.long), 20).shape == (1, 21)
