"""Rebuild models of normscope.nn under another scheme or with other options, as the user would."""

import dataclasses
import warnings
from typing import Any

import torch
from torch import nn

from normscope.errors import UsageError
from normscope.nn import MODELS
from normscope.nn.drawn import is_trained
from normscope.nn.head import Head
from normscope.nn.models import name_of
from normscope.nn.swap import swap
from normscope.rules.remedies.remedy import NotApplicable
from normscope.subjects import Subject


def is_ours(model: nn.Module) -> bool:
    """True where it is one of `normscope.nn`'s models."""
    return type(model) in MODELS.values()


def rebuilt(subject: Subject, **options: Any) -> Subject:
    """The subject with its model built again from the same seed with other options of its config.

    Trained weights are kept, through `swap`, where only the scheme changes.

    Raises:
        NotApplicable: incompatible options, or trained weights and a change of more than the scheme.
    """
    model: Any = subject.model
    try:
        if is_trained(model):
            return dataclasses.replace(subject, model=_swapped(model, options))
        return dataclasses.replace(subject, model=_built(subject, options))
    except UsageError as error:
        raise NotApplicable(str(error)) from error


def _swapped(model: Any, options: dict[str, Any]) -> nn.Module:
    if set(options) != {"scheme"}:
        raise NotApplicable("the weights were trained, and only another scheme can take them over")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the output is meant to change
        return swap(model, options["scheme"])


def _built(subject: Subject, options: dict[str, Any]) -> nn.Module:
    model: Any = subject.model
    first = next(model.parameters())
    config = dataclasses.replace(model.config, **options)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(subject.seed)
        other = MODELS[name_of(model)](config)
    other.to(first.device, first.dtype)
    other.train(model.training)
    _keep_output_bias(model, other)
    return other


@torch.no_grad()
def _keep_output_bias(model: nn.Module, other: nn.Module) -> None:
    """Copy the output bias: it is set from the text's frequencies, not drawn."""
    biases = [m.bias for m in model.modules() if isinstance(m, Head) and m.bias is not None]
    heads = [m for m in other.modules() if isinstance(m, Head) and m.bias is not None]
    for bias, head in zip(biases, heads, strict=True):
        head.bias.copy_(bias)
