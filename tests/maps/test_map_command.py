"""`normscope map` on made-up results: its output and its errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_maps import made_up, small_grid

from normscope.cli.main import run
from normscope.maps import Owner, Store
from normscope.maps.run import PER_GPU, default_workers, num_cores, prepare


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A store with made-up results, as a map leaves it."""
    path = tmp_path / "map.sqlite"
    cells = small_grid(seeds=[0]).cells
    with Store(path) as store:
        prepare(store, cells, stack=4, workers=1)
        owner = Owner.here()
        while crew := store.claim(owner):
            store.finish(owner, crew, [made_up(cell).result for cell in crew.cells])
    return path


def test_a_store_alone_is_shown_again(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [stored.with_name(name) for name in ("page.html", "map.png", "map.parquet")]
    words = ["--format", "json", "--output", files[0], "--png", files[1], "--parquet", files[2]]
    before = stored.read_bytes()
    assert run(["map", "--store", str(stored), *map(str, words)]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 8
    assert all(path.stat().st_size > 1000 for path in files)
    assert stored.read_bytes() == before


def test_the_file_of_a_map_is_json_where_its_name_says_so(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stored.with_name("m.json")
    assert run(["map", "--store", str(stored), "--output", str(file)]) == 0
    document = json.loads(file.read_text())
    assert len(document["cells"]) == 8
    shown = capsys.readouterr()
    assert "8 of 8 done" in shown.out
    assert f"Results: {file}" in shown.err


def test_a_finished_map_is_not_trained_again(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *words, **more: pytest.fail("a worker was started"))
    axes = ["--schemes", "post,pre", "--depths", "1", "--lrs", "1e-3,3e-3,1e-2,3e-2", "--steps", "8"]
    small = ["--model", "nn:decoder", "--width", "8", "--heads", "1", "--batch-size", "2", "--seq-len", "8"]
    words = ["map", *axes, *small, "--store", str(stored)]
    for more in ([], ["--warmups", "0"], []):
        monkeypatch.setattr("sys.argv", ["normscope", *words, *more])
        assert run([*words, *more]) == 0
        assert "8 of 8 done" in capsys.readouterr().out
    page = re.sub("</?span[^>]*>", "", stored.with_suffix(".html").read_text())
    assert page.count("normscope map") == 2, "every command that made the map, once"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--lrs", "0"], "positive"),
        (["--lrs", "1e-3:1e-1"], "FIRST:LAST:COUNT"),
        (["--schemes", "deepnrom"], "deepnorm"),
        (["--depths", "0"], "from 1"),
        (["--lrs", "1e-3", "--engine", "rya"], "ray"),
        (["--lrs", "1e-3", "--optimizer", "adamm"], "adam"),
        (["--lrs", "1e-3", "--output", "nowhere/map.html"], "nowhere"),
        (["--lrs", "1e-3", "--text", "nowhere.txt"], "nowhere.txt"),
        (["--lrs", "1e-3", "--model", "nn:decoder,widht=8"], "width"),
        (["--schemes", "pre", "--model", "hf:gpt2"], "--schemes"),
        (["--lrs", "1e-3", "--width", "8", "--model", "hf:gpt2"], "--width"),
        (["--lrs", ""], "at least one"),
        (["--steps", "5"], "--steps without a grid"),
        (["--retry-crashed"], "--retry-crashed without a grid"),
        (["--seeds", "2", "--store", "map.html"], "which is --store too"),
        (["--lrs", "1e-3", "--png", "map.html"], "which is --output too"),
        (["--lrs", "1e-3", "--png", "."], "--png . (a folder)"),
        (["--lrs", "1e-3", "--ray-address", "here:1"], "engine 'ray'"),
        ([], "map.sqlite"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    words: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["map", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert hint in said


@pytest.mark.parametrize(
    "words",
    [
        ["--engine", "spark"],
        ["--ray-address", "here:1"],
        ["--optimizer", "adamm"],
        ["--text", "nowhere.txt"],
        ["--model", "nn:vision"],
        ["--png", "nowhere/map.png"],
    ],
)
def test_a_call_that_is_refused_leaves_no_store_behind(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["map", "--lrs", "1e-3", *words]) == 2
    assert list(tmp_path.iterdir()) == []


def test_cores_are_counted_where_the_system_tells_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of macOS; a GPU gets a few processes, not one for each core of its host."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert num_cores() == 64
    assert default_workers("cpu") == 64
    assert default_workers("cuda") == default_workers("cuda:1") == PER_GPU
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_workers("cuda:1") == num_cores() == 1


def test_a_page_that_cannot_be_written_costs_nothing(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no file that is always full")
    assert run(["map", "--store", str(stored), "--output", "/dev/full"]) == 2
    shown = capsys.readouterr()
    assert "8 of 8 done" in shown.out
    assert "No space left" in shown.err


def test_a_text_that_is_too_short_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("too short")
    store = str(tmp_path / "map.sqlite")
    assert run(["map", "--lrs", "1e-3", "--text", str(tmp_path / "short.txt"), "--store", store]) == 2
    assert "seq-len" in capsys.readouterr().err


def test_another_grid_on_the_store_is_one_line(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = stored.read_bytes()
    assert run(["map", "--lrs", "1e-3", "--store", str(stored)]) == 2
    assert "its cells were trained with" in capsys.readouterr().err
    assert stored.read_bytes() == before


def test_help_is_quick_and_names_every_axis() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "normscope", "map", "--help"], capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "120"},
    )  # fmt: skip
    for option in ("--schemes", "--depths", "--lrs", "--warmups", "--seeds", "--store", "--no-early-stop"):
        assert option in done.stdout
