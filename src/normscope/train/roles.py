"""Roles of parameters by their modules and shapes, for the groups of a recipe."""

import re

from torch import nn

ROLES = ("embeddings", "matrices", "head", "biases", "norm gains", "norm biases", "scales")
"""Roles in the order in which they are listed; "scales" are other vectors and numbers (LayerScale)."""
_TABLE = re.compile(r"emb|wte|wpe|pos|tok", re.IGNORECASE)


def parameter_roles(model: nn.Module) -> dict[int, str]:
    """Role of every parameter by its id; a weight that head and embedding share is an embedding."""
    found: dict[int, str] = {}
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            role = _role(path, module, name, parameter, rows)
            if id(parameter) not in found or role == "embeddings":
                found[id(parameter)] = role
    return found


def _role(path: str, module: nn.Module, name: str, parameter: nn.Parameter, rows: set[int]) -> str:
    is_bias = "bias" in name or name == "beta"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embeddings"
    if "norm" in type(module).__name__.lower():
        return "norm biases" if is_bias else "norm gains"
    if is_bias:
        return "biases"
    if parameter.numel() == max((1, *parameter.shape)):
        return "scales"
    if isinstance(module, nn.Linear):
        in_list = any(part.isdigit() for part in path.split("."))
        return "head" if module.out_features in rows and not in_list else "matrices"
    return "embeddings" if _TABLE.search(name) else "matrices"
