"""`normscope bench diff`: time and forwards of a comparison, relative to one anatomy of a model.

Each pair is a published model with random weights and a port of it, of 6 layers and width 64. An anatomy is
`read_anatomy` of the published model in this process; comparisons take turns with it. Forwards are counted by
a hook on the outermost module, in the anatomies and in all parts; copies in float64 are counted as well.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks.diff.families import FAMILIES, Size
from benchmarks.diff.plants import Plant, converted, given
from benchmarks.process import Row, circumstances, in_fresh_process, row

ROUNDS = 3
SIZE = Size(width=64, depth=6, heads=8, hidden=256)
PLANTS = {"the same": (), "ε": (Plant("ε", "all", {"eps": 1e-4}),)}


def bench_diff() -> list[Row]:
    """Rows for a comparison without and with the function part, and for the forwards of the latter."""
    rows: list[Row] = []
    for name in ("GPT-2", "LLaMA"):
        for what in PLANTS:
            rows += _rows(name, what, in_fresh_process(measured, name, what, OMP_NUM_THREADS="1"))
    return rows


def _rows(name: str, what: str, found: dict[str, Any]) -> Iterator[Row]:
    label = f"{name} against its port, {what}"
    shape = f"{SIZE.depth} layers of width {SIZE.width}, {found['threads']} thread, medians of {ROUNDS}"
    yield row(
        f"{label}: structure and recipe, in anatomies of both models",
        f"{found['read'] / found['anatomies']:.2f}",
        "≤ 1",
        f"{found['read']:.2f} s against {found['anatomies']:.2f} s for two anatomies; {shape}",
    )
    yield row(
        f"{label}: with the function part, s",
        f"{found['whole']:.2f}",
        "—",
        f"{found['whole'] / found['anatomies']:.1f} times two anatomies; {shape}",
    )
    forwards = [found["forwards"][side] - found["reading"][side] for side in ("a", "b")]
    yield row(
        f"{label}: forwards of A and B for the function part",
        " and ".join(map(str, forwards)),
        "≤ 10 each",
        f"before it: {found['reading']['a']} and {found['reading']['b']} (anatomies); batches of 4 × 64 ids",
    )


def measured(name: str, what: str) -> dict[str, Any]:
    """Seconds of two anatomies, of a comparison without and with the function part, and forwards."""
    from normscope import diff, read_anatomy
    from normscope.subjects import make_subject

    torch.set_num_threads(1)
    family = FAMILIES[name](SIZE)
    a, b = partial(given, family.published, 5), partial(converted, family, PLANTS[what], 5)
    models, reading = (a(), b()), "structure,recipe"

    def anatomies() -> None:
        for model in models:
            read_anatomy(make_subject(model))

    work = {
        "anatomies": anatomies,
        "read": lambda: diff(*models, parts=reading),
        "whole": lambda: diff(a, b, parts="structure,recipe,function"),
    }
    times: dict[str, list[float]] = {each: [] for each in work}
    for _ in range(ROUNDS + 1):  # the first round imports
        for each, call in work.items():
            begin = time.perf_counter()
            call()
            times[each].append(time.perf_counter() - begin)
    medians = {each: statistics.median(of[1:]) for each, of in times.items()}
    return circumstances() | medians | _forwards(models, work["whole"], work["read"])


def _forwards(
    models: tuple[nn.Module, nn.Module], whole: Callable[[], object], read: Callable[[], object]
) -> Any:
    """Forwards of each model in both comparisons."""
    counts = {}
    for key, call in (("forwards", whole), ("reading", read)):
        with counted(models) as count:
            call()
        counts[key] = count
    return counts


@contextmanager
def counted(models: tuple[nn.Module, nn.Module]) -> Iterator[dict[str, int]]:
    """Context that counts the forwards of two classes of models."""
    names = dict(zip(map(type, models), "ab", strict=True))
    count = {"a": 0, "b": 0}

    def called(module: nn.Module, *_: Any) -> None:
        if type(module) in names:
            count[names[type(module)]] += 1

    hook = register_module_forward_pre_hook(called)
    try:
        yield count
    finally:
        hook.remove()
