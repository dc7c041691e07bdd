"""One token's Jacobian against dense float64 rows of the whole sequence's, scheme by scheme and elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normscope.anatomy import Anatomy, Block, Stack, measuring, read_anatomy
from normscope.linalg import TangentError, dense, numerical_rank, singular_values
from normscope.nn import SCHEMES, build
from normscope.probes._feeding import one_sequence
from normscope.probes._held import HeldGraph, hold
from normscope.probes._one_token import OneToken
from normscope.subjects import Subject, untouched

VOCAB, WIDTH, TOKENS = 11, 8, 5
EXACT = 1e-9


@dataclass
class Look:
    """One model, held, and what is asked of it."""

    model: nn.Module
    anatomy: Anatomy
    feed: Any
    held: HeldGraph

    def at(self, token: int) -> OneToken:
        return OneToken(self.model, self.anatomy, self.feed, self.held, token=token)

    def jacobian(self, part: Block | Stack, token: int) -> Tensor:
        one = self.at(token)
        return one.stack(part) if isinstance(part, Stack) else one.block(part)

    def reference(self, part: Block | Stack, token: int) -> Tensor:
        """The token's rows and columns of the Jacobian of the whole sequence."""
        blocks = part.blocks if isinstance(part, Stack) else (part,)
        op = self.held.operator(blocks[0].entry, blocks[-1].exit)
        tensor = self.held.tensors[blocks[0].entry]
        length = max(tensor.shape[:2]) if tensor.dim() > 2 else len(tensor)
        d_out, d_in = (size // length for size in op.shape)
        t = token % length
        rows = torch.arange(t * d_out, (t + 1) * d_out)
        return dense(op, rows=rows)[:, t * d_in : (t + 1) * d_in]


@contextmanager
def look(model: nn.Module, batch: Any) -> Iterator[Look]:
    subject = Subject(model, batch, None, lambda: iter([batch]), 0, "test", "test")
    anatomy = read_anatomy(subject)
    with untouched(model), measuring(model):
        feed = one_sequence(model, batch, anatomy)
        yield Look(model, anatomy, feed, hold(model, anatomy, feed, differences=False))


def ids(tokens: int = TOKENS, sequences: int = 2) -> Tensor:
    return torch.randint(VOCAB, (sequences, tokens), generator=torch.Generator().manual_seed(1))


def stirred(model: nn.Module) -> nn.Module:
    """Float64, with no parameter left at a zero or a one that would hide a term."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def assert_exact(found: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    assert found.shape == expected.shape
    assert float(expected.norm()) > 0
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


def assert_all_exact(model: nn.Module, batch: Any, tokens: tuple[int, ...], tolerance: float = EXACT) -> None:
    """Blocks and stacks at `tokens`."""
    with look(model, batch) as seen:
        parts = (*seen.anatomy.blocks, *seen.anatomy.stacks)
        assert len(parts) > 2
        for token in tokens:
            one = seen.at(token)
            for part in parts:
                found = one.stack(part) if isinstance(part, Stack) else one.block(part)
                assert_exact(found, seen.reference(part, token), tolerance)


STACKED = sorted(set(SCHEMES) - {"plain"})  # a stack without residuals has no stream


@pytest.mark.parametrize("number", range(len(STACKED)), ids=STACKED)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_scheme_in_a_causal_decoder(number: int, turn: int) -> None:
    positions = ("learnt", "rotary")[(number + turn) % 2]
    heads = {"heads": 4, "kv_heads": 2}
    model = build(
        "decoder", scheme=STACKED[number], depth=2, width=WIDTH, vocab=VOCAB, positions=positions, **heads
    )
    assert_all_exact(stirred(model), ids(), (0, 2, -1) if turn else (2,))


SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 8, "vocab_size": VOCAB, "n_positions": 16}
T5 = {"d_model": 8, "d_kv": 2, "d_ff": 16, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
CAUSAL = {
    "GPT2LMHeadModel": GPT2 | {"bos_token_id": 1, "eos_token_id": 2},
    "LlamaForCausalLM": GROUPED,
    "Gemma2ForCausalLM": GROUPED | {"head_dim": 4, "sliding_window": 3, "query_pre_attn_scalar": 4},
    "Olmo2ForCausalLM": GROUPED,
}
MORE_CAUSAL = {
    "Qwen3ForCausalLM": GROUPED | {"head_dim": 4},
    "GPTNeoXForCausalLM": SIZES,
    "PhiForCausalLM": SIZES,
    "CohereForCausalLM": GROUPED,
    "FalconForCausalLM": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"vocab_size": VOCAB},
    "BloomForCausalLM": {"hidden_size": 8, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
}


def hugging_face(name: str, sizes: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, name)
    return model(model.config_class(**sizes)).eval()


@pytest.mark.parametrize(
    "name", [*CAUSAL, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CAUSAL)]
)
def test_causal_models_of_hugging_face(name: str) -> None:
    model = hugging_face(name, (CAUSAL | MORE_CAUSAL)[name])
    # Some compute norms and the softmax in float32, whatever the model is in.
    assert_all_exact(stirred(model), {"input_ids": ids()}, (0, 2, -1), 1e-5)


def test_a_bidirectional_stack_is_refused_and_its_blocks_are_exact() -> None:
    with look(stirred(hugging_face("BertForMaskedLM", SIZES)), {"input_ids": ids()}) as seen:
        for block in seen.anatomy.blocks:
            assert_exact(seen.jacobian(block, 2), seen.reference(block, 2), 1e-5)
        with pytest.raises(TangentError, match="reads 4 tokens that have read it in an earlier sublayer"):
            seen.jacobian(seen.anatomy.stacks[0], 2)


def test_encoder_and_decoder_have_tokens_of_their_own() -> None:
    model = stirred(hugging_face("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}))
    with look(model, {"input_ids": ids(), "decoder_input_ids": ids(4)}) as seen:
        encoder, decoder = seen.anatomy.stacks
        for part in (*encoder.blocks, *decoder.blocks, decoder):
            assert_exact(seen.jacobian(part, -1), seen.reference(part, -1), 1e-5)
        with pytest.raises(TangentError, match="earlier sublayer"):
            seen.jacobian(encoder, -1)


class Torch(nn.Module):
    """nn.TransformerEncoder under a causal mask, with the last token padding if wanted."""

    def __init__(self, *, norm_first: bool, batch_first: bool = True, padded: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, 0.0, batch_first=batch_first, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first, self.padded = batch_first, padded

    def forward(self, x: Tensor) -> Tensor:
        sequences, tokens = x.shape[:2] if self.batch_first else (x.shape[1], x.shape[0])
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        padding = torch.zeros(sequences, tokens, dtype=torch.bool)
        padding[:, -1] = True
        return self.layers(x, mask=later, src_key_padding_mask=padding if self.padded else None)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("tokens", [TOKENS, WIDTH])
def test_the_encoder_of_torch_under_a_mask(norm_first: bool, tokens: int) -> None:
    batch = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    assert_all_exact(stirred(Torch(norm_first=norm_first)), batch, (0, 2, -1))
    padded = stirred(Torch(norm_first=norm_first, padded=True))
    assert_all_exact(padded, batch, (0, -2))


def test_token_major_streams() -> None:
    batch = torch.randn(TOKENS, 2, WIDTH, dtype=torch.float64)
    assert_all_exact(stirred(Torch(norm_first=True, batch_first=False)), batch, (0, 2, -1))


class Attention(nn.Module):
    """Written by hand, under any mask (T, T), True where a token is read."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.qkv, self.out, self.mask = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = (q @ k.transpose(-1, -2)).masked_fill(~self.mask, -torch.inf)
        return self.out(logits.softmax(-1) @ v)


class OneBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class InPlace(OneBlock):
    """The stream is added into the branches, and one of them is written into memory made for it."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.attention(self.norms[0](x))
        total += x
        branch = torch.empty_like(total)
        branch.copy_(self.down(F.relu(self.up(self.norms[1](total)), inplace=True)))
        branch.mul_(0.5)
        return branch.add_(total)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(blocks)
        self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


CAUSALLY = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def causal(block: type[OneBlock] = OneBlock) -> nn.Module:
    return stirred(Model(*(block(Attention(CAUSALLY)) for _ in "abc")))


def test_streams_that_are_written_in_place() -> None:
    assert_all_exact(causal(InPlace), ids(), (0, 2, -1))


def comes_back(masks: list[Tensor], token: int) -> bool:
    """Whether a path leads from the token through another and back to it, one layer after another."""
    reached = torch.arange(TOKENS) == token
    for mask in masks:
        others = reached.clone()
        others[token] = False
        if bool((mask[token] & others).any()):
            return True
        reached = reached | (mask & reached).any(-1)
    return False


@pytest.mark.parametrize("seed", range(8))
def test_any_mask_is_followed_exactly_where_nothing_comes_back(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    density = (0.15, 0.3, 0.5)[seed % 3]
    drawn = torch.rand(3, TOKENS, TOKENS, generator=generator) < density
    masks = list(drawn | torch.eye(TOKENS, dtype=torch.bool))
    with look(stirred(Model(*(OneBlock(Attention(mask)) for mask in masks))), ids()) as seen:
        (stack,) = seen.anatomy.stacks
        for token in range(TOKENS):
            if comes_back(masks, token):
                with pytest.raises(TangentError, match="earlier sublayer"):
                    seen.jacobian(stack, token)
            else:
                assert_exact(seen.jacobian(stack, token), seen.reference(stack, token))
            block = stack.blocks[1]
            assert_exact(seen.jacobian(block, token), seen.reference(block, token))


@pytest.mark.parametrize(("scheme", "lost"), [("post", 2), ("pre", 0)])
def test_ranks_are_those_of_the_norms(scheme: str, lost: int) -> None:
    model = build("decoder", scheme=scheme, depth=2, width=16, heads=2, vocab=VOCAB, eps=1e-12)
    with look(stirred(model), ids()) as seen:
        for part in (*seen.anatomy.blocks, *seen.anatomy.stacks):
            rank, gap = numerical_rank(singular_values(seen.jacobian(part, 2)), 1e-8)
            assert rank == 16 - lost
            assert gap > 1e3 or not lost


class Mixer(nn.Module):
    """Tokens by weights of their own, as in MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(TOKENS, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class OneShift(nn.Module):
    """A token reads the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(torch.cat([x[:, :1], x[:, :-1]], 1))


class Rows(nn.Module):
    """Attention whose weights a hidden part writes row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for t in range(x.shape[1]):
            out[:, t] = self.map(x[:, t])
        return out


REFUSED = [
    (Mixer, "mixes the tokens with weights"),
    (Convolution, "no rule follows one token through convolution"),
    (OneShift, "takes some tokens out"),
    (Rows, "the token has"),
]


@pytest.mark.parametrize(("mixing", "words"), REFUSED)
def test_what_cannot_be_followed_says_why(mixing: type[nn.Module], words: str) -> None:
    blocks = (OneBlock(Attention(CAUSALLY)), OneBlock(mixing()), OneBlock(Attention(CAUSALLY)))
    with look(stirred(Model(*blocks)), ids()) as seen:
        (stack,) = seen.anatomy.stacks
        for part in (stack.blocks[1], stack):
            with pytest.raises(TangentError, match=words):
                seen.jacobian(part, -1)
        assert_exact(seen.jacobian(stack.blocks[2], -1), seen.reference(stack.blocks[2], -1))


class Hidden(torch.autograd.Function):
    """What runs below the dispatcher: autograd knows its derivative, the ops do not show it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.from_numpy(2 * x.detach().numpy())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Halved(torch.autograd.Function):
    """A backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Applying(Attention):
    function: type[torch.autograd.Function]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function.apply(x) + 0.1 * x)


@pytest.mark.parametrize("function", [Hidden, Halved])
def test_derivatives_that_the_ops_do_not_show_are_refused(function: type[torch.autograd.Function]) -> None:
    class Here(Applying):
        pass

    Here.function = function
    blocks = (OneBlock(Attention(CAUSALLY)), OneBlock(Here(CAUSALLY)))
    with look(stirred(Model(*blocks)), ids()) as seen:
        (stack,) = seen.anatomy.stacks
        assert_exact(seen.jacobian(stack.blocks[0], 1), seen.reference(stack.blocks[0], 1))
        for part in (stack.blocks[1], stack):
            with pytest.raises(TangentError, match="VJP of the whole sequence"):
                seen.jacobian(part, 1)


def test_values_that_are_not_finite_are_refused() -> None:
    model = causal()
    with torch.no_grad():
        model.blocks[1].down.bias[0] = torch.nan
    with look(model, ids()) as seen:
        (stack,) = seen.anatomy.stacks
        assert_exact(seen.jacobian(stack.blocks[0], 1), seen.reference(stack.blocks[0], 1))
        for part in (stack.blocks[1], stack):
            with pytest.raises(TangentError):
                seen.jacobian(part, 1)


def test_a_token_that_is_not_there() -> None:
    with look(causal(), ids()) as seen, pytest.raises(TangentError, match="no token 5 among 5"):
        seen.jacobian(seen.anatomy.stacks[0], TOKENS)


class OnlyTwo(Model):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 2:
            raise ValueError("two sequences, please")
        return super().forward(x)


def test_several_sequences_at_once_are_refused() -> None:
    model = stirred(OnlyTwo(*(OneBlock(Attention(CAUSALLY)) for _ in "ab")))
    with look(model, ids()) as seen, pytest.raises(TangentError, match="2 sequences at once"):
        seen.jacobian(seen.anatomy.stacks[0], 0)


def test_the_model_comes_back_as_it_was() -> None:
    model = causal()
    with look(model, ids()) as seen:
        model.blocks[0].up.weight.requires_grad_(True)
        flags = [p.requires_grad for p in model.parameters()]
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        seen.jacobian(seen.anatomy.blocks[1], 0)
        seen.jacobian(seen.anatomy.stacks[0], 0)
        assert [p.requires_grad for p in model.parameters()] == flags
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_it_costs_is_counted() -> None:
    with look(causal(), ids()) as seen:
        one, (stack,) = seen.at(-1), seen.anatomy.stacks
        of_token = (1 + WIDTH) / TOKENS  # one run and d VJPs, of one token of T
        one.stack(stack)
        assert one.forwards == pytest.approx(1 + of_token + 1)
        one.block(stack.blocks[0])
        one.block(stack.blocks[1])
        assert one.forwards == pytest.approx(3 + of_token + 2 / 3 * (of_token + 1))


@pytest.mark.slow
def test_twelve_layers_cost_few_forwards() -> None:
    """d = 256, T = 128, 12 layers: d/T forwards and three more, where the whole sequence takes d."""
    model = build("decoder", scheme="gpt2", depth=12, width=256, heads=4, vocab=VOCAB, context=128).double()
    with look(model, ids(128)) as seen:
        one, (stack,) = seen.at(-1), seen.anatomy.stacks
        assert_exact(one.stack(stack), seen.reference(stack, -1), 1e-7)
        assert one.forwards < 5
