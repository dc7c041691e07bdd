"""normscope: predict whether a deep Transformer will train, from its norms, measurements and trial steps.

The main calls:

    import normscope

    report = normscope.check(model)            # anatomy, probes, forecast, verdict
    print(report.verdict, report.findings)

    anatomy = normscope.read_anatomy(model)    # only the norms and branches, without measurements
    subject = normscope.load("hf:gpt2,n_layer=24")
    model = normscope.nn.build("decoder", scheme="deepnorm", depth=24)
"""

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope import kernels, nn, planning
    from normscope.anatomy import Anatomy, read_anatomy
    from normscope.compare import Diff, DiffInterrupted, diff
    from normscope.errors import NormscopeError, UsageError
    from normscope.fusing import fuse
    from normscope.monitor import Monitor, Rescue
    from normscope.pipeline import CheckInterrupted, check
    from normscope.planning import Plan, plan
    from normscope.planning.recompute import recompute
    from normscope.report import Report
    from normscope.subjects import Run, Subject
    from normscope.subjects.load import load

__version__ = "0.1.0"

__all__ = [
    "Anatomy",
    "CheckInterrupted",
    "Diff",
    "DiffInterrupted",
    "Monitor",
    "NormscopeError",
    "Plan",
    "Report",
    "Rescue",
    "Run",
    "Subject",
    "UsageError",
    "check",
    "diff",
    "fuse",
    "kernels",
    "load",
    "nn",
    "plan",
    "planning",
    "read_anatomy",
    "recompute",
]

_HOME = {
    "Anatomy": "anatomy",
    "CheckInterrupted": "pipeline",
    "Diff": "compare",
    "DiffInterrupted": "compare",
    "Monitor": "monitor",
    "NormscopeError": "errors",
    "Plan": "planning",
    "Report": "report",
    "Rescue": "monitor",
    "Run": "subjects",
    "Subject": "subjects",
    "UsageError": "errors",
    "check": "pipeline",
    "diff": "compare",
    "fuse": "fusing",
    "load": "subjects",
    "plan": "planning",
    "recompute": "planning",
    "read_anatomy": "anatomy",
}


_MODULES = ("kernels", "nn", "planning")


if not TYPE_CHECKING:  # a type checker reads the imports above, so that a misspelt name is an error

    def __getattr__(name: str) -> Any:
        """Import on first use: `normscope --help` and `import normscope` do not wait for torch."""
        if name in _MODULES:
            return import_module(f"normscope.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'normscope' has no attribute {name!r}")
        state = random.getstate()  # rich draws from Python's generator when it is imported
        try:
            return getattr(import_module(f"normscope.{_HOME[name]}"), name)
        finally:
            random.setstate(state)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
