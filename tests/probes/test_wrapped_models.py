"""A law over models and wrappers: compiled or wrapped, a model has the same measurements at its sites."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from test_probe_jacobian import Block, Model, ids
from torch import Tensor, nn

from normscope.anatomy import read_anatomy
from normscope.probes import PROBES, Measurement
from normscope.subjects import Subject


class Scaled(nn.Linear):
    """A layer whose inner layer is called `module`, beside a weight and a bias of its own."""

    def __init__(self, d: int) -> None:
        super().__init__(d, d)
        self.module = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(super().forward(x).relu())


class WithModule(Block):
    def __init__(self, d: int) -> None:
        super().__init__(d, "post")
        self.feed_forward = Scaled(d)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pre": lambda: Model(4, lambda: Block(4, "pre")),
    "post": lambda: Model(4, lambda: Block(4, "post")),
    "a child called module": lambda: Model(4, lambda: WithModule(4)),
}


class Wrapper(nn.Module):
    """A wrapper that holds its model as DataParallel does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Tensor) -> Tensor:
        return self.module(*args)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def compiled_blocks(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = compiled(block)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "wrapped": Wrapper,
    "compiled blocks": compiled_blocks,
}


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def measured(model: nn.Module) -> list[Measurement]:
    batch = ids(3)
    subject = Subject(model, batch, loss, lambda: iter([batch]), 0, "test", "test")
    anatomy = read_anatomy(subject)
    return [row for probe in PROBES.values() for row in probe(subject, anatomy)]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


@cache
def plain(name: str) -> list[Measurement]:
    return measured(made(name))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_wrapped_model_has_the_measurements_of_the_model(name: str, wrapper: str) -> None:
    rows = measured(WRAPPERS[wrapper](made(name)))
    assert [row.to_dict() for row in rows] == [row.to_dict() for row in plain(name)]


def test_the_gradient_of_every_parameter_counts_where_a_child_is_called_module() -> None:
    model = made("a child called module")
    loss(model(ids(3)), ids(3)).backward()
    for i, block in enumerate(model.blocks):
        expected = sum(float(p.grad.square().sum()) for p in block.parameters() if p.grad is not None)
        row = next(
            r
            for r in plain("a child called module")
            if (r.quantity, r.site) == ("gradient/block", f"blocks.{i}")
        )
        assert row.value == pytest.approx(expected**0.5)
