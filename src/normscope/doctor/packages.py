"""Packages that normscope needs, and those that switch a feature on."""

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from normscope.errors import describe


class Package(NamedTuple):
    """A package by its name on PyPI, and the oldest version that will do.

    `extra` is the extra of normscope that installs an optional one, `enables` the feature that needs it.
    """

    name: str
    minimum: str
    extra: str = ""
    enables: str = ""


PACKAGES = (
    Package("torch", "2.8"),
    Package("numpy", "1.26"),
    Package("scipy", "1.11"),
    Package("safetensors", "0.4"),
    Package("matplotlib", "3.9"),
    Package("jinja2", "3.1"),
    Package("rich", "13.7"),
    Package("typer", "0.29"),
    Package("transformers", "5.0", "hf", "models of Hugging Face (hf:…)"),
    Package("ray", "2.40", "ray", "normscope map --engine ray"),
    Package("pyarrow", "18", "parquet", "normscope map --parquet"),
    Package("scikit-learn", "1.5", "vision", "--images digits"),
    Package("torchao", "0.15", "quantise", "normscope check --quantise"),
)


def look_up(package: Package, import_: Callable[[str], Any] = import_module) -> dict[str, Any]:
    """The package as it is installed; `install` is the command that repairs it, None where it is ok.

    A needed package is imported too; the import of an optional one can take seconds.
    """
    installed, status, reason = None, "ok", ""
    try:
        installed = version(package.name)
        if _release(installed) < _release(package.minimum):
            status = "too old"
        elif not package.extra:
            import_(package.name)
    except PackageNotFoundError:
        status = "missing"
    except Exception as error:  # a library that it links to, another package that does not fit
        status, reason = "broken", describe(error)
    wanted = f"normscope[{package.extra}]" if package.extra else f"{package.name}>={package.minimum}"
    return {
        "name": package.name,
        "version": installed,
        "minimum": package.minimum,
        "needed": not package.extra,
        "status": status,
        "reason": reason,
        "disables": "" if status == "ok" else package.enables,
        "install": None if status == "ok" else f'pip install "{wanted}"',
    }


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
