"""Packages that normscope needs, and those that switch a feature on."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from normscope.errors import describe


@dataclass(frozen=True)
class Package:
    """A package that normscope uses.

    Attributes:
        name: its name on PyPI.
        minimum: the oldest version that will do, "2.8".
        module: the name it is imported by.
        extra: the extra of normscope that installs it; "" for one that is needed.
        enables: the command or feature that needs it; "" for one that is needed.
    """

    name: str
    minimum: str
    module: str
    extra: str = ""
    enables: str = ""

    @property
    def install(self) -> str:
        """The command that installs it."""
        return (
            f'pip install "normscope[{self.extra}]"'
            if self.extra
            else f'pip install "{self.name}>={self.minimum}"'
        )


NEEDED = (
    Package("torch", "2.8", "torch"),
    Package("numpy", "1.26", "numpy"),
    Package("scipy", "1.11", "scipy"),
    Package("safetensors", "0.4", "safetensors"),
    Package("matplotlib", "3.9", "matplotlib"),
    Package("jinja2", "3.1", "jinja2"),
    Package("rich", "13.7", "rich"),
    Package("typer", "0.29", "typer"),
)
OPTIONAL = (
    Package("transformers", "5.0", "transformers", "hf", "models of Hugging Face (hf:…)"),
    Package("ray", "2.40", "ray", "ray", "normscope map --engine ray"),
    Package("pyarrow", "18", "pyarrow", "parquet", "normscope map --parquet"),
    Package("scikit-learn", "1.5", "sklearn", "vision", "--images digits"),
)


@dataclass(frozen=True)
class Found:
    """A package as it is installed.

    Attributes:
        package: the package that was asked for.
        version: its version; None where it is not installed.
        status: "ok", "missing", "too old" or "broken".
        reason: the error of an import that failed; else "".
    """

    package: Package
    version: str | None
    status: str
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The package as the JSON has it; `install` is the command that repairs it, null where it is ok."""
        return {
            "name": self.package.name,
            "version": self.version,
            "minimum": self.package.minimum,
            "needed": not self.package.extra,
            "status": self.status,
            "reason": self.reason,
            "disables": "" if self.status == "ok" else self.package.enables,
            "install": None if self.status == "ok" else self.package.install,
        }


def look_up(package: Package, import_: Callable[[str], Any] = import_module) -> Found:
    """The installed version; a needed package is imported too, an optional one can take seconds."""
    try:
        installed = version(package.name)
    except PackageNotFoundError:
        return Found(package, None, "missing")
    if _release(installed) < _release(package.minimum):
        return Found(package, installed, "too old")
    if not package.extra:
        try:
            import_(package.module)
        except Exception as error:  # a library that it links to, another package that does not fit
            return Found(package, installed, "broken", describe(error))
    return Found(package, installed, "ok")


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
