"""`untouched` restores the model and the generators, whatever happens in the block."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from normscope.nn import build
from normscope.subjects import load, make_subject, untouched


class Everything(nn.Module):
    """Shared parameters, buffers, a cache, plain tensors, hooks, a frozen part, mixed modes, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 256, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.plain = torch.arange(3.0)
        self.cache: dict[int, Tensor] = {}

    def forward(self, ids: Tensor) -> Tensor:
        self.steps += 1
        self.plain.add_(1)
        self.cache[ids.shape[1]] = ids
        self.last = ids
        x = self.dropout(self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2))
        return self.head(self.frozen(x))


def _model() -> Everything:
    model = Everything()
    model.frozen.eval()
    model.register_forward_hook(_hook)
    model.head.register_full_backward_pre_hook(_backward_hook)
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    return model


def _hook(module: nn.Module, args: object, output: object) -> None: ...


def _backward_hook(module: nn.Module, grad: object) -> None: ...


def _state(model: nn.Module) -> dict[str, object]:
    """Everything that must be restored, by value, or by identity if that matters."""
    state: dict[str, object] = {}
    for name, module in model.named_modules():
        state[f"{name} training"] = module.training
        state[f"{name} attributes"] = sorted(vars(module))
        for key, value in vars(module).items():
            state[f"{name} {key} id"] = id(value)
            if isinstance(value, dict):
                state[f"{name} {key}"] = {k: id(v) for k, v in value.items()}
            if isinstance(value, Tensor):
                state[f"{name} {key} value"] = value.tolist()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[f"{name} tensor"] = (id(tensor), tensor.dtype, tensor.data_ptr(), tensor.requires_grad)
        state[f"{name} value"] = tensor.tolist()
        state[f"{name} grad"] = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
    return state


def _generators() -> tuple[object, ...]:
    numpy_state = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), tuple(map(str, numpy_state)), random.getstate()


DEEDS: dict[str, Callable[[Everything], object]] = {
    "forward": lambda m: m(torch.ones(2, 6, dtype=torch.long)),
    "backward": lambda m: m(torch.ones(2, 5, dtype=torch.long)).sum().backward(),
    "eval": lambda m: m.eval(),
    "train": lambda m: m.train(),
    "freeze": lambda m: m.requires_grad_(False),
    "thaw": lambda m: m.frozen.requires_grad_(True),
    "hook": lambda m: m.head.register_forward_hook(_hook),
    "hooks gone": lambda m: m._forward_hooks.clear(),
    "half": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "buffer in place": lambda m: m.steps.fill_(7.0),
    "buffer anew": lambda m: setattr(m, "steps", torch.tensor(3.0)),
    "gradients": lambda m: [p.grad.zero_() for p in m.parameters() if p.grad is not None],
    "gradients away": lambda m: m.zero_grad(set_to_none=True),
    "module anew": lambda m: setattr(m, "dropout", nn.Identity()),
    "parameter anew": lambda m: setattr(m.frozen, "bias", nn.Parameter(torch.ones(8))),
    "attribute": lambda m: setattr(m, "extra", 3),
    "cache": lambda m: m.cache.clear(),
    "plain tensor": lambda m: m.plain.zero_(),
    "random": lambda m: (torch.randn(3), np.random.rand(), random.random()),  # noqa: NPY002
    "seed": lambda m: torch.manual_seed(99),
}


@given(st.lists(st.sampled_from(sorted(DEEDS)), max_size=5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_everything_comes_back(names: list[str], raises: bool) -> None:
    model = _model()
    state, generators = _state(model), _generators()
    try:
        with untouched(model):
            assert all(p.grad is None for p in model.parameters())
            for name in names:
                try:
                    DEEDS[name](model)
                except RuntimeError:  # a forward in mixed dtypes, a backward through a frozen model
                    continue
            if raises:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert _state(model) == state
    assert _generators() == generators


@pytest.mark.parametrize("name", sorted(DEEDS))
def test_every_deed_would_be_seen(name: str) -> None:
    """The comparison above detects each change if `untouched` is left out."""
    model = _model()
    state, generators = _state(model), _generators()
    DEEDS[name](model)
    assert (_state(model), _generators()) != (state, generators) or name in ("train",)


def test_a_users_hook_can_still_be_removed() -> None:
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(_hook)
    with untouched(model):
        model.register_forward_hook(_hook)
    handle.remove()
    assert not model._forward_hooks


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_scripted_module_comes_back() -> None:
    model = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval(), torch.ones(1, 2))
    with untouched(model):
        model.train()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    "spec", ["nn:decoder,depth=1,width=8,heads=1", "hf:gpt2,n_layer=1,n_embd=8,n_head=1"]
)
def test_loading_leaves_the_generators_alone(spec: str) -> None:
    before = _generators()
    load(spec, seed=5)
    assert _generators() == before


def test_making_a_subject_leaves_the_model_alone() -> None:
    model = _model()
    state, generators = _state(model), _generators()
    subject = make_subject(model)
    assert _state(model) == state
    assert _generators() == generators
    assert subject.loss_fn is not None  # token by token: nothing sees later tokens


def test_a_model_of_ours_comes_back() -> None:
    model = build("decoder", depth=1, width=8, heads=1, dropout=0.1)
    state = _state(model)
    make_subject(model)
    assert _state(model) == state
