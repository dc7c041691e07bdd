"""Choice of the model among the outermost modules that a training script runs."""

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from normscope.recording.calls import bare


def chosen_root(
    modules: Iterable[nn.Module], optimizers: Iterable[Optimizer], name: str | None
) -> nn.Module | None:
    """The module with the most trainable weights in optimizers, or the first of class `name` that has any.

    None if none has any, or none that does is of that class.
    """
    optimizers = list(optimizers)
    held = {module: num_held(module, optimizers) for module in modules}
    trained = [module for module in held if held[module]]
    if name is None:
        return max(trained, key=held.__getitem__, default=None)
    return next((module for module in trained if name == type(bare(module)).__name__), None)


def num_held(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Number of trainable weights of a module that an optimizer holds."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    return sum(p.numel() for p in module.parameters() if p.requires_grad and id(p) in held)


def ids(module: nn.Module) -> frozenset[int]:
    """Identities of a module's parameters."""
    return frozenset(map(id, module.parameters()))


def holds(optimizer: Optimizer, parameters: frozenset[int]) -> bool:
    """Whether an optimizer holds one of the parameters, given by `ids`."""
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
