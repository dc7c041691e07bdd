"""`file.py:factory` and `package.module:factory`: the user's own models."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from normscope.errors import UsageError, describe, suggest
from normscope.interrupts import Ended
from normscope.subjects.memory import is_out_of_memory
from normscope.subjects.own_run import Run
from normscope.subjects.spec import GRAMMAR, Spec
from normscope.subjects.subject import LossFn

RETURNS = "a module, (module, batch), (module, batch, loss_fn) or a normscope.Run"
_TRACEBACK = "add --traceback to see where it failed"


def call_factory(spec: Spec) -> tuple[nn.Module, Any, LossFn | None, Run | None]:
    """Import and call the user's factory; its prints go to stderr.

    Options of the spec are keyword arguments of the factory. The result is the module, its batch (or iterator
    of batches, or None), its loss function (or None), and the Run that held these (or None).
    """
    with contextlib.redirect_stdout(sys.stderr):
        module = _import(spec)
        factory = _find(spec, module)
        if isinstance(factory, nn.Module):
            return factory, None, None, None
        try:
            made = factory(**spec.options)
        except Ended:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            raise UsageError(
                f'factory "{spec.text}" raised {describe(error)}',
                f"{RETURNS} from it",
                f"fix the factory; {_TRACEBACK}",
            ) from error
    if isinstance(made, Run):
        return *_checked(spec, (made.model, made.batches, made.loss)), made
    return *_checked(spec, made), None


def _import(spec: Spec) -> ModuleType:
    is_file = spec.name.endswith(".py") or "/" in spec.name
    try:
        return _import_file(spec) if is_file else _import_module(spec)
    except (UsageError, Ended):
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        do = f"install {missing} or fix the import" if missing else "fix the file"
        raise UsageError(
            f'"{spec.name}" of "{spec.text}" raised {describe(error)}',
            "code that can be imported",
            f"{do}; {_TRACEBACK}",
        ) from error


def _import_file(spec: Spec) -> ModuleType:
    """Import a file as `python file.py` would, or as a module of its package if it has relative imports."""
    path = Path(spec.name).expanduser()
    if not path.is_file():
        raise UsageError(f'"{spec.name}" of "{spec.text}" (not found)', "a Python file", "check the path")
    root, name = _package_of(path.resolve())
    _last_on_path(root)
    _first_on_path(path.resolve().parent)
    try:
        return _import_alone(path, spec)
    except ImportError as error:
        if "no known parent package" not in str(error):
            raise
    return importlib.import_module(name)


def _package_of(path: Path) -> tuple[Path, str]:
    """The folder that holds the package of a file, and the file's name as a module of it."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if root == path.parent:  # a package without an __init__.py, if it is one
        root = root.parent
    return root, ".".join(path.relative_to(root).with_suffix("").parts)


def _import_alone(path: Path, spec: Spec) -> ModuleType:
    # The file's own name could shadow a library: it may be torch.py.
    found = importlib.util.spec_from_file_location(f"normscope_subject_{path.stem}", path)
    if found is None or found.loader is None:
        raise UsageError(f'"{spec.name}" of "{spec.text}"', "a file that ends in .py", "rename it")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses need their module there
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[found.name]
        raise
    return module


def _import_module(spec: Spec) -> ModuleType:
    _first_on_path(Path.cwd())
    _last_on_path(Path.cwd() / "src")
    try:
        return importlib.import_module(spec.name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{spec.name}.".startswith(f"{error.name}."):
            raise  # the module exists; an import inside it failed
        best = suggest(spec.name, ("hf", "nn"), "check the name and the current folder")
        raise UsageError(f'MODEL "{spec.text}" (no module "{error.name}")', GRAMMAR, best) from error


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _last_on_path(folder: Path) -> None:
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _find(spec: Spec, module: ModuleType) -> Callable[..., Any]:
    factory = getattr(module, spec.factory, None)
    if factory is None:
        own = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UsageError(
            f'factory "{spec.factory}" of "{spec.text}" (not found)',
            f'a function in "{spec.name}"',
            suggest(spec.factory, own, f"check its name{_or_init(module)}"),
        )
    if not callable(factory):
        raise UsageError(
            f'"{spec.factory}" of "{spec.text}" ({type(factory).__name__})', "a function", "name the factory"
        )
    try:
        inspect.signature(factory).bind(**spec.options)
    except TypeError as error:
        known = list(inspect.signature(factory).parameters)
        wrong = next((key for key in spec.options if key not in known), None)
        raise UsageError(
            f'factory "{spec.text}" ({error})',
            "a factory that takes exactly the given options",
            suggest(wrong, known, "change the options")
            if wrong
            else f"give the arguments as options, key=value{_or_init(module, factory)}",
        ) from error
    except ValueError:
        pass  # no signature: the call itself will fail if the options are wrong
    return factory


def _or_init(module: ModuleType, factory: Any = None) -> str:
    """Words that name the command which writes a factory; empty where no file holds the module."""
    path = Path(module.__file__ or "")
    if path.suffix != ".py":
        return ""
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    is_model = isinstance(factory, type) and issubclass(factory, nn.Module)
    chosen = f" --class {factory.__name__}" if is_model else ""
    return f", or let `normscope init {quote(str(here))}{chosen}` write a factory"


def _checked(spec: Spec, made: Any) -> tuple[nn.Module, Any, LossFn | None]:
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        hint = "call the class" if parts and isinstance(parts[0], type) else "change what it returns"
        raise UsageError(f'factory "{spec.text}" returned {_shown(made)}', RETURNS, hint)
    model, batch, loss_fn = (*parts, None, None)[:3]
    if len(parts) > 1 and not isinstance(batch, Tensor | tuple | Mapping | Iterable):
        raise UsageError(
            f'factory "{spec.text}" returned a batch of type {type(batch).__name__}',
            "a tensor, a tuple of arguments, a dict of keyword arguments, or an iterator of those",
            "change what it returns",
        )
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(
            f'factory "{spec.text}" returned a loss_fn of type {type(loss_fn).__name__}',
            "a function loss_fn(output, batch)",
            "change what it returns",
        )
    return model, batch, loss_fn


def _shown(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return f"the class {made.__name__}" if isinstance(made, type) else f"{type(made).__name__}"
