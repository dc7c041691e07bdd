"""The store: each cell is trained once, whichever processes ask or die."""

import contextlib
import dataclasses
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from small_maps import in_crews, result, small_grid

from normscope.database import transaction
from normscope.errors import UsageError
from normscope.maps import Owner, Process, Store
from normscope.maps.owner import LEASE_SECONDS

CELLS = small_grid(seeds=[0, 1]).cells  # 16
DEAD = Process(2**22 + 1, "never")  # no system counts so far


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


def test_a_cell_that_was_given_up_is_tried_anew_at_its_place(tmp_path: Path) -> None:
    with Store(tmp_path / "map.sqlite") as store:
        store.enrol(in_crews(CELLS[:2], 1))
        for _ in range(2):
            owner = Owner.here()
            store.crash(owner, "killed", store.claim(owner))
        store.retry_crashed()
        owner = Owner.here()
        crew = store.claim(owner)
        assert crew.cells == CELLS[:1]
        store.crash(owner, "killed", crew)
        assert store.counts().crashed == 0, "tried twice again"


def test_the_share_that_is_done_counts_the_steps_of_what_is_being_trained(store: Store) -> None:
    owner = Owner.here()
    crew = store.claim(owner)
    store.beat(owner, step=crew.cells[0].config.trial.steps // 2)
    depths = [sum(cell.depth or 1 for cell in cells) for cells in (crew.cells, CELLS)]
    assert store.counts().share == pytest.approx(depths[0] / 2 / depths[1])


def test_settings_must_have_the_same_names(tmp_path: Path) -> None:
    with Store(tmp_path / "map.sqlite") as store:
        store.require_settings({"steps": 8})
        store.enrol(in_crews(CELLS, 4), {"steps": 8})
        store.require_settings({"steps": 8})
        for other in ({"steps": 8, "width": 3}, {}):
            with pytest.raises(UsageError, match="which its cells were trained with"):
                store.require_settings(other)


def test_a_part_of_a_crew_that_waits_again_is_claimed_without_the_rest(store: Store) -> None:
    owner = Owner.here()
    crew = store.claim(owner)
    part = dataclasses.replace(crew, cells=crew.cells[1:3])
    store.release(owner, part)
    assert store.claim(Owner.here()) == part


def test_whatever_happens_a_cell_is_held_once_and_finished_once(tmp_path: Path) -> None:
    """Any order of claims, ends, releases, crashes and deaths, from three connections."""
    for seed in range(5):
        draw = random.Random(seed)
        path = tmp_path / f"{seed}.sqlite"
        stores = [Store(path) for _ in range(3)]
        stores[0].enrol(in_crews(CELLS, 3))
        held: dict[Owner, tuple] = {}
        for _ in range(2000):
            if stores[0].counts().is_finished:
                break
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
        assert stores[0].counts().is_finished
        records = stores[0].records()
        assert {record.cell for record in records} == set(CELLS)
        done = Counter(key for key, outcome in stores[0].attempts() if outcome == "done")
        assert done == {record.cell.key: 1 for record in records if record.state == "done"}
        for store in stores:
            store.close()


def test_a_large_grid_is_enrolled_without_reading_the_store_for_every_crew(store: Store) -> None:
    said: list[str] = []
    store._connection.set_trace_callback(said.append)
    store.enrol(in_crews(small_grid(seeds=range(20)).cells, 4))
    assert len([line for line in said if line.startswith("SELECT")]) <= 4
    assert store.counts().total == 160


def test_counts_and_records_are_of_one_moment(store: Store) -> None:
    with Store(store.path, reading=True) as reader, reader.one_moment():
        before = reader.counts()
        owner = Owner.here()
        crew = store.claim(owner)
        store.finish(owner, crew, [result(cell) for cell in crew.cells])
        assert store.counts().done == 4
        assert reader.counts() == before
        assert all(record.result is None for record in reader.records())


def test_a_note_remembers_a_line_once(store: Store) -> None:
    for line in ("one", "two", "one"):
        store.remember("command", line)
    assert store.note("command") == "one\ntwo"


def test_whoever_changes_the_store_keeps_others_from_changing_it_from_the_start(store: Store) -> None:
    """The lock is taken first; else two processes could claim the same crew."""
    with contextlib.closing(sqlite3.connect(store.path, timeout=0, isolation_level=None)) as other:
        with transaction(store._connection), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.execute("BEGIN IMMEDIATE")
