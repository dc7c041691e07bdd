"""Tests of plain names: wrappers' parts are left out; a model's own child called `module` keeps its name."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from normscope.anatomy import named_modules, named_parameters, read_anatomy


class Residual(nn.Module):
    """x + module(x), with a single child that is called `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(x)


class Sums(nn.Module):
    """A block with a child called `module` and another branch, both with a `weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.weight = nn.Linear(8, 8, bias=False), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.module(x)
        return x + (x @ self.weight).relu()


class Wrapper(nn.Module):
    """A wrapper in the style of training libraries."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def bare() -> nn.Module:
    return nn.Sequential(Residual(nn.Linear(8, 8)), Residual(nn.Linear(8, 8)), Sums(), Sums())


WRAPPED = {
    "compile": lambda m: torch.compile(m, backend="eager"),
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "own class": Wrapper,
    "two": lambda m: Wrapper(torch.compile(Wrapper(m), backend="eager")),
    "block": lambda m: nn.Sequential(torch.compile(m[0], backend="eager"), *m[1:]),
    "block in DataParallel": lambda m: nn.Sequential(m[0], nn.DataParallel(m[1]), *m[2:]),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_model_has_the_names_of_the_bare_one(wrap: object) -> None:
    model = bare()
    names = [name for name, _ in model.named_parameters()]
    paths = [path for path, _ in model.named_modules()]
    wrapped = wrap(copy.deepcopy(model))  # type: ignore[operator]

    assert [name for name, _ in named_parameters(wrapped)] == names
    assert [path for path, _ in named_modules(wrapped)] == paths
    x = torch.randn(2, 3, 8)
    assert read_anatomy(wrapped, x).to_dict() == read_anatomy(model, x).to_dict()


def test_a_child_that_is_called_module_keeps_its_name() -> None:
    names = [name for name, _ in named_parameters(bare())]
    assert len(set(names)) == len(names)
    assert "0.module.weight" in names
    assert {"2.module.weight", "2.weight"} <= set(names)
    anatomy = read_anatomy(bare(), torch.randn(2, 3, 8))
    assert [p.parameter for b in anatomy.branches for p in b.projections] == [
        *("0.module.weight", "1.module.weight"),
        *("2.module.weight", "2.weight", "3.module.weight", "3.weight"),
    ]


def test_a_tied_parameter_is_listed_under_each_name_where_asked() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    wrapped = Wrapper(model)
    assert [name for name, _ in named_parameters(wrapped)] == ["0.weight"]
    assert [name for name, _ in named_parameters(wrapped, remove_duplicate=False)] == ["0.weight", "1.weight"]


def test_a_module_with_parameters_of_its_own_is_no_wrapper() -> None:
    class Scaled(Wrapper):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Parameter(torch.ones(8))

    names = [name for name, _ in named_parameters(Scaled(nn.Linear(8, 8)))]
    assert names == ["weight", "module.weight", "module.bias"]
