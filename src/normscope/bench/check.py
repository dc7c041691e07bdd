"""`normscope bench check`: what a check costs, in steps of the run that it saves.

The model is GPT-2 124M (Hugging Face, random weights) on 4 × 64 tokens. Time and peak memory of the whole
default check, forecast included, are given against a float32 AdamW training step of that model on that batch;
σ_max of the 12-layer stack at T = 128 against forwards of that stack. Times are medians of steps taken
before and after the check; memory is the peak resident set of a fresh process, less what the imports take.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

MODEL = "hf:gpt2"
STEPS_EACH_SIDE = 5


def bench_check() -> list[dict[str, Any]]:
    """Rows of figure and target, each from a fresh process."""
    time_row, memory_step, memory_check, sigma = (
        _in_fresh_process(name) for name in ("time", "memory-step", "memory-check", "sigma")
    )
    ratio = memory_check["peak_mib"] / memory_step["peak_mib"]
    return [
        {
            "what": "whole default check of GPT-2 124M, in training steps",
            "figure": round(time_row["check_s"] / time_row["step_s"], 1),
            "target": "≤ 40",
            "how": f"check {time_row['check_s']:.1f} s, median step {time_row['step_s']:.3f} s, "
            f"{time_row['threads']} threads, {time_row['allocator']}",
        },
        {
            "what": "peak memory of the check, in training steps' peaks",
            "figure": round(ratio, 2),
            "target": "≤ 3",
            "how": f"check {memory_check['peak_mib']:.0f} MiB, step {memory_step['peak_mib']:.0f} MiB "
            "above the imported libraries",
        },
        {
            "what": "σ_max of the 12-layer stack at T = 128, in forwards of the stack",
            "figure": round(sigma["sigma_s"] / sigma["forward_s"], 1),
            "target": "≤ 25",
            "how": f"{sigma['products']} products and set-up; forward {1e3 * sigma['forward_s']:.0f} ms",
        },
        {
            "what": "its error against 200 products",
            "figure": f"{abs(sigma['value'] / sigma['reference'] - 1):.1e}",
            "target": "≤ 1e-2",
            "how": f"{sigma['value']:.5g} against {sigma['reference']:.5g}",
        },
    ]


def _in_fresh_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "normscope.bench.check", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"benchmark process {name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _training_step() -> tuple[Callable[[], None], Any]:
    from normscope.subjects import load

    subject = load(MODEL)
    subject.model.train()
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=3e-4)

    def step() -> None:
        optimizer.zero_grad()
        subject.loss().backward()
        optimizer.step()

    return step, subject


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _time() -> dict[str, Any]:
    """The check between two rows of training steps, so that a slow spell of the machine falls on both."""
    from normscope import check
    from normscope.subjects import load

    step, _ = _training_step()
    step()  # the first one makes Adam's moments
    steps = [_timed(step) for _ in range(STEPS_EACH_SIDE)]
    subject = load(MODEL)
    check_s = _timed(lambda: check(subject))
    steps += [_timed(step) for _ in range(STEPS_EACH_SIDE)]
    return {"check_s": check_s, "step_s": statistics.median(steps), **_circumstances()}


def _memory(run: Callable[[], Any]) -> dict[str, Any]:
    """Peak resident memory of `run` over what the imported libraries already take."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (the import is the point: it counts as baseline)

    import normscope.pipeline  # noqa: F401

    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return {"peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - baseline) / 1024}


def _memory_of_steps() -> None:
    step, _ = _training_step()
    for _ in range(3):
        step()


def _memory_of_check() -> None:
    from normscope import check
    from normscope.subjects import load

    check(load(MODEL))


def _circumstances() -> dict[str, Any]:
    allocator = os.path.basename(os.environ.get("LD_PRELOAD", "")) or "the C library's allocator"
    return {"threads": torch.get_num_threads(), "allocator": allocator}


if __name__ == "__main__":
    _PARTS: dict[str, Callable[[], dict[str, Any]]] = {
        "time": _time,
        "memory-step": lambda: _memory(_memory_of_steps),
        "memory-check": lambda: _memory(_memory_of_check),
    }
    print(json.dumps(_PARTS[sys.argv[1]]()))
