"""Last hidden states by hooks are those by ops: values, gradients and lengths."""

import pytest
import torch
from torch import nn

from normscope import load, read_anatomy
from normscope.anatomy import Anatomy, capture, measuring
from normscope.forecast.hidden import HiddenStates, first_query
from normscope.subjects import Subject, make_subject

SMALL = "vocab_size=64,num_hidden_layers=2,hidden_size=16,num_attention_heads=2,intermediate_size=32"
SPECS = {
    "pre": "nn:decoder,scheme=pre,depth=2,width=16,heads=2",
    "post": "nn:decoder,scheme=post,depth=2,width=16,heads=2",
    "no final norm": "nn:decoder,scheme=pre,depth=2,width=16,heads=2,final_norm=false",
    "two stacks": "nn:encoder-decoder,scheme=post,depth=2,width=16,heads=2",
    "images": "nn:vision,scheme=peri,depth=2,width=16,heads=2",
    "streams": "nn:decoder,scheme=hyper-connections,depth=2,width=16,heads=2",
    "gpt2": "hf:gpt2,vocab_size=64,n_layer=2,n_embd=16,n_head=2",
    "llama": f"hf:llama,{SMALL},num_key_value_heads=2",
    "bert": f"hf:bert,{SMALL}",
    "albert": f"hf:albert,{SMALL},embedding_size=16",
    "t5": "hf:t5,vocab_size=64,num_layers=2,d_model=16,num_heads=2,d_kv=8,d_ff=32",
}


class Turned(nn.Module):
    """A module that returns a view of another's output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor, **options: object) -> torch.Tensor:
        return self.inner(states, **options).transpose(0, 1)


class TokenMajor(nn.Module):
    """`nn.TransformerEncoder` over (T, B, d), whose output may be written to, and is read through a view."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1)
        self.encoder = Turned(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self.head = nn.Linear(16, 64)
        self.in_place = in_place

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.encoder(self.embedding(ids).transpose(0, 1), mask=mask, is_causal=True)
        if self.in_place:
            hidden += 1.0
        return self.head(hidden)


def subjects() -> dict[str, Subject]:
    """All of them, with batches of 2 × 8."""
    found = {name: load(spec, batch_size=2, seq_len=8) for name, spec in SPECS.items()}
    for name, in_place in (("token-major", False), ("written in place", True)):
        batch = torch.randint(64, (2, 8))
        found[name] = make_subject(TokenMajor(in_place), batch, lambda output, batch: output.square().mean())
    return found


ALL = [*SPECS, "token-major", "written in place"]


@pytest.fixture(scope="module")
def read() -> dict[str, tuple[Subject, Anatomy]]:
    return {name: (subject, read_anatomy(subject)) for name, subject in subjects().items()}


def gradients(subject: Subject, anatomy: Anatomy, states: HiddenStates, model: nn.Module):
    """Loss, states, lengths, and the gradient of the loss by each state that has one."""
    batch = subject.batch
    with measuring(model):
        loss, found = states.read(model, batch, lambda: subject.loss(batch, model))
        wanted = [each.state for each in found.values() if each.state.requires_grad]
        slopes = torch.autograd.grad(loss, wanted, allow_unused=True)
    return loss, found, slopes


@pytest.mark.parametrize("name", ALL)
def test_states_by_hooks_are_those_by_ops(name: str, read: dict[str, tuple[Subject, Anatomy]]) -> None:
    subject, anatomy = read[name]
    model, batch = subject.model, subject.batch
    states = HiddenStates(anatomy)
    sites = [stack.hidden for stack in anatomy.stacks]
    queries = [first_query(stack) for stack in anatomy.stacks]
    with measuring(model):
        loss, expected = capture(model, lambda: subject.loss(batch, model), [*sites, *filter(None, queries)])
        slopes = torch.autograd.grad(loss, [expected[site] for site in sites], allow_unused=True)
    lengths = [expected[query].shape[-2] if query in expected else None for query in queries]
    for _ in range(3):
        again, found, theirs = gradients(subject, anatomy, states, model)
        assert torch.equal(again, loss)
        assert all(each.state.equal(expected[site]) for each, site in zip(found.values(), sites, strict=True))
        assert [each.length for each in found.values()] == lengths
        assert list(found) == [stack.name for stack in anatomy.stacks]
        for ours, other in zip(slopes, theirs, strict=True):
            assert (ours is None) == (other is None)
            if ours is not None:
                torch.testing.assert_close(other, ours)
    with measuring(model), torch.no_grad():
        _, found = states.read(model, batch, lambda: subject.loss(batch, model))
    assert all(each.state.equal(expected[site]) for each, site in zip(found.values(), sites, strict=True))
    assert states.by_ops or not any(each.state.requires_grad for each in found.values()), "no graph is built"
    assert states.by_ops == (name == "written in place"), "hooks read what no op writes afterwards"


def test_a_batch_of_another_length_is_read_by_ops_first(read: dict[str, tuple[Subject, Anatomy]]) -> None:
    subject, anatomy = read["gpt2"]
    states, seen = HiddenStates(anatomy), []
    for length in (8, 6, 8, 6):
        batch = {key: value[:, :length] for key, value in subject.batch.items()}
        with measuring(subject.model):
            _, found = states.read(subject.model, batch, lambda b=batch: subject.loss(b, subject.model))
        seen += [(each.state.shape[1], each.length) for each in found.values()]
    assert seen == [(8, 8), (6, 6), (8, 8), (6, 6)]


def test_hooks_are_removed(read: dict[str, tuple[Subject, Anatomy]]) -> None:
    subject, anatomy = read["llama"]
    states = HiddenStates(anatomy)
    for _ in range(2):
        gradients(subject, anatomy, states, subject.model)
    assert not any(module._forward_hooks for module in subject.model.modules())
