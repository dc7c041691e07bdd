"""Recomputed modules give the same loss, gradients and buffers to the bit, and `undo` leaves no trace."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import normscope
from normscope.anatomy import read_anatomy
from normscope.errors import UsageError
from normscope.planning import plan, recompute
from normscope.planning.making import with_loss
from normscope.planning.units import groups_of
from normscope.subjects import Subject, load, make_subject


class BatchNormed(nn.Module):
    """Residual blocks with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.BatchNorm1d(8), "map": Branch()}) for _ in "ab")

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BD = x_BD + block["map"](x_BD)
        return x_BD


class Branch(nn.Module):
    """A branch with a batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.drop(self.up(self.norm(x_BD)).tanh())


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


SMALL = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,vocab_size=300"
MODELS = (
    "nn:decoder,depth=2,width=32,heads=2,dropout=0.2",
    "nn:decoder,scheme=sigma-reparam,depth=2,width=32,heads=2,dropout=0.2",
    "nn:decoder,scheme=mhc,depth=2,width=32,heads=2",
    "nn:encoder-decoder,depth=2,width=32,heads=2,dropout=0.2",
    "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=300",
    f"hf:llama,{SMALL}",
    f"hf:bert,{SMALL}",
    f"hf:mixtral,{SMALL},num_key_value_heads=1",
    "hf:t5,d_model=32,d_ff=64,num_layers=2,num_heads=2,d_kv=16,vocab_size=300",
    "hf:vit,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,image_size=32",
    "hf:albert,hidden_size=32,num_attention_heads=2,intermediate_size=64,embedding_size=16,vocab_size=300",
    "torch",
)


def subject_of(spec: str) -> Subject:
    if spec == "torch":
        torch.manual_seed(0)
        return with_loss(make_subject(_encoder(), torch.randn(2, 8, 32)))
    return load(spec, batch_size=2, seq_len=16)


def step(subject: Subject, model: nn.Module) -> list[torch.Tensor]:
    """Loss, gradients and buffers after a step from the same seed."""
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    loss = subject.loss(model=model)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *(g.clone() for g in gradients), *(b.clone() for b in model.buffers())]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def all_paths(model: nn.Module, subject: Subject) -> list[str]:
    """All blocks, and all of their parts inside of them."""
    found = [unit.path for group in groups_of(model, read_anatomy(subject)) for unit in group.units]
    # The residuals of our blocks are given their branch as a function, and do not restore its buffers.
    return [path for path in found if "sigma" not in subject.spec or "residual" not in path]


@pytest.mark.parametrize("spec", MODELS)
def test_recomputed_models_train_the_same(spec: str) -> None:
    subject = subject_of(spec)
    plain, frugal = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
    kinds = [type(module) for module in frugal.modules()]
    paths = all_paths(frugal, subject)
    assert len(paths) >= 2
    with recompute(frugal, paths):
        assert [type(module) for module in frugal.modules()] != kinds
        for _ in range(2):  # buffers move on
            assert equal(step(subject, plain), step(subject, frugal))
    assert [type(module) for module in frugal.modules()] == kinds
    assert equal(step(subject, plain), step(subject, frugal))


def test_running_statistics_advance_once_a_step() -> None:
    torch.manual_seed(0)
    model, x = BatchNormed(), torch.randn(16, 8)
    subject = with_loss(make_subject(model, x))
    twin = copy.deepcopy(model)
    recompute(twin, ["blocks.0.map", "blocks.1.map"])
    assert equal(step(subject, model), step(subject, twin))


def test_a_unit_whose_foreign_buffers_change_is_not_chosen() -> None:
    sizes = {"optimizer": "sgd", "seq_len": 128}
    peak = plan(MODELS[1], **sizes).peak
    for share in (0.95, 0.85):
        made = plan(MODELS[1], int(share * peak), **sizes)
        assert made.recompute
        assert not any("residual" in path for path in made.recompute)


def test_a_deep_copy_recomputes_its_own_modules() -> None:
    subject = subject_of(MODELS[0])
    recompute(subject.model, ["blocks.0", "blocks.1"])
    twin = copy.deepcopy(subject.model)
    before = step(subject, subject.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert equal(before, step(subject, subject.model))
    assert not torch.equal(before[0], step(subject, twin)[0])


def test_caches_of_keys_are_off_until_undo() -> None:
    subject = subject_of(MODELS[4])
    model: Any = subject.model
    model.config.use_cache = True
    applied = recompute(model, ["transformer.h.0"])
    assert model.config.use_cache is False
    applied.undo()
    applied.undo()
    assert model.config.use_cache is True


def test_modules_that_cannot_be_recomputed_are_refused() -> None:
    model = _encoder()
    with pytest.raises(UsageError, match=r'the nearest name is "layers.0"'):
        recompute(model, ["layer.0"])
    with recompute(model, ["layers.0"]), pytest.raises(UsageError, match="recomputed already"):
        recompute(model, ["layers.0"])
    module = model.get_submodule("layers.1")
    module.forward = module.forward  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="replaced on the object"):
        recompute(model, ["layers.1"])


def test_a_refusal_applies_nothing() -> None:
    model = _encoder()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UsageError):
        recompute(model, ["layers.0", "layers.7"])
    assert [type(module) for module in model.modules()] == kinds


class Fails(nn.Module):
    """A forward that reads a value and fails in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        y_BD = self.map(x_BD)
        if y_BD.dtype is torch.bfloat16 and float(y_BD.detach().sum()) < float("inf"):
            raise RuntimeError("no bfloat16 here")
        return y_BD


def test_a_step_that_fails_is_named_with_its_precision() -> None:
    with pytest.raises(UsageError, match=r"in bfloat16 \(RuntimeError: no bfloat16 here\)"):
        plan(Fails(), batch=torch.randn(2, 4), precision="bfloat16")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("blocks.0.atention", "blocks.0.attention"),  # "blocks.0" begins it, and is not meant
        ("block.1", "blocks.1"),
        ("model.blocks.1.feed_forward", "blocks.1.feed_forward"),
        ("1.feed_forward", "blocks.1.feed_forward"),
        ("blocks.11", "blocks.1"),
    ],
)
def test_the_nearest_path_is_suggested(path: str, near: str) -> None:
    model = normscope.load("nn:decoder,depth=2,width=16,heads=2").model
    with pytest.raises(UsageError, match=f'the nearest name is "{re.escape(near)}"'):
        normscope.recompute(model, [path])


def test_a_path_like_no_other_is_answered_with_where_paths_are() -> None:
    with pytest.raises(UsageError, match=r"take a path of named_modules\(\)"):
        normscope.recompute(nn.Sequential(nn.Linear(2, 2)), ["encoder"])


@pytest.mark.parametrize(
    ("paths", "words"),
    [("0", 'write ["0"]'), (None, "a list of paths"), (3, "a list of paths"), ([0], "the path of a module")],
)
def test_paths_that_are_none_are_refused(paths: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        normscope.recompute(nn.Sequential(nn.Linear(2, 2)), paths)
    assert words in str(caught.value)
