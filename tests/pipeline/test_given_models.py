"""Every public call that takes a model says what to give instead of something else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import UsageError

MODEL = "nn:decoder,depth=1,width=16,heads=2"
CALLS: dict[str, Callable[[Any], object]] = {
    "check": lambda model: normscope.check(model, steps=1, budget="fast"),
    "read_anatomy": normscope.read_anatomy,
    "plan": normscope.plan,
    "fuse": normscope.fuse,
    "fuse with a batch": lambda model: normscope.fuse(model, torch.zeros(2, 3, dtype=torch.long)),
    "recompute": lambda model: normscope.recompute(model, ["blocks.0"]),
    "Monitor": lambda model: normscope.Monitor(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))])),
    "diff": lambda model: normscope.diff(model, model),
    "load": normscope.load,
}
NOT_A_MODEL: dict[str, Any] = {"nothing": None, "a dict": {"weight": 1}, "a list": [nn.Linear(2, 2)], "3": 3}


@pytest.mark.parametrize("given", NOT_A_MODEL)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_model_is_refused_in_a_line(call: str, given: str) -> None:
    with pytest.raises(UsageError, match="expected") as caught:
        CALLS[call](NOT_A_MODEL[given])
    assert type(NOT_A_MODEL[given]).__name__ in str(caught.value)


@pytest.mark.parametrize("call", ["check", "read_anatomy", "fuse", "fuse with a batch", "recompute"])
def test_the_text_of_a_model_is_to_be_loaded_first(call: str) -> None:
    with pytest.raises(UsageError) as caught:
        CALLS[call](MODEL)
    assert str(caught.value) == (
        f'the text "{MODEL}" as a model: expected a torch.nn.Module; load a MODEL first and give its module: '
        f'normscope.load("{MODEL}").model.'
    )


@pytest.mark.parametrize("call", ["check", "plan", "fuse", "recompute"])
def test_a_class_is_to_be_built_first(call: str) -> None:
    with pytest.raises(UsageError, match=r"give an instance of it: Linear\(…\)"):
        CALLS[call](nn.Linear)


@pytest.mark.parametrize("call", ["fuse", "recompute"])
def test_of_a_subject_the_module_is_given(call: str) -> None:
    with pytest.raises(UsageError, match=r"a model of type Subject.*the attribute model"):
        CALLS[call](normscope.load(MODEL))


def test_a_factory_or_what_it_makes_names_the_call_that_takes_it() -> None:
    def build() -> tuple[nn.Module, torch.Tensor]:
        return nn.Linear(2, 2), torch.zeros(1, 2)

    for given in (build, build()):
        with pytest.raises(UsageError, match=r"check takes all of it, as check\(\*build\(\)\)"):
            normscope.check(given)  # type: ignore[arg-type]
