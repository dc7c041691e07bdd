"""`normscope bench kernels`: `residual_norm` against the lines of PyTorch that it stands for.

The lines are those that a user would write under the same rounding contract: in half precision the sum and
the norm are computed in float32, and each output is rounded once. Each call is timed for inference (no
gradients) and training (forward and all gradients), in turns in one process. The figure is the median over
the rounds of the ratio of two times of a round. The copy floor is the time in which `Tensor.copy_` moves the
bytes that have to be read and written once: both inputs and both outputs, and in training also their
gradients and the sum.

The default backend is measured apart, because it differs from the lines by a few per cent only: in random
order with the lines and the lines once more, and in several processes. Where the allocator happens to put the
tensors changes either time by up to a fifth for as long as a process lives.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.process import Row, circumstances, in_fresh_process, median_ratio, row
from normscope.kernels import residual_norm

ROUNDS = 25
DEFAULT_PROCESSES, DEFAULT_SECONDS, DEFAULT_ROUNDS = 7, 1.0, 30
"""Processes for the default backend in a setting; processor seconds and fewest rounds of each, for inference
and for training."""
SIZES = {"cpu": ((1024, 256), (4096, 1024)), "cuda": ((8192, 2048), (16384, 4096))}
"""Tokens and features, by device."""
FLOAT, HALF = ("float32", "float32"), ("bfloat16", "bfloat16")
KINDS = (
    ("layer", *FLOAT, 0.0),
    ("rms", *FLOAT, 0.0),
    ("layer", *HALF, 0.0),
    ("rms", *HALF, 0.0),
    ("rms", "float32", "bfloat16", 0.0),
    ("layer", *FLOAT, 0.1),
)
"""Norm, dtype of x and the stream, dtype of the branch, dropout."""
FUSED = {"cpu": "compile", "cuda": "triton"}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


Pair = tuple[Tensor, Tensor]


class Call(NamedTuple):
    """One setting of the table."""

    norm: str
    stream_dtype: str
    branch_dtype: str
    drop: float
    tokens: int
    width: int

    def __str__(self) -> str:
        dtypes = self.branch_dtype
        if self.stream_dtype != self.branch_dtype:
            dtypes = f"{self.branch_dtype} branch, {self.stream_dtype} stream"
        drop = f", dropout {self.drop:g}" if self.drop else ""
        norm = {"layer": "LayerNorm", "rms": "RMSNorm"}[self.norm]
        return f"{norm}, {dtypes}{drop}, {self.tokens} × {self.width}"


def bench_kernels() -> list[Row]:
    """Rows for each kind and size on the CPU, a call's fixed cost, and a GPU if there is one."""
    rows = [_fixed_row(in_fresh_process(fixed_cost, **_ONE_THREAD)), *_of_device("cpu")]
    if torch.cuda.is_available():
        return [*rows, *_of_device("cuda")]
    return [*rows, row("the same on a GPU, with our Triton kernel", "—", "", "not measured: no GPU")]


def _of_device(device: str) -> list[Row]:
    """The default backend in all settings, then two rows for each."""
    calls = [Call(*kind, *size) for kind in KINDS for size in SIZES[device]]
    measured = {call: in_fresh_process(measure, list(call), device, **_ONE_THREAD) for call in calls}
    return [_default_row(device, calls), *(row for call in calls for row in _rows(call, measured[call]))]


def _default_row(device: str, calls: list["Call"]) -> Row:
    """The largest relative time of the default backend, and of the lines beside themselves."""
    found = {(mode, call): ratios for call in calls for mode, ratios in _of_processes(call, device).items()}
    (mode, call), largest = max(found.items(), key=lambda item: statistics.median(item[1]["default"]))
    medians = [statistics.median(each["default"]) for each in found.values()]
    again = max(statistics.median(each["again"]) for each in found.values())
    low, high = min(largest["default"]), max(largest["default"])
    how = f"{mode}: {call}; median of {DEFAULT_PROCESSES} processes, {low:.2f} to {high:.2f}; "
    how += (
        f"median of the {len(found)} settings {statistics.median(medians):.2f}, smallest {min(medians):.2f}; "
    )
    how += f"the lines beside themselves at most {again:.3f}"
    figure = f"{max(medians):.3f}"
    return row("time of the default backend, relative to the lines: the largest", figure, "≤ 1.03", how)


def _of_processes(call: "Call", device: str) -> dict[str, dict[str, list[float]]]:
    """`default_ratios` of each process, by mode and by what was called."""
    found = [
        in_fresh_process(default_ratios, list(call), device, **_ONE_THREAD) for _ in range(DEFAULT_PROCESSES)
    ]
    return {
        mode: {name: [each[mode][name] for each in found] for name in names}
        for mode, names in found[0].items()
    }


def _rows(call: Call, measured: dict[str, Any]) -> list[Row]:
    """Two rows, for inference and training."""
    rows = []
    fused = measured["fused"]
    for mode in ("inference", "training"):
        times = measured[mode]
        figure, quartiles = median_ratio(times["lines"], times["fused"])
        floors = ", ".join(
            f"{name} {median_ratio(times[key], times['floor'], 1)[0]}"
            for name, key in (("lines", "lines"), (fused, "fused"))
        )
        lines_us = 1e6 * statistics.median(times["lines"])
        how = f"{quartiles}; in copy floors: {floors}; lines {lines_us:.0f} µs; "
        how += f"first call of {fused} {times['first_s']:.1f} s; {measured['where']}"
        rows.append(row(f"{mode}: {call}: speed-up by backend {fused}", figure, "", how))
    return rows


def _fixed_row(measured: dict[str, Any]) -> Row:
    extra_us = [1e6 * (a - b) for a, b in zip(measured["dispatch"], measured["lines"], strict=True)]
    low, middle, high = (f"{each:.1f}" for each in statistics.quantiles(extra_us, n=4))
    lines_us = 1e6 * statistics.median(measured["lines"])
    how = f"quartiles {low} and {high} µs; 16 × 64, float32, inference; the lines take {lines_us:.1f} µs"
    return row("fixed cost of a call: checks and dispatch", f"{middle} µs", "", how)


def lines(call: Call, x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None) -> Pair:
    """The user's lines."""
    if call.drop:
        branch = functional.dropout(branch, call.drop)
    s = x.float() + branch.float()
    if call.norm == "layer":
        normed = functional.layer_norm(s, s.shape[-1:], weight, bias, 1e-5)
    else:
        normed = functional.rms_norm(s, s.shape[-1:], weight, 1e-5)
    return normed.to(branch.dtype), s.to(x.dtype)


def ours(call: Call, backend: Any, x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None) -> Pair:
    """Our call."""
    norm: Any = call.norm
    return residual_norm(x, branch, weight=weight, bias=bias, norm=norm, dropout_p=call.drop, backend=backend)


class Setting(NamedTuple):
    """The tensors of a call, those that get gradients, and the gradients of its outputs."""

    inputs: list[Any]
    leaves: list[Tensor]
    grads: Pair


def setting_of(call: Call, device: str) -> Setting:
    """Random tensors for a call."""
    torch.manual_seed(0)
    shape, width = (call.tokens, call.width), (call.width,)
    kinds = [(shape, call.stream_dtype), (shape, call.branch_dtype), (width, "float32"), (width, "float32")]
    x, branch, weight, bias = (
        torch.randn(size).to(getattr(torch, dtype)).to(device).requires_grad_() for size, dtype in kinds
    )
    inputs = [x, branch, weight, bias if call.norm == "layer" else None]
    leaves = [each for each in inputs if each is not None]
    return Setting(inputs, leaves, (torch.randn_like(branch), torch.randn_like(x)))


def measure(settings: list[Any], device: str) -> dict[str, Any]:
    """Seconds of each round, by mode and by what was called."""
    call = Call(*settings)
    inputs, leaves, grads = setting_of(call, device)
    calls = {"lines": partial(lines, call, *inputs), "fused": partial(ours, call, FUSED[device], *inputs)}
    where = f"{circumstances()['threads']} thread" if device == "cpu" else torch.cuda.get_device_name()
    measured: dict[str, Any] = {"fused": FUSED[device], "where": where}
    for mode in ("inference", "training"):
        runs = {name: running(each, mode, leaves, grads) for name, each in calls.items()}
        first_s = _seconds(runs["fused"], device)
        runs["floor"] = copying(moved_bytes(call, mode), device)
        measured[mode] = _in_turns(runs, device) | {"first_s": first_s}
    return measured


def default_ratios(settings: list[Any], device: str) -> dict[str, dict[str, float]]:
    """Median time relative to the lines, by mode: of the default backend, and of the lines again."""
    call = Call(*settings)
    inputs, leaves, grads = setting_of(call, device)
    plain, default = partial(lines, call, *inputs), partial(ours, call, None, *inputs)
    calls = {"lines": plain, "again": plain, "default": default}
    ratios = {}
    for mode in ("inference", "training"):
        runs = {name: running(each, mode, leaves, grads) for name, each in calls.items()}
        spent = _shuffled(runs, device)
        ratios[mode] = {
            name: statistics.median(a / b for a, b in zip(spent[name], spent["lines"], strict=True))
            for name in ("again", "default")
        }
    return ratios


def _shuffled(runs: dict[str, Callable[[], object]], device: str) -> dict[str, list[float]]:
    """Seconds of each call of each round, in random order; the first three rounds are not counted."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    order, names = random.Random(0), list(runs)
    for run in [*runs.values()] * 3:
        run()
    while len(spent["lines"]) < DEFAULT_ROUNDS or sum(map(sum, spent.values())) < DEFAULT_SECONDS:
        order.shuffle(names)
        for name in names:
            spent[name].append(_seconds(runs[name], device))
    return spent


def running(call: Callable[[], Pair], mode: str, leaves: list[Tensor], grads: Pair) -> Callable[[], object]:
    def inference() -> object:
        with torch.no_grad():
            return call()

    def training() -> object:
        return torch.autograd.grad(call(), leaves, grads)

    return inference if mode == "inference" else training


def moved_bytes(call: Call, mode: str) -> int:
    """Bytes that have to be read and written once."""
    x, branch = (getattr(torch, each).itemsize for each in (call.stream_dtype, call.branch_dtype))
    each = 2 * (x + branch)
    if mode == "training":  # the sum again; gradients in and out, which are one where the dtypes agree
        out = x if x == branch and not call.drop else x + branch
        each += min(4, x + branch) + x + branch + out
    return each * call.tokens * call.width


def copying(size: int, device: str) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes in all."""
    source = torch.ones(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return partial(target.copy_, source)


def _in_turns(runs: dict[str, Callable[[], object]], device: str) -> dict[str, list[float]]:
    """Seconds of each call of each round; the first two rounds are not counted."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(ROUNDS + 2):
        names = [*names[1:], names[0]]  # rotate, so that none is always first
        for name in names:
            taken = _seconds(runs[name], device)
            if index >= 2:
                spent[name].append(taken)
    return spent


def _seconds(run: Callable[[], object], device: str) -> float:
    """Seconds of one call: processor time on a CPU that others use too, wall time on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - began


def fixed_cost() -> dict[str, list[float]]:
    """Seconds of a call with a tensor so small that its size does not matter, the mean of 200 each round."""
    call = Call("layer", *FLOAT, 0.0, 16, 64)
    x, weight = torch.randn(16, 64), torch.randn(64)
    runs = {"lines": partial(lines, call, x, x, weight, weight)}
    runs["dispatch"] = partial(ours, call, None, x, x, weight, weight)

    def many(run: Callable[[], object]) -> None:
        for _ in range(200):
            run()

    spent = _in_turns({name: partial(many, run) for name, run in runs.items()}, "cpu")
    return {name: [each / 200 for each in times] for name, times in spent.items()}
