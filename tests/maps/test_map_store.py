"""The store: each cell once, whoever asks, whoever dies; and files that are no store."""

import contextlib
import json
import math
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from small_maps import in_crews, small_base, small_grid

from normscope.errors import UsageError
from normscope.maps import Cell, Owner, Process, Result, Store
from normscope.maps.database import FORMAT
from normscope.maps.owner import LEASE_SECONDS
from normscope.maps.run import prepare, settings

CELLS = small_grid(seeds=[0, 1]).cells  # 16
DEAD = Process(2**22 + 1, "never")  # no system counts so far


def result(cell: Cell, **other) -> Result:
    """A result that tells whose it is, with losses that only exact storage keeps."""
    losses = (cell.lr / 3, math.pi * cell.seed, math.inf)
    made = {
        "losses": losses, "unigram_entropy": 1 / 3, "verdict": "fails", "certain_at": 2, "certain": "why",
        "stopped": True, "seconds": 0.1, "stack": 4, "versions": {"torch": "2"},
    }  # fmt: skip
    return Result(**made | other)


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "map.sqlite") as store:
        store.enrol(in_crews(CELLS, 4))
        yield store


def test_what_is_written_is_read_bit_for_bit(store: Store) -> None:
    owner = Owner.here()
    crew = store.claim(owner)
    store.finish(owner, crew, [result(cell) for cell in crew.cells])
    records = store.records()
    assert [record.cell for record in records] == list(CELLS)
    assert [record.result for record in records[:4]] == [result(cell) for cell in CELLS[:4]]
    assert {record.state for record in records[4:]} == {"waiting"}
    counts = store.counts()
    assert (counts.done, counts.waiting, counts.fails, counts.trains, counts.total) == (4, 12, 4, 0, 16)
    assert counts.share == pytest.approx(4 / 16)


def test_crews_are_claimed_whole_and_once(store: Store) -> None:
    crews = [store.claim(Owner.here()) for _ in range(4)]
    assert [crew.cells for crew in crews] == in_crews(CELLS, 4)
    assert store.claim(Owner.here()) is None


def test_a_cell_enrolled_twice_stays_as_it_is(store: Store) -> None:
    owner = Owner.here()
    crew = store.claim(owner)
    store.finish(owner, crew, [result(cell) for cell in crew.cells])
    store.enrol(in_crews(CELLS, 8))
    assert store.counts().total == 16
    assert store.counts().done == 4
    assert store.missing(CELLS) == []


def test_a_released_crew_starts_again_as_the_same_crew(store: Store) -> None:
    owner = Owner.here()
    crew = store.claim(owner)
    store.release(owner)
    assert store.claim(Owner.here()) == crew
    assert Counter(outcome for _, outcome in store.attempts()) == {"released": 4, None: 4}


@pytest.mark.parametrize("keeper_lives", [True, False])
def test_the_cells_of_the_dead_wait_again_once_nobody_will_tell(store: Store, keeper_lives: bool) -> None:
    keeper = Process.of(os.getpid()) if keeper_lives else DEAD
    crew = store.claim(Owner(DEAD, keeper))
    store.recover()
    assert store.counts().claimed == (4 if keeper_lives else 0)
    again = store.claim(Owner.here())
    assert (again == crew) is not keeper_lives


def test_a_process_of_another_machine_is_gone_after_its_lease() -> None:
    far = Owner(DEAD, DEAD, host="elsewhere")
    now = __import__("time").time()
    assert not far.is_gone(now - LEASE_SECONDS / 2)
    assert far.is_gone(now - LEASE_SECONDS * 2)


def test_a_process_lives_until_it_ends_and_is_not_the_next_with_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    assert process.is_alive
    assert not Process(child.pid, process.started + "0").is_alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert not process.is_alive
    child.wait()
    child.stdin.close()
    assert not process.is_alive


def test_results_of_an_owner_who_lost_its_cells_are_dropped(store: Store) -> None:
    slow, other = Owner(DEAD, DEAD), Owner.here()
    crew = store.claim(slow)
    assert store.claim(other) == crew
    store.finish(slow, crew, [result(cell, stack=9) for cell in crew.cells])
    assert store.counts().done == 0
    store.finish(other, crew, [result(cell) for cell in crew.cells])
    assert {record.result.stack for record in store.records() if record.result} == {4}
    store.finish(other, crew, [result(cell, stack=9) for cell in crew.cells])
    assert {record.result.stack for record in store.records() if record.result} == {4}


def test_a_crew_that_crashes_is_tried_again_then_alone_then_given_up(store: Store) -> None:
    guilty, tries = CELLS[2], Counter()
    while not store.counts().is_finished:
        owner = Owner.here()
        crew = store.claim(owner)
        tries.update(cell.key for cell in crew.cells)
        if guilty in crew.cells:
            assert store.crash(owner, "killed by SIGSEGV") == len(crew.cells)
        else:
            store.finish(owner, crew, [result(cell) for cell in crew.cells])
    states = {record.cell: (record.state, record.reason) for record in store.records()}
    assert states.pop(guilty) == ("crashed", "killed by SIGSEGV")
    assert {state for state, _ in states.values()} == {"done"}
    assert tries[guilty.key] == 3  # twice in its crew, once alone
    assert max(tries.values()) == 3
    store.retry_crashed()
    assert store.claim(Owner.here()).cells == (guilty,)


def test_whatever_happens_a_cell_is_held_once_and_finished_once(tmp_path: Path) -> None:
    """Any order of claims, ends, releases, crashes and deaths, from three connections."""
    for seed in range(8):
        draw = random.Random(seed)
        path = tmp_path / f"{seed}.sqlite"
        stores = [Store(path) for _ in range(3)]
        stores[0].enrol(in_crews(CELLS, 3))
        held: dict[Owner, tuple] = {}
        while not stores[0].counts().is_finished:
            store = draw.choice(stores)
            deed = draw.choice(["claim", "claim", "finish", "finish", "release", "die", "crash"])
            if deed == "claim" or not held:
                mortal = draw.random() < 0.3
                owner = Owner(DEAD, DEAD) if mortal else Owner.here()
                crew = store.claim(owner)
                if crew and not mortal:  # the mortal one dies at once
                    taken = {cell for other in held.values() for cell in other.cells}
                    assert not taken & set(crew.cells)
                    held[owner] = crew
                continue
            owner = draw.choice(list(held))
            crew = held.pop(owner)
            if deed == "finish":
                store.finish(owner, crew, [result(cell) for cell in crew.cells])
            elif deed == "crash":
                store.crash(owner, "tried")
            else:
                store.release(owner)
        records = stores[0].records()
        assert {record.cell for record in records} == set(CELLS)
        done = Counter(key for key, outcome in stores[0].attempts() if outcome == "done")
        assert done == {record.cell.key: 1 for record in records if record.state == "done"}
        for store in stores:
            store.close()


# Files that are no store, or cannot be written --------------------------------------------------------


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    text, other = tmp_path / "text.sqlite", tmp_path / "other.sqlite"
    text.write_text("loss,rate\n" * 1000)
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE mine (x)")
    for path in (text, other):
        before = bytes_of(path)
        for reading in (False, True):
            with pytest.raises(UsageError, match="normscope map"):
                Store(path, reading=reading)
        assert bytes_of(path) == before


def test_a_store_of_another_version_is_refused_and_left_alone(store: Store) -> None:
    store.close()
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    before = bytes_of(store.path)
    for reading in (False, True):
        with pytest.raises(UsageError, match=f"format {FORMAT + 1}.*format {FORMAT}"):
            Store(store.path, reading=reading)
    assert bytes_of(store.path) == before


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not found"):
        Store(tmp_path / "none.sqlite", reading=True)
    with pytest.raises(UsageError, match="folder"):
        Store(tmp_path / "none" / "map.sqlite")


def test_a_full_disk_is_said_and_what_was_finished_stays(store: Store) -> None:
    owner = Owner.here()
    crew = store.claim(owner)
    store.finish(owner, crew, [result(cell) for cell in crew.cells])
    other = store.claim(owner)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    long = [result(cell, losses=(0.5,) * 10**5) for cell in other.cells]
    with pytest.raises(UsageError, match="room on its disk"):
        store.finish(owner, other, long)
    assert store.counts().done == 4  # all or nothing: no cell of the crew is half there
    store.close()
    with Store(store.path) as again:
        assert again._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        again.finish(owner, other, long)
        assert again.counts().done == 8


def as_an_ordinary_user(tell: Callable[[], str]) -> str:
    """What `tell()` says in a process that file modes hold back: root is not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            said = tell()
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("writable", [True, False])
def test_a_read_only_store_is_shown_and_not_written(writable: bool) -> None:
    def tell() -> str:
        with Store(path, reading=True) as store:
            shown = len(store.records())
        try:
            with Store(path) as store:
                store.settle("x", 1)
        except UsageError as error:
            return f"{shown}, {error}"
        return f"{shown}, written"

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "map.sqlite"
        with Store(path) as store:
            store.enrol(in_crews(CELLS, 4))
        path.chmod(0o666 if writable else 0o444)
        Path(name).chmod(0o777 if writable else 0o555)
        said = as_an_ordinary_user(tell)
        Path(name).chmod(0o755)
        with Store(path) as store:
            assert store.note("x") == (1 if writable else None)
    if writable:
        assert said == "16, written"
    else:
        assert said.startswith(f'16, store "{path}"')
        assert "can be written" in said


def test_another_grid_has_no_place_in_the_store(tmp_path: Path) -> None:
    with Store(tmp_path / "map.sqlite") as store:
        prepare(store, small_grid().cells, stack=4, workers=1)
        total = store.counts().total
        for name, base in {
            "steps": small_base(steps=9),
            "model width": small_base("nn:decoder,width=4,heads=1"),
            "optimizer": small_base(optimizer="sgd"),
            "batch_size": small_base().replace(batch_size=3),
        }.items():
            with pytest.raises(UsageError, match=f"^{name} .* its cells were trained with"):
                prepare(store, small_grid(base=base).cells, stack=4, workers=1)
        assert store.counts().total == total
        prepare(store, small_grid(depths=[1, 2], seeds=[0, 1]).cells, stack=4, workers=1)
        assert store.counts().total == 4 * total


def test_settings_know_the_text_by_what_is_in_it(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    found = []
    for words in ("a rose is a rose " * 20, "a nose is a nose " * 20):
        text.write_text(words)
        grid = small_grid(base=small_base().replace(text=str(text)))
        found.append(settings(grid.cells))
        json.dumps(found[-1])
    assert {name for name in found[0] if found[0][name] != found[1][name]} <= {"data", "unigram entropy"}
    assert found[0]["data"] != found[1]["data"]
