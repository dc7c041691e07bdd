"""Stores as files: other files, files that cannot be written, stores of another map."""

import contextlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from small_maps import in_crews, result, small_base, small_grid

from normscope.errors import UsageError
from normscope.maps import Owner, Store
from normscope.maps.database import FORMAT
from normscope.maps.run import prepare, settings

CELLS = small_grid(seeds=[0, 1]).cells  # 16


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "map.sqlite") as store:
        store.enrol(in_crews(CELLS, 4))
        yield store


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
    with pytest.raises(UsageError, match="free space on its disk"):
        store.finish(owner, other, long)
    assert store.counts().done == 4  # all or nothing: no cell of the crew is half there
    store.close()
    with Store(store.path) as again:
        assert again._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        again.finish(owner, other, long)
        assert again.counts().done == 8


def as_an_ordinary_user(tell: Callable[[], str]) -> str:
    """Result of `tell()` in a process that file modes restrict, as they do not restrict root."""
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


def test_a_map_that_was_given_up_before_its_first_cell_leaves_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(cells):
        raise KeyboardInterrupt

    with Store(tmp_path / "map.sqlite") as store:
        monkeypatch.setattr("normscope.maps.run.measured_stack", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            prepare(store, small_grid().cells, stack=None, workers=1)
        prepare(store, small_grid(base=small_base(steps=9)).cells, stack=4, workers=1)
        assert store.note("settings")["steps"] == 9
        assert store.counts().total == 8


def test_of_two_maps_that_begin_at_once_only_one_gives_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process enrols cells while this one measures."""
    path = tmp_path / "map.sqlite"

    def other_comes(cells):
        with Store(path) as other:
            prepare(other, small_grid(base=small_base(steps=9)).cells, stack=4, workers=1)
        return {"size": 4}

    with Store(path) as store:
        monkeypatch.setattr("normscope.maps.run.measured_stack", other_comes)
        with pytest.raises(UsageError, match=r"^steps 8 .* 9, which its cells were trained with"):
            prepare(store, small_grid().cells, stack=None, workers=1)
        assert {record.cell.config.trial.steps for record in store.records()} == {9}


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
