"""The Ray engine against a real Ray on this machine: the same cells, the same bits, a worker killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from normscope.errors import UsageError
from normscope.maps import Grid, Owner, Store, train_group
from normscope.maps.ray import _fill, require_ray, run_ray, train_crew
from normscope.maps.run import settings
from normscope.train import Recipe, RunConfig

pytest.importorskip("ray")
DEADLINE = 300.0  # seconds that Ray may take on a busy machine


def grid(steps: int, model: str = "nn:decoder,width=16,heads=2", lrs: Sequence[float] = (1e-3, 1e-2)) -> Grid:
    base = RunConfig(model=model, validation=0.0, batch_size=2, seq_len=16, trial=Recipe(steps=steps, seed=0))
    return Grid(base=base, schemes=["post", "pre"], depths=[1], lrs=list(lrs))


def enrolled(path: Path, grid: Grid) -> Path:
    """A store in which each cell of `grid` waits as a crew of its own scheme."""
    with Store(path) as store:
        schemes = {cell.scheme for cell in grid.cells}
        store.enrol([[c for c in grid.cells if c.scheme == scheme] for scheme in sorted(schemes)])
    return path


def driver(path: Path, *, address: str = "", **variables: str) -> subprocess.Popen:
    """A separate process that runs the engine, like `normscope map`."""
    code = (
        "import sys; from pathlib import Path; from normscope.maps import Store; "
        "from normscope.maps.ray import run_ray; "
        "run_ray(Store(Path(sys.argv[1])), early_stop=False, address=sys.argv[2] or None)"
    )
    # One place, however many cores there are, where the engine starts a cluster of its own.
    environment = os.environ | {"RAY_OVERRIDE_RESOURCES": '{"CPU": 1}'} | variables
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), address], env=environment, stderr=subprocess.PIPE
    )


def descendants(pid: int) -> Iterator[int]:
    """Descendants of `pid`, by the kernel's parent ids."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    queue = [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        yield from children
        queue += children


def training(pid: int) -> int | None:
    """A worker under `pid` that is in a task now; Ray writes the task into its title."""
    for child in descendants(pid):
        try:
            title = Path(f"/proc/{child}/cmdline").read_text()
        except OSError:
            continue
        if title.startswith("ray::") and "train_crew" in title:
            return child
    return None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker in /proc")
def test_a_killed_workers_crew_is_run_again_and_comes_to_the_same_bits(tmp_path: Path) -> None:
    cells = grid(steps=40)  # a worker that has just begun imports PyTorch: there is time to find it
    path = enrolled(tmp_path / "map.sqlite", cells)
    process = driver(path, address="local")
    try:
        started = time.monotonic()
        while (victim := training(process.pid)) is None:
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() - started < DEADLINE
            time.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        _, said = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 0, said.decode()
    with Store(path, reading=True) as store:
        counts, records = store.counts(), store.records()
        outcomes = [outcome for _, outcome in store.attempts()]
    assert counts.done == len(cells.cells)
    assert outcomes.count("done") == len(cells.cells)
    crashed = [outcome for outcome in outcomes if outcome != "done"]
    assert len(crashed) == 2  # both cells of the crew
    assert all("Ray worker died" in str(outcome) for outcome in crashed)
    for scheme in ("post", "pre"):
        crew = [record for record in records if record.cell.scheme == scheme]
        alone = train_group([record.cell for record in crew], early_stop=False)
        assert [record.result.losses for record in crew if record.result] == [r.losses for r in alone]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'normscope\[ray\]'"):
        require_ray()
    path = enrolled(tmp_path / "map.sqlite", grid(steps=1))
    with Store(path) as store:
        with pytest.raises(UsageError, match="ray"):
            run_ray(store)
        assert store.counts().waiting == 4
        assert store.attempts() == []


def test_ray_is_asked_for_no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", sys)  # anything: what matters is set before the import
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    require_ray()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_what_a_task_says_of_cells_that_cannot_be_trained(tmp_path: Path) -> None:
    images = grid(steps=1, model="nn:vision,width=16,heads=2,image=8").cells[:1]
    refused = train_crew(images, False, str(tmp_path / "no such folder"))
    assert refused.refused is not None
    assert "vision" in refused.refused
    assert refused.results == ()


def test_a_worker_with_another_text_under_the_path_refuses(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a rose is a rose " * 100)
    base = grid(steps=1, lrs=[1e-3]).base.replace(text=str(text))
    cells = Grid(base=base, schemes=["pre"], depths=[1], lrs=[1e-3]).cells
    data = settings(cells)["data"]
    assert len(train_crew(cells, False, str(tmp_path), data).results) == 1
    text.write_text("a rose is a nose " * 100)
    refused = train_crew(cells, False, str(tmp_path), data)
    assert refused.results == ()
    assert refused.refused is not None
    assert data in refused.refused
    assert socket.gethostname() in refused.refused


def test_the_engine_tells_its_tasks_what_the_store_reads(tmp_path: Path) -> None:
    cells = grid(steps=1).cells
    asked: list[tuple] = []
    ray = SimpleNamespace(
        cluster_resources=lambda: {"CPU": 1},
        remote=lambda function: SimpleNamespace(
            options=lambda **more: SimpleNamespace(remote=lambda *given: asked.append(given) or len(asked))
        ),
    )
    with Store(tmp_path / "map.sqlite") as store:
        store.enrol([[cell] for cell in cells], {"data": "what it reads"})
        _fill(ray, store, Owner.here(), {}, early_stop=True)
    assert [given[-1] for given in asked] == ["what it reads"] * 2


@pytest.mark.slow
def test_a_cluster_that_was_started_before_is_found_or_addressed_and_lives_on(tmp_path: Path) -> None:
    command, address = str(Path(sys.executable).with_name("ray")), "127.0.0.1:26479"
    home = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}  # where Ray keeps the token

    def run(name: str, **options: str) -> str:
        path = enrolled(tmp_path / f"{name}.sqlite", grid(steps=5))
        process = driver(path, **options, **home)
        _, said = process.communicate(timeout=DEADLINE)
        with Store(path, reading=True) as store:
            assert store.counts().done == (4 if process.returncode == 0 else 0)
        return said.decode() if process.returncode else "done"

    subprocess.run([command, "get-auth-token", "--generate"], env=os.environ | home, check=True)
    words = ["start", "--head", "--block", "--port=26479", "--num-cpus=2", "--include-dashboard=false"]
    head = subprocess.Popen([command, *words], env=os.environ | home)  # not `ray stop`, which ends all
    try:
        await_listener(26479)
        assert run("found") == "done"
        assert "RAY_AUTH_MODE=token" in run("stranger", address=address).splitlines()[-1]
        assert run("addressed", address=address, RAY_AUTH_MODE="token") == "done"
    finally:
        head.terminate()
        head.wait(DEADLINE)


def await_listener(port: int) -> None:
    """Return once somebody listens at `port`."""
    started = time.monotonic()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() - started < DEADLINE
            time.sleep(0.2)
        else:
            return


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "somewhere", "somewhere:port"])
def test_an_address_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool, address: str
) -> None:
    """Nothing listens at port 1, and the others are not addresses."""
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with Store(enrolled(tmp_path / "map.sqlite", grid(steps=1))) as store:
        with pytest.raises(UsageError, match=rf"'{re.escape(address)}'.*ray start --head"):
            run_ray(store, address=None if variable else address)
        assert store.counts().waiting == 4
