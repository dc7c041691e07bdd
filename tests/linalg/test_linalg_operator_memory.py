"""Test that an operator over a stack holds no more than the forward of a training step without parameters."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from normscope.linalg import JacobianOperator, Method
from normscope.nn import SCHEMES, Block, ModelConfig, Where, scheme_named

T, D, L = 24, 32, 3


def held(make: Callable[[], object]) -> int:
    """Bytes that `make` allocates and does not free, by the allocator's count."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = make()
        gc.collect()
    del kept
    return sum(event.self_cpu_memory_usage for event in seen.events())


def normscope_stack(name: str) -> nn.Module:
    config, scheme = ModelConfig(scheme=name, depth=L, width=D, heads=2), scheme_named(name)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(config, Where(i + 1, depth=L), causal=True) for i in range(L))

        def forward(self, x: Tensor) -> Tensor:
            x = scheme.join.enter(x, lambda stream: stream)
            for block in self.blocks:
                x = block(x)
            return scheme.join.leave(x, lambda stream: stream)

    return Stack()


def torch_stack() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 4 * D, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, L, enable_nested_tensor=False)


def gpt2_stack() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=D, n_head=2, vocab_size=50, n_positions=T)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = transformers.GPT2Model(config).eval().h

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                found = block(x)
                x = found if isinstance(found, Tensor) else found[0]
            return x

    return Stack()


STACKS = {name: lambda name=name: normscope_stack(name) for name in sorted(SCHEMES)}
FAST = ("pre", "ngpt", "GPT-2")
STACKS |= {"TransformerEncoder": torch_stack, "GPT-2": gpt2_stack}


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, build in STACKS.items()
    ],
)
def test_an_operator_holds_no_more_than_a_training_step(build) -> None:
    require_lean(build().eval(), torch.randn(2, T, D))


def test_parameters_that_f_closes_over_are_held_off_too() -> None:
    stack = normscope_stack("pre")
    require_lean(lambda x: stack(x), torch.randn(2, T, D))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pre", "ngpt", "TransformerEncoder"])
def test_long_sequences_hold_no_more_than_a_training_step_under_the_math_backend(name: str) -> None:
    require_lean(STACKS[name]().eval(), torch.randn(2, 1024, D))


def require_lean(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    operators = []

    def operator() -> JacobianOperator:
        operators.append(JacobianOperator(f, x))
        return operators[0]

    def training() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return f(x.clone().requires_grad_())

    torch.nn.functional.layer_norm(x, x.shape[-1:])  # what is allocated once is not counted
    ours, step = held(operator), held(training)
    assert operators[0].method is Method.DOUBLE_BACKWARD
    assert 0 < ours <= step, f"{ours} bytes beside {step}"
