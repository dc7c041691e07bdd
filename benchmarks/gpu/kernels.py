"""`residual_norm` by Triton beside the user's lines, plain and compiled, on a GPU.

    python -m benchmarks.gpu.kernels

Milliseconds by `triton.testing.do_bench` (median, the cache is cleared between calls), the better of two
rounds in turns. The floor is a copy of the bytes that have to be moved. docs/kernels.md has the results.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernels import KINDS, Call, copying, lines, moved_bytes, ours, running, setting_of

SIZES = ((2048, 1024), (8192, 1024), (8192, 2048), (8192, 4096), (16384, 4096))
"""Tokens and features; the lines are compiled at the last size only."""


def measure(call: Call) -> dict[str, Any]:
    """Milliseconds of a setting by mode and by what was called."""
    inputs, leaves, grads = setting_of(call, "cuda")
    calls: dict[str, Callable[[], Any]] = {
        "lines": partial(lines, call, *inputs),
        "triton": partial(ours, call, "triton", *inputs),
    }
    if (call.tokens, call.width) == SIZES[-1]:
        torch._dynamo.reset()
        calls["compiled lines"] = partial(torch.compile(lines, dynamic=False), call, *inputs)
    found: dict[str, Any] = {"call": str(call), "elements": call.tokens * call.width}
    for mode in ("inference", "training"):
        runs = {name: running(each, mode, leaves, grads) for name, each in calls.items()}
        runs["floor"] = copying(moved_bytes(call, mode), "cuda")
        rounds = [{name: _milliseconds(run) for name, run in runs.items()} for _ in range(2)]
        found[mode] = {name: min(each[name] for each in rounds) for name in runs}
    return found


def _milliseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    run()
    return round(float(do_bench(run, warmup=10, rep=50, return_mode="median")), 4)


def main() -> None:
    for kind in KINDS:
        for size in SIZES:
            print(json.dumps(measure(Call(*kind, *size)), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
