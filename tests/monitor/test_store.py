"""The run store: rows that come back as they were, several writers, readers, kills, and other files."""

import contextlib
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from normscope.errors import UsageError
from normscope.maps import Store
from normscope.monitor import Event, Layout, Raised, Row, RunReader, RunStore
from normscope.monitor.store.tables import FORMAT
from normscope.probes import Measurement
from normscope.rules import Finding, Severity

LAYOUT: Layout = (("loss", ""), ("stream/rms", "blocks.0"), ("stream/rms", "blocks.1"))
FLUSH = 10


def row(step: int, *values: float, layout: str = "step", rank: int = 0) -> Row:
    return Row(step, rank, 1000.0 + step, layout, np.array(values, dtype=np.float64))


def alarm(step: int, rank: int = 0) -> Raised:
    evidence = (Measurement("loss", "", math.nan, "nats"), Measurement("x", "", (1.0, math.inf)))
    finding = Finding(
        "NS801",
        "loss-spike",
        Severity.WARNING,
        ("blocks.1",),
        "It rose.",
        evidence,
        "5 MAD",
        "here",
        "wait",
        ("a",),
    )
    return Raised(step, rank, 1000.0 + step, finding)


@pytest.fixture
def store(path: Path) -> Iterator[RunStore]:
    with RunStore(path) as store:
        store.declare("step", LAYOUT)
        yield store


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """New processes that have finished their imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["normscope.monitor.store"])
    return context


def bits(values: np.ndarray) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


def test_every_float_comes_back_bit_by_bit(store: RunStore, path: Path) -> None:
    odd = [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        0.0,
        5e-324,
        1e30,
        struct.unpack("<d", b"\x01" * 7 + b"\xff")[0],
    ]
    odd.append(struct.unpack("<d", b"\x07\0\0\0\0\0\xf8\x7f")[0])  # a NaN with a payload
    store.add([row(step, value, 1.0, -value) for step, value in enumerate(odd, 1)])
    with RunReader(path) as reader:
        steps, values = reader.series("loss")
        assert steps.tolist() == list(range(1, len(odd) + 1))
        assert bits(values) == bits(np.array(odd))
        _, _, table = reader.table("stream/rms")
        assert bits(table[:, 1]) == bits(-np.array(odd))


def test_alarms_events_and_notes_come_back(store: RunStore, path: Path) -> None:
    store.note("model", {"name": "decoder"})
    store.note("model", {"name": "gpt2"})
    store.add(
        alarms=[alarm(7)], events=[Event(8, 0, 5.0, "first-wrong-value", {"min": -math.inf, "of": Path("x")})]
    )
    with RunReader(path) as reader:
        assert reader.notes() == {"model": {"name": "gpt2"}}
        (found,) = reader.alarms()
        assert repr(found) == repr(alarm(7))  # a NaN in the evidence is unlike itself
        (event,) = reader.events()
        assert event == Event(8, 0, 5.0, "first-wrong-value", {"min": -math.inf, "of": "x"})
        assert reader.events("other") == []


def test_columns_align_when_a_site_appears_and_another_goes(store: RunStore, path: Path) -> None:
    store.add([row(1, 0.1, 1.0, 2.0)])
    store.declare("step", (("loss", ""), ("stream/rms", "embed"), ("stream/rms", "blocks.1")))
    store.add([row(2, 0.2, 30.0, 20.0)])
    appears = (("loss", ""), *[("stream/rms", f"blocks.{i}") for i in (0, 1, 2)])
    store.declare("step", appears)
    store.add([row(4, 0.4, 1.0, 2.0, 4.0)])
    store.declare("step", LAYOUT)
    store.add([row(3, 0.3, 100.0, 200.0)])
    with RunReader(path) as reader:
        steps, sites, values = reader.table("stream/rms")
        assert steps.tolist() == [1, 2, 3, 4]
        assert sites == ["blocks.0", "embed", "blocks.1", "blocks.2"]
        nan = math.nan
        expected = [[1, nan, 2, nan], [nan, 30, 20, nan], [100, nan, 200, nan], [1, nan, 2, 4]]
        np.testing.assert_array_equal(values, expected)
        steps, values = reader.series("stream/rms", "embed")
        assert (steps.tolist(), values.tolist()) == ([2], [30.0])
        assert reader.series("loss", after=1)[1].tolist() == [0.2, 0.3, 0.4]
        assert reader.columns() == {"loss": [""], "stream/rms": sites}
        assert reader.last_step == 4


def test_a_quantity_of_two_layouts_is_one_table(store: RunStore, path: Path) -> None:
    store.declare("sites", (("stream/rms", "head"),))
    store.add([row(1, 0, 1, 2), row(2, 0, 3, 4), row(2, 5, layout="sites"), row(4, 6, layout="sites")])
    with RunReader(path) as reader:
        steps, sites, values = reader.table("stream/rms")
    assert (steps.tolist(), sites) == ([1, 2, 4], ["blocks.0", "blocks.1", "head"])
    np.testing.assert_array_equal(values, [[1, 2, math.nan], [3, 4, 5], [math.nan, math.nan, 6]])


def test_a_row_that_does_not_fit_is_refused_and_nothing_is_written(store: RunStore, path: Path) -> None:
    for wrong in (row(2, 1.0), row(2, 1.0, layout="sites"), row(2, 1.0, 2.0, 3.0, rank=1)):
        with pytest.raises(ValueError, match=r"row of|no layout|another rank"):
            store.add([row(1, 1.0, 2.0, 3.0), wrong], [alarm(1)])
    with RunReader(path) as reader:
        assert reader.last_step is None
        assert reader.alarms() == []


def test_a_quantity_or_site_that_is_not_there_is_said_with_those_that_are(
    store: RunStore, path: Path
) -> None:
    with RunReader(path) as reader:
        with pytest.raises(UsageError, match="a run that has written rows"):
            reader.series("loss")
        store.add([row(1, 1.0, 2.0, 3.0)])
        with pytest.raises(
            UsageError, match=r"'stream/rns': expected one of loss, stream/rms; .*\"stream/rms\""
        ):
            reader.table("stream/rns")
        with pytest.raises(UsageError, match=r'"blocks.3" of stream/rms: expected one of blocks.0, blocks.1'):
            reader.series("stream/rms", "blocks.3")


# Runs that go on ----------------------------------------------------------------------------------------


def test_a_rank_waits_while_another_one_creates_the_store(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # as the change to a write-ahead log does
    release = threading.Timer(0.2, other.close)
    release.start()
    RunStore(path, rank=1).close()
    release.join()


def test_a_store_with_a_run_is_refused_unless_it_is_resumed(store: RunStore, path: Path) -> None:
    RunStore(path).close()  # nothing was written: another start is no other run
    with pytest.raises(UsageError, match="another process has taken over rank 0"):
        store.add([row(1, 1.0, 2.0, 3.0)])
    with RunStore(path) as second:
        second.declare("step", LAYOUT)
        second.add([row(1, 1.0, 2.0, 3.0)])
        second.end()
    with pytest.raises(UsageError, match=r"holds the run of 20.*resume=True"):
        RunStore(path)
    RunStore(path, rank=1).close()  # another rank of the same run
    with RunReader(path) as reader:
        assert [state.state for state in reader.ranks()] == ["ended", "running"]


def test_a_resumed_run_replaces_what_it_does_again(store: RunStore, path: Path) -> None:
    store.declare("sites", (("gradient/block", "blocks.0"),))
    store.add([row(step, step, 0, 0) for step in range(1, 21)], [alarm(19)])
    store.add([row(10, 1.0, layout="sites"), row(20, 2.0, layout="sites")])
    store.close()
    with RunStore(path, resume=True) as again, RunReader(path) as reader:
        again.declare("step", LAYOUT)
        assert reader.last_step == 20
        again.add([row(12, -12, 0, 0), row(13, -13, 0, 0)])
        assert reader.last_step == 13
        assert reader.series("loss")[1].tolist() == [*range(1, 12), -12, -13]
        assert reader.series("gradient/block", "blocks.0")[0].tolist() == [10]
        again.add([row(12, 12.5, 0, 0)], [alarm(12)])  # a row alone, written again
        assert reader.series("loss")[1].tolist() == [*range(1, 12), 12.5, -13]
        assert [(a.step, a.attempt) for a in reader.alarms()] == [(19, 0), (12, 1)]
        again.end("CUDA error")
        (state,) = reader.ranks()
        assert (state.state, state.reason, state.attempt) == ("failed", "CUDA error", 1)


# Other files --------------------------------------------------------------------------------------------


def test_a_map_is_no_run_and_a_run_is_no_map(store: RunStore, path: Path, tmp_path: Path) -> None:
    Store(tmp_path / "map.sqlite").close()
    before = (tmp_path / "map.sqlite").read_bytes()
    for opened in (RunStore, RunReader):
        with pytest.raises(
            UsageError, match=r"results of normscope map.*a run store that normscope.Monitor wrote"
        ):
            opened(tmp_path / "map.sqlite")
    assert (tmp_path / "map.sqlite").read_bytes() == before
    for reading in (False, True):
        with pytest.raises(UsageError, match=r"the record of a run.*normscope map wrote"):
            Store(path, reading=reading)


def test_other_files_and_places_are_refused(store: RunStore, path: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("loss,rate\n" * 1000)
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE mine (x)")
    for name in ("text", "other.db"):
        before = (tmp_path / name).read_bytes()
        for opened in (RunStore, RunReader):
            with pytest.raises(UsageError, match=r"normscope\.Monitor wrote"):
                opened(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(UsageError, match="not found"):
        RunReader(tmp_path / "none.db")
    for wrong in (tmp_path / "none" / "run.db", tmp_path):
        with pytest.raises(UsageError, match="folder that exists"):
            RunStore(wrong)
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    for opened in (RunStore, RunReader):
        with pytest.raises(UsageError, match=f"format {FORMAT + 1}.*format {FORMAT}"):
            opened(path)


def test_a_full_disk_loses_one_flush_and_no_more(store: RunStore, path: Path) -> None:
    store.add([row(1, 1.0, 2.0, 3.0)])
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    many = [row(step, 1.0, 2.0, 3.0) for step in range(2, 3000)]
    store.declare("sites", LAYOUT)
    with pytest.raises(UsageError, match="free space"):
        store.add([*many, row(2, 1.0, 2.0, 3.0, layout="sites")])
    with RunReader(path) as reader:
        assert reader.last_step == 1
    store._connection.execute("PRAGMA max_page_count = 1000000")
    store.add([*many, row(2, 1.0, 2.0, 3.0, layout="sites")])
    with RunReader(path) as reader:
        assert reader.last_step == 2999
        assert reader.series("stream/rms", "blocks.1")[1].tolist() == [3.0] * 2999


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_device_is_no_store() -> None:
    with pytest.raises(UsageError):
        RunStore("/dev/full")


# Several processes --------------------------------------------------------------------------------------


def write(path: str, rank: int, last: int, pause: float = 0.0) -> None:
    """Write `last` steps in flushes of 10; the loss of a step is the step, and all three values are equal."""
    with RunStore(path, rank=rank) as store:
        store.declare("step", LAYOUT)
        for first in range(1, last + 1, FLUSH):
            steps = range(first, first + FLUSH)
            store.add([row(step, step, step, step, rank=rank) for step in steps], [alarm(first, rank)])
            time.sleep(pause)
        store.end()


def test_two_ranks_write_at_once_and_a_reader_sees_whole_flushes(processes, path: Path) -> None:
    last = 1500
    writers = [processes.Process(target=write, args=(str(path), rank, last, 0.002)) for rank in (0, 1)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        with contextlib.suppress(UsageError), RunReader(path) as reader, reader.one_moment():
            for state in reader.ranks():
                steps, values = reader.series("loss", rank=state.rank)
                _, table = reader.table("stream/rms", rank=state.rank)[1:]
                alarms = [a.step for a in reader.alarms() if a.rank == state.rank]
                assert len(steps) % FLUSH == 0
                assert alarms == list(range(1, len(steps) + 1, FLUSH))
                assert (
                    steps.tolist()
                    == values.tolist()
                    == table[:, 0].tolist()
                    == list(range(1, len(steps) + 1))
                )
                seen.add(len(steps))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(seen - {0, last}) > 1, "the reader looked while they wrote"
    with RunReader(path) as reader:
        for rank in (0, 1):
            assert reader.series("loss", rank=rank)[1].tolist() == list(range(1, last + 1))
        assert [state.state for state in reader.ranks()] == ["ended", "ended"]
        assert len(reader.alarms()) == 2 * last / FLUSH


def write_and_tell(path: str, told: int) -> None:
    """Write without end; after each flush, write its last step to the file descriptor `told`."""
    with RunStore(path) as store:
        store.declare("step", LAYOUT)
        step = 1
        while True:
            store.add([row(step + i, step + i, 0.0, 0.0) for i in range(FLUSH)])
            step += FLUSH
            os.write(told, struct.pack("<q", step - 1))


def test_after_kill_9_at_random_moments_the_store_holds_every_flush(path: Path) -> None:
    chance = random.Random(0)
    depths = []
    for number in range(20):
        run = path.with_name(f"run{number}.db")
        reader_end, writer_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_and_tell(str(run), writer_end)
            finally:
                os._exit(1)
        os.close(writer_end)
        first = os.read(reader_end, 8)  # it has begun
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(reader_end, "rb") as pipe:
            told = first + pipe.read()
        (flushed,) = struct.unpack("<q", told[-8:])
        with RunReader(run) as reader:
            steps, values = reader.series("loss")
            assert reader.ranks()[0].state == "running"
        assert steps.tolist() == values.tolist() == list(range(1, len(steps) + 1))
        assert len(steps) in (flushed, flushed + FLUSH)  # it may have died between the commit and the telling
        depths.append(len(steps))
        with RunStore(run, resume=True) as again:
            again.declare("step", LAYOUT)
            again.add([row(len(steps) + 1, 1.0, 0.0, 0.0)])
            assert again._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert len(set(depths)) > 5
