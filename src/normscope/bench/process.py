"""Benchmarks that want a process of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def in_fresh_process(module: str, part: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run `python -m MODULE PART` and return the last line it prints, read as JSON.

    Raises:
        RuntimeError: the process failed; the message holds its stderr.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, part],
        env=os.environ | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"benchmark process {part} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def circumstances() -> dict[str, Any]:
    """The settings that a time depends on besides the code: threads and allocator."""
    import torch

    allocator = os.path.basename(os.environ.get("LD_PRELOAD", "")) or "the C library's allocator"
    return {"threads": torch.get_num_threads(), "allocator": allocator}
