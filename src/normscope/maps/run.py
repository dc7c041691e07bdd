"""`run_map`: train the cells of a grid with an engine and store the results."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from normscope.errors import UsageError, suggest
from normscope.maps.cell import Cell
from normscope.maps.crews import crews, measured_stack
from normscope.maps.grid import AXES
from normscope.maps.local import run_local
from normscope.maps.record import Counts
from normscope.maps.store import Store
from normscope.maps.training import loaded
from normscope.subjects import Subject
from normscope.subjects.feed import fingerprint
from normscope.subjects.spec import parse

ENGINES = ("local", "ray")
PER_GPU = 4
"""Processes on one GPU: small stacks are limited by Python, not by the device. No GPU was measured."""
FINGERPRINTED = 8  # batches
Settings = Mapping[str, Any]


def run_map(
    store: Store,
    cells: Sequence[Cell],
    *,
    engine: str = "local",
    workers: int | None = None,
    stack: int | None = None,
    early_stop: bool = True,
    ray_address: str | None = None,
    common: Settings | None = None,
    progress: Callable[[Counts], None] = lambda counts: None,
) -> None:
    """Train the `cells` that `store` does not have, and all other cells that wait in it.

    Args:
        store: store of the results.
        cells: cells of one `Grid`, or of grids with the same base.
        engine: "local" for processes on this machine, "ray" for a Ray cluster.
        workers: processes of the local engine; by default one per core, on a GPU at most 4.
        stack: cells that a process trains at once; by default measured, once for each store.
        early_stop: whether to stop cells as soon as they are certain to fail.
        ray_address: address of the Ray cluster.
        common: `settings(cells)`, if the caller has them.
        progress: called with the progress of the map, a few times per second.

    Raises:
        UsageError: a cell cannot be trained, or the store cannot be used or belongs to another map.
    """
    require_engine(engine, ray_address)
    workers = workers or default_workers(cells[0].config.device)
    prepare(store, cells, stack=stack, workers=workers, common=common)
    if engine == "local":
        run_local(store, workers=workers, early_stop=early_stop, progress=progress)
        return
    from normscope.maps.ray import run_ray

    run_ray(store, early_stop=early_stop, address=ray_address, progress=progress)


def require_engine(engine: str, ray_address: str | None) -> None:
    """Raise UsageError if the engine is unknown or not installed, or takes no address but one is given."""
    if engine not in ENGINES:
        raise UsageError(f"engine {engine!r}", " or ".join(ENGINES), suggest(engine, ENGINES, "choose one"))
    if engine == "ray":
        from normscope.maps.ray import require_ray

        require_ray()
    elif ray_address is not None:
        given = f"Ray address {ray_address!r} with engine {engine!r}"
        raise UsageError(given, "engine 'ray'", "add --engine ray")


def default_workers(device: str) -> int:
    """Number of processes that train at once: the cores available here; on one GPU at most `PER_GPU`."""
    return num_cores() if device == "cpu" else min(PER_GPU, num_cores())


def num_cores() -> int:
    """Number of cores that this process may use; all of the machine's if the system does not say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare(
    store: Store, cells: Sequence[Cell], *, stack: int | None, workers: int, common: Settings | None = None
) -> None:
    """Write settings, stack size, and crews of the missing cells into the store."""
    common = settings(cells) if common is None else common
    store.require_settings(common)
    if missing := store.missing(cells):
        if stack is None:
            choice = store.note("stack") or store.settle("stack", measured_stack(missing))
            stack = choice["size"]
        store.enrol(crews(missing, stack, workers), common)


def settings(cells: Sequence[Cell]) -> dict[str, Any]:
    """Settings that all cells of a map share, with a fingerprint of their data."""
    common = [_common(cell) for cell in cells]
    assert all(other == common[0] for other in common), "the cells have one base"
    cell = min(cells, key=lambda cell: (cell.depth or 0, cell.key))
    subject = loaded(Cell(cell.config.replace(seed=0)))
    return common[0] | {"data": data_of(subject), "unigram entropy": subject.unigram_entropy}


def data_of(subject: Subject) -> str:
    """Description of a subject's data, with a fingerprint of its first batches."""
    seen = fingerprint(itertools.islice(subject.batches(), FINGERPRINTED))
    return f"{subject.input}, {seen[:16]}"


def _common(cell: Cell) -> dict[str, Any]:
    """Settings of the cell that are not axes of a grid."""
    spec = parse(cell.config.model)
    if spec.kind != "nn":
        return dict(cell.shared)
    options = {f"model {name}": value for name, value in spec.options.items() if name not in AXES}
    return cell.shared | {"model": f"nn:{spec.name}"} | options
