"""The machine: processors, devices, terminal, fonts, folders."""

import os
import platform
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

NOT_MEASURED = "No GPU was measured: every figure and threshold of normscope was taken on CPUs."


def python() -> dict[str, Any]:
    """The interpreter and its platform."""
    return {
        "version": platform.python_version(), "executable": sys.executable, "platform": platform.platform(),
    }  # fmt: skip


def devices() -> dict[str, Any]:
    """Processors and accelerators, as PyTorch sees them."""
    import torch

    found: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "memory_bytes": None}
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.append(
                {"device": f"cuda:{index}", "name": properties.name, "memory_bytes": properties.total_memory}
            )
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "memory_bytes": None})
    return {
        "build": _build(),
        "cpus": os.cpu_count() or 1,
        "usable_cpus": _usable_cpus(),
        "threads": torch.get_num_threads(),
        "found": found,
        "measured": NOT_MEASURED,
    }


def _build() -> str:
    """The kind of PyTorch's build: "CPU", "CUDA 12.8" or "ROCm 6.4"."""
    import torch

    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    return "CPU" if hip is None else f"ROCm {hip}"


def _usable_cpus() -> int:
    """Processors that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return os.cpu_count() or 1 if affinity is None else len(affinity(0))


def flushes_denormals() -> bool:
    """True where the processor can flush denormals; forecasts of collapsed runs are slow where it cannot."""
    import torch

    answers: list[bool] = []
    # The setting belongs to a thread and to those that it starts: this one ends with it.
    thread = threading.Thread(target=lambda: answers.append(bool(torch.set_flush_denormal(True))))
    thread.start()
    thread.join()
    return answers == [True]


def terminal() -> dict[str, Any]:
    """The encoding of the output; characters that it lacks are spelled out."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        "σ→●".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return {"encoding": encoding, "unicode": False}
    return {"encoding": encoding, "unicode": True}


def fonts() -> dict[str, Any]:
    """The font of the pictures, which comes with matplotlib."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return {"name": "DejaVu Sans", "found": path.is_file()}


def folders() -> list[dict[str, Any]]:
    """Folders that are written to besides those of the user: matplotlib's cache, and temporary files."""
    found = {"temporary files": _temporary(), "cache of matplotlib": _matplotlib_cache()}
    return [
        {
            "use": use,
            "path": None if path is None else str(path),
            "writable": path is not None and _writable(path),
        }
        for use, path in found.items()
    ]


def _temporary() -> Path | None:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # none of the candidates can be written
        return None


def _matplotlib_cache() -> Path:
    """The folder that matplotlib wants; it takes a temporary one where that cannot be written."""
    given = os.environ.get("MPLCONFIGDIR")
    if given:
        return Path(given)
    if sys.platform.startswith(("linux", "freebsd")):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
    return Path.home() / ".matplotlib"


def _writable(path: Path) -> bool:
    """True where files can be made in `path`, or in the nearest of its parents that exists."""
    place = next((each for each in (path, *path.parents) if each.exists()), path)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
