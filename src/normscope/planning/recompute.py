"""`recompute`: run modules of any model again in the backward pass, and undo it.

A module's class is replaced by a subclass whose forward is checkpointed, as FSDP2 does for sharding: paths,
the state dict and `isinstance` stay, and a deep copy of the model recomputes its own modules.
"""

import difflib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from types import TracebackType
from typing import Any

import torch
from torch import nn

from normscope.anatomy import named_modules
from normscope.errors import UsageError
from normscope.kernels.ahead import ReadsAhead
from normscope.nn.recompute import Recomputed, run_again_later
from normscope.subjects import require_module


class Applied(AbstractContextManager["Applied"]):
    """Modules that are recomputed from now on, until `undo()` or the end of a `with` block.

    Attributes:
        paths: their paths.
    """

    def __init__(self, paths: tuple[str, ...], modules: list[nn.Module], configs: list[Any]) -> None:
        self.paths = paths
        self._before = [(module, type(module)) for module in modules]
        self._caches = [(config, config.use_cache) for config in configs]
        for module in modules:
            kind: Any = type(module)
            module.__class__ = _recomputed(kind)
        for config in configs:
            config.use_cache = False

    def undo(self) -> None:
        """Run the modules once again, as before."""
        while self._before:
            module, kind = self._before.pop()
            module.__class__ = kind
        while self._caches:
            config, value = self._caches.pop()
            config.use_cache = value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def recompute(model: nn.Module, paths: Iterable[str]) -> Applied:
    """Run modules of `model` again in the backward pass instead of keeping their activations.

    Loss and gradients stay the same, dropout and running statistics included. Buffers are restored for the
    second run in the module's own children: a module that calls others, given as a function, must not be
    chosen where theirs change. Without gradients (under
    `torch.no_grad()`) nothing changes. Models of transformers get `config.use_cache = False`, because a cache
    of keys would be filled twice.

    Args:
        model: any model; wrappers such as DDP or `torch.compile` may be around it.
        paths: paths of the modules, without the wrappers' parts.

    Raises:
        UsageError: `model` is no module, `paths` is no list, or a path names no module, or one that cannot
            be recomputed: it is scripted, its `forward` was replaced on the object, or it is recomputed
            already.
    """
    require_module(model)
    known, wanted = dict(named_modules(model)), _paths(paths)
    if wanted and any(isinstance(module, ReadsAhead) for module in known.values()):
        given, do = (
            "a model whose residual adds and norms are fused",
            "undo that, or build it with fused=False",
        )
        raise UsageError(given, "one whose modules compute what they return", do)
    modules = [_module(known, path) for path in wanted]
    held = [
        (module, config)
        for module in (model.modules() if wanted else ())
        if getattr(config := getattr(module, "config", None), "use_cache", False) is True
    ]
    return Applied(wanted, modules, list({id(config): config for _, config in held}.values()))


def _paths(given: Any) -> tuple[str, ...]:
    """The paths, each once."""
    if isinstance(given, str):
        raise UsageError(f'paths "{given}"', "a list of paths", f'write ["{given}"]')
    if not isinstance(given, Iterable):
        kind = type(given).__name__
        raise UsageError(f"paths of type {kind}", "a list of paths of modules", "give plan.recompute")
    paths = list(given)
    for path in paths:
        if not isinstance(path, str):
            kind = f"a path of type {type(path).__name__}"
            raise UsageError(kind, "the path of a module, as text", "take a path of named_modules()")
    return tuple(dict.fromkeys(paths))


def _nearest(path: str, known: Iterable[str]) -> str:
    """Advice for a path that names no module: one that differs by its first part, else the most similar.

    `suggest` alone prefers a name that `path` begins with, which is often a list of blocks.
    """
    known = [each for each in known if each]
    ends = [each for each in known if each.endswith(f".{path}") or path.endswith(f".{each}")]
    near = [max(ends, key=len)] if ends else difflib.get_close_matches(path, known, n=1)
    return f'the nearest name is "{near[0]}"' if near else "take a path of named_modules()"


def _module(known: dict[str, nn.Module], path: str) -> nn.Module:
    if path not in known:
        raise UsageError(f'module "{path}"', "a path of a module of this model", _nearest(path, known))
    module = known[path]
    if isinstance(module, Recomputed):
        raise UsageError(f'module "{path}", which is recomputed already', "each once", "undo() it first")
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(f'module "{path}", which is scripted', "a Python module", "recompute its parent")
    if "forward" in vars(module):
        given = f'module "{path}", whose forward was replaced on the object'
        raise UsageError(given, "the forward of its class", "recompute before that is done")
    return module


@cache
def _recomputed(kind: Any) -> Any:
    """The subclass of `kind` that is recomputed; its name is the same."""

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(kind.forward, self)
        if torch.is_grad_enabled():
            return run_again_later(self, plain, *args, **kwargs)
        return plain(*args, **kwargs)

    names = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (Recomputed, kind), names | {"__qualname__": kind.__qualname__})
