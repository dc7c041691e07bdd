"""Start of the capture in a Python process of a training script, before any of its code.

`normscope check -- COMMAND` and `normscope watch -- COMMAND` put this folder first on PYTHONPATH. Python
imports a module of this name at its start; another one on the path would be hidden, so it is run as well.
"""

import atexit
import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.environ.get("NORMSCOPE_CAPTURE", "")  # kept: a script may empty its environment
_LISTENER = os.environ.get("NORMSCOPE_LISTENER", "")  # module whose begin() watches the script to its end
_HEAD = "NORMSCOPE_WATCH_HEAD"


def _run_hidden() -> None:
    """Run the sitecustomize that this one hides."""
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


class _AfterTorch:
    """Finder that starts the capture when the script has imported torch."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Find torch as Python would, and start the capture after it was run."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec("torch")
        if found is not None and found.loader is not None:
            run = found.loader.exec_module

            def run_and_start(module):  # type: ignore[no-untyped-def]
                run(module)
                _begin()

            found.loader.exec_module = run_and_start  # type: ignore[method-assign]
        return found


def _begin() -> None:
    if not _IS_CHECKED:
        _try(_LISTENER, "begin")
        return
    try:
        from normscope.capture.child import begin
    except Exception as error:  # another Python than normscope's: too old, or without normscope
        _refuse(f"{type(error).__name__}: {error}")
    else:
        begin(_FOLDER)


def _try(module: str, function: str) -> None:
    """Call a function of a watched script's listener; an error is said, and the script goes on."""
    try:
        getattr(importlib.import_module(module), function)()
    except Exception as error:
        print(f"normscope: not watched by {sys.executable}: {type(error).__name__}: {error}", file=sys.stderr)


def _summarize(process: int) -> None:
    if os.getpid() == process:
        _try("normscope.monitor.launch", "summarize")


def _refuse(reason: str) -> None:
    """End this process; normscope says why."""
    import json

    given = f"Python {sys.executable}, which cannot import normscope ({reason})"
    expected = "a Python that has normscope and what it needs"
    facts = {"refusal": [given, expected, "install normscope there, and start its own normscope"]}
    with open(os.path.join(_FOLDER, f"facts-{os.getpid()}.json"), "w") as file:
        json.dump(facts, file)
    open(os.path.join(_FOLDER, "done"), "w").close()
    os._exit(1)


def _fails(kind, error, trace):  # type: ignore[no-untyped-def]
    """Store an error that ends the script, instead of printing its traceback."""
    try:
        from normscope.capture.child import store_failure

        is_stored = store_failure(_FOLDER, error)
    except Exception:
        is_stored = False
    if not is_stored:
        sys.__excepthook__(kind, error, trace)


_IS_CHECKED = os.path.isdir(_FOLDER)
if _IS_CHECKED:
    open(os.path.join(_FOLDER, "python"), "w").close()  # normscope sees that Python has loaded this file
    sys.meta_path.insert(0, _AfterTorch())
    sys.excepthook = _fails
elif _LISTENER:
    sys.meta_path.insert(0, _AfterTorch())
    if _HEAD not in os.environ:  # the first Python process of the script has the last word
        os.environ[_HEAD] = str(os.getpid())
        atexit.register(_summarize, os.getpid())
_run_hidden()
