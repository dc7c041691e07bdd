"""The Ray engine: crews as tasks of a Ray cluster; only this process claims crews and writes results.

Workers do not read the store and need no shared disk, only normscope, and the text under the same path. If a
worker dies, its crew returns to the store and is tried again.
"""

import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.errors import UsageError, describe
from normscope.maps.cell import Cell, Result
from normscope.maps.local import RefusedError
from normscope.maps.owner import Owner
from normscope.maps.record import Counts, Crew
from normscope.maps.run import data_of
from normscope.maps.store import Store
from normscope.maps.training import loaded, train_group

POLL_SECONDS = 0.5
CONNECT_SECONDS = 10.0
GPU_SHARE = 0.25
"""Share of a GPU for each task; small stacks are limited by Python, not by the device."""


@dataclass(frozen=True)
class _Outcome:
    """Outcome of a task: results, or one line with the reason why there are none."""

    results: tuple[Result, ...] = ()
    refused: str | None = None
    failed: str | None = None


def run_ray(
    store: Store,
    *,
    early_stop: bool = True,
    address: str | None = None,
    progress: Callable[[Counts], None] = lambda counts: None,
) -> None:
    """Train the waiting cells of `store` on a Ray cluster, until every cell is done or crashed.

    Args:
        address: address of the cluster. None takes RAY_ADDRESS; else the cluster that `ray start --head`
            started here; else a cluster of this machine's cores that ends with the map.

    Raises:
        UsageError: Ray is not installed, no cluster answers, or the store or a cell cannot be used.
    """
    owner = Owner.here()
    with _cluster(address) as ray:
        tasks: dict[Any, Crew] = {}
        try:
            while not (counts := store.counts()).is_finished:
                progress(counts)
                store.beat(owner)
                _fill(ray, store, owner, tasks, early_stop)
                _gather(ray, store, owner, tasks)
            progress(counts)
        finally:
            for task in tasks:
                ray.cancel(task, force=True)
            store.release(owner)


def _fill(ray: Any, store: Store, owner: Owner, tasks: dict[Any, Crew], early_stop: bool) -> None:
    """Submit crews for every place of the cluster, and one more, because waiting tasks let a cluster grow."""
    on_gpu = bool(tasks) and _on_gpu(next(iter(tasks.values())))
    while len(tasks) <= _places(ray, on_gpu):
        crew = store.claim(owner)
        if crew is None:
            return
        on_gpu = _on_gpu(crew)
        # A dead worker's crew returns to the store, which counts attempts: Ray must not retry.
        options = {"num_cpus": 1, "num_gpus": GPU_SHARE if on_gpu else 0, "max_retries": 0}
        remote = ray.remote(train_crew).options(**options)
        data = (store.note("settings") or {}).get("data")
        task = remote.remote(crew.cells, early_stop, os.getcwd(), data)
        tasks[task] = crew


def _gather(ray: Any, store: Store, owner: Owner, tasks: dict[Any, Crew]) -> None:
    """Write the results of tasks that end within `POLL_SECONDS`."""
    if not tasks:  # other processes hold the remaining cells
        time.sleep(POLL_SECONDS)
        return
    for task in ray.wait(list(tasks), num_returns=1, timeout=POLL_SECONDS)[0]:
        crew = tasks.pop(task)
        try:
            outcome: _Outcome = ray.get(task)
        except ray.exceptions.NodeDiedError:  # not caused by the cells
            store.release(owner, crew)
            continue
        except ray.exceptions.RayError as error:
            store.crash(owner, f"its Ray worker died: {describe(error)}", crew)
            continue
        if outcome.refused is not None:
            raise RefusedError(outcome.refused)
        if outcome.failed is not None:
            store.crash(owner, outcome.failed, crew)
        else:
            store.finish(owner, crew, outcome.results)


def train_crew(cells: Sequence[Cell], early_stop: bool, folder: str, data: str | None = None) -> _Outcome:
    """Train a crew in a worker of the cluster, in the driver's folder if the worker has it.

    Args:
        cells: cells of the crew.
        early_stop: whether cells that are certain to fail are stopped.
        folder: folder of the driver.
        data: the store's description of the cells' data; a worker with other data refuses.
    """
    import torch

    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)
    torch.set_num_threads(1)
    try:
        if data is not None:
            _require_data(cells[0], data)
        return _Outcome(results=tuple(train_group(cells, early_stop=early_stop)))
    except UsageError as error:
        return _Outcome(refused=str(error))
    except Exception as error:  # a model may raise anything; the map continues without the cell
        return _Outcome(failed=describe(error))


def _require_data(cell: Cell, data: str) -> None:
    """Raise UsageError if this machine's data differ from those of the store's cells."""
    here = data_of(loaded(Cell(cell.config.replace(seed=0))))
    if here != data:
        given = f"the data on {socket.gethostname()} ({here})"
        raise UsageError(given, f"{data}, as in the store", "copy the same text there, under the same path")


def _on_gpu(crew: Crew) -> bool:
    return crew.cells[0].config.device.startswith("cuda")


def _places(ray: Any, on_gpu: bool) -> int:
    """Number of tasks that the cluster, at its current size, runs at once."""
    resources = ray.cluster_resources()
    return int(resources.get("GPU", 0) / GPU_SHARE) if on_gpu else int(resources.get("CPU", 0))


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """The `ray` package, connected."""
    ray = require_ray()
    address = address or os.environ.get("RAY_ADDRESS") or None
    _require_listener(address)
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:  # no cluster answers, or the address is invalid
        raise _no_cluster(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listener(address: str | None) -> None:
    """Raise UsageError if nothing answers at `address`; Ray itself would wait for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        if address not in (None, "auto", "local") and "://" not in address:
            raise _no_cluster(address, ValueError("no host:port"))
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str | None, error: BaseException) -> UsageError:
    cause = f"{type(error.__cause__).__name__} {error.__cause__}"  # Ray may quote it in another error's text
    if "AuthenticationError" in cause:  # with an address, Ray requires the token
        do = "set RAY_AUTH_MODE=token, with the cluster's token in ~/.ray/auth_token"
        return UsageError(f"Ray address {address!r}", "the token of the cluster there", do)
    do = "start one with `ray start --head`, or leave the address out"
    return UsageError(f"Ray address {address!r}", "a Ray cluster that answers there", do)


def require_ray() -> Any:
    """Import `ray`, quiet and without telemetry.

    Raises:
        UsageError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        do = "install it with: pip install 'normscope[ray]', or use --engine local"
        raise UsageError("engine 'ray'", "the package ray", do) from error
