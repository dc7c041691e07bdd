"""Grouping of cells into crews that train together, and measurement of the best crew size."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from normscope.maps.cell import Cell
from normscope.maps.grid import parameters_of
from normscope.maps.training import loaded, stack_of
from normscope.train import in_flushed_thread

SIZES = (1, 4, 8, 16)
SIZES_ON_GPU = (1, 8, 32, 64)
ROUNDS = 4  # steps per size, in turns; the fastest counts, because the machine may be busy
WORTH = 0.95  # largest share of the time for which a larger stack, which also fails as one, is worth it
MOST_NUMBERS = 2**24  # parameters of a stack; larger matrices gain nothing from stacking


def measured_stack(cells: Sequence[Cell]) -> dict[str, Any]:
    """Measure seconds per step and cell in stacks of several sizes, of the smallest shape; choose a size."""
    cell = min(cells, key=lambda cell: (cell.depth or 0, cell.key))
    known = SIZES if cell.config.device == "cpu" else SIZES_ON_GPU
    most = min(len(cells), room(cell.config.model))
    sizes = [size for size in known if size == 1 or size <= most]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in training: with more, a single cell would be timed too fast
    try:
        seconds = in_flushed_thread(lambda checkpoint: _seconds(cell, sizes))
    finally:
        torch.set_num_threads(threads)
    best = sizes[0]
    for size in sizes[1:]:
        if seconds[size] < WORTH * seconds[best]:
            best = size
    return {"size": best, "seconds": {str(size): round(figure, 6) for size, figure in seconds.items()}}


def _seconds(cell: Cell, sizes: Sequence[int]) -> dict[int, float]:
    subject = loaded(cell)
    stacks = {size: stack_of([cell] * size, {cell.seed: subject}) for size in sizes}
    for stack in stacks.values():
        stack.advance()  # the first step also creates the optimiser's state
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _, size in itertools.product(range(ROUNDS), sizes):
        began = time.perf_counter()
        stacks[size].advance()
        times[size].append((time.perf_counter() - began) / size)
    return {size: min(found) for size, found in times.items()}


def room(model: str) -> int:
    """Largest number of replicas of `model` in a stack."""
    return max(1, MOST_NUMBERS // max(1, parameters_of(model)))


def crews(cells: Sequence[Cell], size: int, workers: int = 1) -> list[list[Cell]]:
    """Divide `cells` into crews of one shape, at most `size` and about equally large, shallow ones first.

    The cells of a crew have neighbouring learning rates, so that cells that fail early fail together. Crews
    are small enough that each of the `workers` has one.
    """
    size = min(size, -(-len(cells) // workers)) if cells else size
    shapes: dict[str, list[Cell]] = {}
    for cell in cells:
        shapes.setdefault(cell.shape, []).append(cell)
    made = []
    for alike in sorted(shapes.values(), key=lambda alike: alike[0].depth or 0):
        alike = sorted(alike, key=lambda cell: (cell.lr, cell.warmup, cell.seed))
        most = min(size, room(alike[0].config.model))
        number = -(-len(alike) // most)
        bounds = [len(alike) * i // number for i in range(number + 1)]
        made += [alike[low:high] for low, high in itertools.pairwise(bounds)]
    return made
