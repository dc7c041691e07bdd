"""Activation checkpointing gives the same bits and keeps less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope.nn import MODELS, SCHEMES, Output, build

SMALL: dict[str, Any] = {"depth": 4, "width": 16, "heads": 2, "dropout": 0.2}


def _pair(kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    plain = build(kind, **{**SMALL, **options})
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    frugal = build(kind, checkpoint=True, **{**SMALL, **options})
    frugal.load_state_dict(plain.state_dict())
    return plain, frugal


def _output(kind: str, model: nn.Module) -> Output:
    torch.manual_seed(5)
    if kind == "vision":
        return model(torch.randn(2, 3, 32, 32), torch.tensor([1, 2]))
    ids = torch.randint(9, (2, 12))
    return model(ids, ids)


def _same_to_the_bit(kind: str, plain: nn.Module, frugal: nn.Module) -> None:
    for _ in range(2):  # buffers move on
        losses = [_output(kind, model).loss for model in (plain, frugal)]
        for loss in losses:
            assert loss is not None
            loss.backward()
        assert torch.equal(*losses)  # type: ignore[arg-type]
    for (path, ours), theirs in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), path
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), path  # type: ignore[arg-type]
    for (path, ours), theirs in zip(plain.state_dict().items(), frugal.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), path


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_a_checkpointed_decoder_trains_the_same(name: str) -> None:
    _same_to_the_bit("decoder", *_pair("decoder", scheme=name))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "decoder"])
@pytest.mark.parametrize("name", ["pre", "sigma-reparam"])
def test_other_checkpointed_models_train_the_same(kind: str, name: str) -> None:
    _same_to_the_bit(kind, *_pair(kind, scheme=name, depth=2))


def _saved_bytes(kind: str, model: nn.Module) -> int:
    """Bytes of the storages that autograd keeps, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    held: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _output(kind, model)
    return sum(storages.values())


@pytest.mark.parametrize("kind", MODELS)
def test_checkpointing_keeps_less(kind: str) -> None:
    plain, frugal = _pair(kind)
    tokens = 64 if kind == "vision" else 24 if kind == "encoder-decoder" else 12
    inputs = 4 * 4 * 2 * tokens * 16  # what each block keeps to run again; no hook sees it
    assert _saved_bytes(kind, frugal) + inputs < 0.3 * _saved_bytes(kind, plain)


def test_nothing_is_run_twice_in_eval_mode_or_without_a_graph() -> None:
    _, frugal = _pair("decoder")
    calls = []
    frugal.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[index, union-attr]
    _output("decoder", frugal).loss.backward()  # type: ignore[union-attr]
    assert len(calls) == 2
    _output("decoder", frugal.eval()).loss.backward()  # type: ignore[union-attr]
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["pre", "sigma-reparam"])
def test_a_checkpointed_model_compiles_whole(name: str) -> None:
    torch._dynamo.reset()
    plain, frugal = _pair("decoder", scheme=name, depth=2, dropout=0.0)
    compiled = torch.compile(frugal, fullgraph=True, backend="aot_eager")
    losses = [_output("decoder", model).loss for model in (plain, compiled)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        assert loss is not None
        loss.backward()
    for ours, theirs in zip(plain.parameters(), frugal.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-4, atol=1e-6)
