"""The check of a caller's model: a module, or an error that says what to give."""

from typing import Any

from torch import nn

from normscope.errors import UsageError
from normscope.subjects.own_run import Run
from normscope.subjects.subject import Subject


def require_module(model: Any) -> None:
    """Raise UsageError unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise UsageError(_given(model), "a torch.nn.Module", _what_to_do(model))


def _given(model: Any) -> str:
    if isinstance(model, str):
        return f'the text "{model}" as a model'
    if isinstance(model, type):
        return f"the class {model.__name__} as a model"
    return f"a model of type {type(model).__name__}"


def _what_to_do(model: Any) -> str:
    if isinstance(model, str):
        spec = model if ":" in model else "hf:gpt2"
        return f'load a MODEL first and give its module: normscope.load("{spec}").model'
    if isinstance(model, Subject | Run):
        return "give its module: the attribute model"
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"give an instance of it: {model.__name__}(…)"
    if isinstance(model, dict):
        return "build the model, load the state dict into it, and give the module"
    if isinstance(model, tuple) and model and isinstance(model[0], nn.Module):
        return "give its first part, the module; check takes all of it, as check(*build())"
    if callable(model):
        return "call it and give the module that it makes; check takes all of it, as check(*build())"
    return "give the module itself"
