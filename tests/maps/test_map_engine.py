"""The local engine: kill -9 at random moments, two maps on one store, Ctrl-C, workers that die."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_maps import small_base, small_grid

from normscope.errors import UsageError
from normscope.maps import Cell, Counts, Grid, Owner, Process, Store, local, run_map, train_group
from normscope.maps.crews import crews
from normscope.maps.worker import Worker

GRID = small_grid(base=small_base("nn:decoder,width=8,heads=1,dropout=0.1", steps=30), depths=[1, 2])
SIZE = 3
# Forked from a process that has imported everything: a start costs milliseconds.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["normscope.maps.training", "normscope.maps.worker"])


def work(path: str, together: Any = None) -> None:
    """Run a worker process without a keeper, once all that are `together` have started."""
    import torch

    torch.set_num_threads(1)
    if together is not None:
        together.wait()
    owner = Owner.here()
    Worker(Path(path), owner.id, None, early_stop=True).work()


def start(path: Path, together: Any = None) -> multiprocessing.process.BaseProcess:
    process = SERVER.Process(target=work, args=(str(path), together))
    process.start()
    return process


def enrolled(path: Path) -> Path:
    with Store(path) as store:
        store.enrol(crews(GRID.cells, SIZE))
    return path


def curves(path: Path) -> dict[str, tuple[float, ...]]:
    """The losses of the cells that are done."""
    with Store(path, reading=True) as store:
        return {r.cell.key: r.result.losses for r in store.records() if r.result is not None}


def finished_once(path: Path) -> bool:
    """Whether every cell has one attempt that ended in a result."""
    with Store(path, reading=True) as store:
        done = Counter(key for key, outcome in store.attempts() if outcome == "done")
        others = {outcome for _, outcome in store.attempts()} - {"done", "lost"}
        return done == {cell.key: 1 for cell in GRID.cells} and not others


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, ...]]:
    path = enrolled(tmp_path_factory.mktemp("whole") / "map.sqlite")
    process = start(path)
    process.join(300)
    assert process.exitcode == 0
    assert finished_once(path)
    return curves(path)


def has_begun(path: Path) -> bool:
    """Whether a live process holds a crew."""
    with Store(path) as store:
        store.recover()  # what the killed one before held
        return store.counts().claimed > 0


def killed_and_resumed(path: Path, kills: int, seed: int) -> int:
    """Kill workers at random moments, then let one finish; return how many were training a crew."""
    draw, hit = random.Random(seed), 0
    for _ in range(kills):
        with Store(path) as store:
            if store.counts().is_finished:
                break
        before = curves(path)
        process = start(path)
        while process.is_alive() and not has_begun(path):
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.6))
        process.kill()
        process.join(60)
        after = curves(path)
        assert before.items() <= after.items(), "what was finished is there, bit for bit"
        with Store(path, reading=True) as store:
            hit += store.counts().claimed > 0
    process = start(path)
    process.join(300)
    assert process.exitcode == 0
    return hit


def test_killed_at_random_moments_it_comes_to_the_same_bits(
    tmp_path: Path, uninterrupted: dict[str, tuple[float, ...]]
) -> None:
    path = enrolled(tmp_path / "map.sqlite")
    hit = killed_and_resumed(path, kills=3, seed=0)
    assert curves(path) == uninterrupted
    assert finished_once(path)
    with Store(path, reading=True) as store:
        lost = Counter(outcome for _, outcome in store.attempts())["lost"]
    assert lost >= hit > 0


@pytest.mark.slow
def test_killed_at_thirty_random_moments_it_comes_to_the_same_bits(
    tmp_path: Path, uninterrupted: dict[str, tuple[float, ...]]
) -> None:
    kills = hit = 0
    while kills < 30:
        path = enrolled(tmp_path / f"{kills}.sqlite")
        hit += killed_and_resumed(path, kills=5, seed=kills)
        kills += 5
        assert curves(path) == uninterrupted
        assert finished_once(path)
    assert hit >= 15, "most moments are within a crew"


def test_two_workers_share_the_cells(tmp_path: Path, uninterrupted: dict[str, tuple[float, ...]]) -> None:
    path = enrolled(tmp_path / "map.sqlite")
    barrier = SERVER.Barrier(2)
    both = [start(path, barrier), start(path, barrier)]
    for process in both:
        process.join(300)
        assert process.exitcode == 0
    assert curves(path) == uninterrupted
    assert finished_once(path)
    with Store(path, reading=True) as store:
        assert len(store.attempts()) == len(GRID.cells), "nobody began what another held"


# With the engine's own processes ----------------------------------------------------------------------

MAP = ["map", "--schemes", "pre", "--depths", "1", "--lrs", "1e-3,1e-2", "--seeds", "2", "--steps", "400",
       "--model", "nn:decoder,width=8,heads=1", "--batch-size", "2", "--seq-len", "8",
       "--workers", "1", "--stack", "2", "--store", "map.sqlite"]  # fmt: skip


@contextlib.contextmanager
def running_map(folder: Path, *more: str) -> Iterator[subprocess.Popen]:
    """`normscope map` in `folder`, with a worker in training, and Ctrl-C as from a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-m", "normscope", *MAP, *more],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
            if (folder / "map.sqlite").exists():
                with contextlib.suppress(UsageError), Store(folder / "map.sqlite", reading=True) as store:
                    if store.counts().claimed:
                        break
        yield process
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_after_ctrl_c_nothing_runs_nothing_is_held_and_the_page_is_there(tmp_path: Path) -> None:
    with running_map(tmp_path) as process:
        workers = children(process.pid)
        assert len(workers) == 1
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=240)
        assert process.returncode == 130, said
    assert "run the same command to continue" in said
    assert "Traceback" not in said
    assert "of 4 done" in shown
    assert "<svg" in (tmp_path / "map.html").read_text()
    assert not is_there(workers[0])
    with Store(tmp_path / "map.sqlite", reading=True) as store:
        assert store.counts().claimed == 0
        assert {outcome for _, outcome in store.attempts()} <= {"released", "done"}


def test_a_worker_leaves_when_its_keeper_is_killed(tmp_path: Path) -> None:
    with running_map(tmp_path) as process:
        (worker,) = children(process.pid)
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 120
    while is_there(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_there(worker)
    with Store(tmp_path / "map.sqlite") as store:
        store.recover()
        assert store.counts().claimed == 0
        assert {outcome for _, outcome in store.attempts()} == {"released"}, "in the middle of its crew"


def test_a_worker_stays_while_its_keeper_lives_and_nobody_stops_it(tmp_path: Path) -> None:
    watched = Worker(tmp_path, "name", os.getppid(), early_stop=True)
    assert not watched.must_leave
    assert not Worker(tmp_path, "name", None, early_stop=True).must_leave
    assert Worker(tmp_path, "name", os.getpid(), early_stop=True).must_leave  # its parent is somebody else
    watched.stop(signal.SIGTERM, None)
    assert watched.must_leave


class Stubborn:
    """A worker process that holds a crew, and ends when it is killed."""

    def __init__(self, words: list[str], **more: Any) -> None:
        self.pid, self.was_killed = os.getpid(), False
        with Store(Path(words[3])) as store:
            me = Process.of(os.getpid())
            assert store.claim(Owner(me, me, id=words[4])) is not None

    def poll(self) -> None:
        return None

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        self.was_killed = True

    def wait(self, timeout: float | None = None) -> int:
        if not self.was_killed:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return -signal.SIGKILL


def test_what_a_worker_that_does_not_end_had_held_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = enrolled(tmp_path / "map.sqlite")
    monkeypatch.setattr(subprocess, "Popen", Stubborn)
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(local, "POLL_SECONDS", 0.0)

    def progress(counts: Counts) -> None:
        if counts.claimed:
            raise KeyboardInterrupt

    with Store(path) as store:
        with pytest.raises(KeyboardInterrupt):
            local.run_local(store, workers=1, progress=progress)
        assert store.counts().claimed == 0
        assert {outcome for _, outcome in store.attempts()} == {"released"}


USER = """
import os, signal
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 4), nn.Linear(4, 256)
        nn.init.zeros_(self.head.bias)
        self.calls = 0

    def forward(self, ids):
        self.calls += 1
        {deed}
        return self.head(self.embedding(ids))

def build():
    return Model()
"""


def user_map(tmp_path: Path, deed: str) -> tuple[Cell, ...]:
    """Cells of a model of the user's whose forward does `deed` once it is training."""
    (tmp_path / "user.py").write_text(USER.format(deed=deed))
    return Grid(base=small_base(f"{tmp_path / 'user.py'}:build"), lrs=[1e-3, 1e-2]).cells


def test_a_worker_that_dies_is_noticed_and_its_cell_given_up_after_a_second_try(tmp_path: Path) -> None:
    deed = "if self.calls > 6: os.kill(os.getpid(), signal.SIGKILL)"
    cells = user_map(tmp_path, deed)[:1]
    with Store(tmp_path / "map.sqlite") as store:
        run_map(store, cells, workers=1, stack=1)
        (record,) = store.records()
        assert record.state == "crashed"
        assert record.reason == "its process was killed by SIGKILL"
        assert [outcome for _, outcome in store.attempts()] == [f"crashed: {record.reason}"] * 2


def test_an_error_in_the_model_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    deed = "if self.calls > 6 and self.head.bias.abs().max() > 1e-2: raise RuntimeError('too far')"
    cells = user_map(tmp_path, deed)
    with Store(tmp_path / "map.sqlite") as store:
        run_map(store, cells, workers=1, stack=2)
        slow, fast = store.records()
    assert (fast.state, fast.reason) == ("crashed", "RuntimeError: too far")
    assert slow.state == "done"
    assert slow.result.losses == pytest.approx(train_group(cells[:1])[0].losses, rel=1e-5)


def test_a_store_that_fails_in_the_worker_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is deleted before the worker reads it."""
    text = tmp_path / "text.txt"
    text.write_text("a rose is a rose " * 20)
    cells = small_grid(base=small_base().replace(text=str(text)), schemes=["pre"], lrs=[1e-3]).cells
    with Store(tmp_path / "map.sqlite") as store:
        monkeypatch.setattr("normscope.maps.run.run_local", lambda *words, **more: None)
        run_map(store, cells, workers=1, stack=1)
        monkeypatch.undo()
        text.unlink()
        from normscope.maps.local import run_local

        with pytest.raises(UsageError, match=r"text.txt"):
            run_local(store, workers=1)
        assert store.counts().waiting == 1
