"""Names of modules and parameters without the parts that wrappers add.

`torch.compile`, DDP, FSDP and checkpoint wrappers hold the model as a child with a fixed name, which is left
out. A model's own child called `module` keeps its name, so names stay unique.
"""

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

_ALWAYS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_TORCH_WRAPPERS = (DataParallel, DistributedDataParallel, AveragedModel)


def plain_paths(model: nn.Module) -> dict[str, str]:
    """Path of every module of `model` → the path without wrappers."""
    return {path: plain for path, plain, _, _ in _walk(model)}


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Plain path and module of every module except wrappers; a shared module under each of its names."""
    return ((plain, module) for _, plain, module, is_wrapper in _walk(model) if not is_wrapper)


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters()` by plain names."""
    paths = plain_paths(model)
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        path, _, own = name.rpartition(".")
        yield _join(paths.get(path, path), own), parameter


def _walk(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, bool]]:
    """Path, plain path, module, and whether the module is a wrapper."""
    plain: dict[str, str] = {"": ""}
    wrapped: dict[str, str | None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, own = path.rpartition(".")
        if path:
            plain[path] = plain[parent] if wrapped[parent] == own else _join(plain[parent], own)
        wrapped[path] = _wrapped_child(module, outermost=not plain[path])
        yield path, plain[path], module, wrapped[path] is not None


def _wrapped_child(module: nn.Module, outermost: bool) -> str | None:
    """Name of the child that a wrapper wraps; None where the module is no wrapper.

    A class from outside torch counts as a wrapper only around the whole model (`outermost`).
    """
    children = [name for name, _ in module.named_children()]
    if len(children) != 1:
        return None
    if children[0] in _ALWAYS or isinstance(module, _TORCH_WRAPPERS):
        return children[0]
    is_bare = next(module.parameters(recurse=False), None) is None
    return "module" if children[0] == "module" and outermost and is_bare else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
