"""The machine: processors, devices, terminal, temporary files."""

import os
import platform
import sys
import tempfile
import threading
from typing import Any

NOT_MEASURED = "No forecast was measured on a GPU: thresholds and figures of checks were taken on CPUs."


def devices() -> dict[str, Any]:
    """Processors and accelerators, as PyTorch sees them."""
    import torch

    found: list[tuple[str, str, int | None]] = [("cpu", platform.processor() or platform.machine(), None)]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append((f"cuda:{index}", properties.name, properties.total_memory))
    if torch.backends.mps.is_available():
        found.append(("mps", "Apple GPU", None))
    builds = {"CUDA": torch.version.cuda, "ROCm": getattr(torch.version, "hip", None)}
    cpus = os.cpu_count() or 1
    return {
        "build": next((f"{kind} {version}" for kind, version in builds.items() if version), "CPU"),
        "cpus": cpus,
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus,
        "threads": torch.get_num_threads(),
        "flush_denormal": flush_denormal(),
        "found": [dict(zip(("device", "name", "memory_bytes"), each, strict=True)) for each in found],
        "measured": NOT_MEASURED,
    }


def flush_denormal() -> bool:
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


def temporary() -> str | None:
    """The folder of temporary files; None where no candidate can be written."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return None
