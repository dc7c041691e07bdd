"""`normscope watch`: scenes of a run, its picture, JSON, and the view that is redrawn."""

import contextlib
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

from normscope.cli.main import run
from normscope.cli.watch_view import BLOCKS, PLAIN, picture
from normscope.errors import UsageError
from normscope.maps import Store
from normscope.monitor import Event, Layout, Raised, Row, RunStore, scene
from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.scene import Scene, Watcher
from normscope.report.console import as_text
from normscope.rules import Finding, Severity

STEP: Layout = (("loss", ""), ("lr", ""), ("seconds", ""), ("tokens", ""))
SITES_OF_MODEL = [f"blocks.{i}" for i in range(20)]
SITES: Layout = tuple((of, site) for of in ("stream/rms", "gradient/block") for site in SITES_OF_MODEL)
SENTENCE = "blocks.7.mlp.wo overflowed to infinity in the forward (model.py:123)."


def step_row(step: int, loss: float = 3.0, rank: int = 0) -> Row:
    return Row(step, rank, float(step), "step", np.array([loss, 3e-4, 0.25, 1024.0]))


def sites_row(step: int, values: list[float], rank: int = 0) -> Row:
    return Row(step, rank, float(step), "sites", np.array(values))


def depths(step: int) -> list[float]:
    return [1.0 + i * step for i in range(20)] + [10.0**-i for i in range(20)]


def alarm(step: int, rank: int = 0, message: str = "The loss rose.") -> Raised:
    return Raised(step, rank, float(step), Finding("NS801", "loss-spike", Severity.WARNING, (), message))


@pytest.fixture
def store(path: Path) -> Iterator[RunStore]:
    """A run of 200 steps, whose loss is NaN at step 150; that of block 7 and later is infinite then."""
    with RunStore(path) as store:
        store.declare("step", STEP)
        store.declare("sites", SITES)
        store.note("model", "decoder, 20 blocks")
        store.note("entropy", 3.25)
        store.note("steps", 400)
        losses = [math.nan if step == 150 else 5.0 - step / 100 for step in range(1, 201)]
        store.add([step_row(step, loss) for step, loss in enumerate(losses, 1)])
        for step in range(10, 201, 10):
            values = depths(step)
            if step == 150:
                values[7:20] = [math.inf] * 13
            store.add([sites_row(step, values)])
        wrong = Event(150, 0, 150.0, "first-wrong-value", {"sentence": SENTENCE})
        store.add(alarms=[alarm(120), alarm(150, message="The loss is NaN.")], events=[wrong])
        yield store


def text_of(now: Scene, width: int = 80, height: int | None = None, ascii_only: bool = False) -> str:
    return as_text(lambda width: picture(now, width, height, ascii_only), width)


def lines_with(text: str, word: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines()) if word in line]


# Scenes -------------------------------------------------------------------------------------------------


def test_a_scene_has_the_last_figures(store: RunStore, path: Path) -> None:
    now = Watcher(path).look()
    assert (now.last_step, now.quantity, now.state) == (200, "stream/rms", "running")
    assert (now.figure("loss"), now.figure("lr"), now.figure("x")) == (3.0, 3e-4, None)
    assert (now.step_seconds, now.tokens_per_second) == (0.25, 4096.0)
    assert now.wrong is not None
    assert now.wrong.data["sentence"] == SENTENCE


def test_what_is_read_bit_by_bit_is_what_is_read_at_once(store: RunStore, path: Path) -> None:
    watcher = Watcher(path)

    def agrees() -> None:
        for known, fresh in ((watcher.look(), Watcher(path).look()),):
            for name in ("loss", "heat"):
                one, other = getattr(known, name), getattr(fresh, name)
                for field in ("steps", "sites", "values", "present"):
                    np.testing.assert_array_equal(getattr(one, field), getattr(other, field))

    agrees()
    store.add([step_row(201, 1.0), sites_row(210, depths(210))])
    agrees()
    store.declare("sites", (*SITES, ("stream/rms", "blocks.20")))
    store.add([sites_row(220, [*depths(220), 7.0])])
    agrees()
    store.close()
    with RunStore(path, resume=True) as resumed:
        resumed.declare("step", STEP)
        agrees()
        resumed.add([step_row(step, -1.0) for step in range(100, 300)])
        agrees()
    path.unlink()
    with RunStore(path) as other:  # another run in the same place
        other.declare("step", STEP)
        other.declare("sites", SITES)
        other.add([step_row(1), sites_row(300, depths(1))])
        agrees()


@pytest.mark.parametrize(
    ("silence", "step_seconds", "state"),
    [(5.0, 0.25, "running"), (12.0, 0.25, "silent"), (29.0, 1.0, "running"), (31.0, 1.0, "silent")],
)
def test_a_run_is_silent_after_three_flushes_and_ten_seconds(
    store: RunStore,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    silence: float,
    step_seconds: float,
    state: str,
) -> None:
    values = np.array([3.0, 3e-4, step_seconds, 1024.0])
    store.add([Row(step, 0, 1.0, "step", values) for step in range(201, 260)])
    later = time.time() + silence
    monkeypatch.setattr(scene.time, "time", lambda: later)
    now = Watcher(path).look()
    assert now.state == state
    assert now.silence == pytest.approx(silence, abs=0.5)
    assert not now.is_over
    assert (f"silent for {silence:.0f} s" in text_of(now)) == (state == "silent")


def test_a_run_that_ends_fails_or_dies(store: RunStore, path: Path) -> None:
    store.end()
    assert Watcher(path).look().state == "ended"
    store.end("OutOfMemoryError")
    now = Watcher(path).look()
    assert (now.state, now.reason, now.is_over) == ("failed", "OutOfMemoryError", True)
    died = path.with_name("died.db")
    child = os.fork()
    if child == 0:
        try:
            RunStore(died).declare("step", STEP)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    now = Watcher(died).look()
    assert (now.state, now.reason) == ("gone", f"process {child} no longer runs")
    assert f"gone: process {child} no longer runs" in text_of(now).replace("\n", " ")


def test_a_loss_that_was_not_given_is_no_nan(store: RunStore, path: Path) -> None:
    store.add([step_row(201, NOT_MEASURED)])
    now = Watcher(path).look()
    assert (now.figure("loss"), now.figure("lr")) == (None, 3e-4)
    assert "loss nan" not in text_of(now)


def test_the_map_takes_quantities_of_every_step_too(path: Path) -> None:
    with RunStore(path) as store:
        store.declare("step", (("loss", ""), ("stream/rms", "a"), ("stream/rms", "b")))
        store.declare("sites", (("stream/max", "a"), ("stream/max", "b")))
        store.add([Row(1, 0, 1.0, "step", np.array([3.0, 1.0, 2.0])), sites_row(1, [4.0, 5.0])])
    now = Watcher(path).look()
    assert (now.quantity, now.quantities) == ("stream/rms", ("stream/rms", "stream/max"))
    assert now.heat is not None
    assert now.heat.values.tolist() == [[1.0, 2.0]]
    with pytest.raises(UsageError, match="expected one of stream/rms, stream/max"):
        Watcher(path, "loss").look()


def test_ranks_are_judged_together(store: RunStore, path: Path) -> None:
    with RunStore(path, rank=1) as second:
        second.declare("step", STEP)
        second.add([step_row(1, rank=1)], [alarm(120, rank=1), alarm(199, rank=1, message="Alone.")])
        store.end()
        now = Watcher(path).look()
        assert now.state == "running"
        text = text_of(now)
        assert "2 ranks" in text
        assert text.count("The loss rose.") == 1, "an alarm of both ranks is shown once"
        assert "step 120, ranks 0, 1  warning" in text
        assert "step 199, rank 1  warning" in text
        second.end("it broke")
    assert Watcher(path).look().reason == "it broke on rank 1 of 2"


def test_one_rank_of_several_is_shown(
    store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunStore(path, rank=1) as second, RunStore(path, rank=2):
        second.declare("step", STEP)
        second.add([step_row(each, 7.0, rank=1) for each in range(1, 41)])
        assert run(["watch", str(path), "--rank", "1", "--once"]) == 0
        text = capsys.readouterr().out
        assert "rank 1  step 40 of 400  loss 7 " in text
        assert "rank 2 has written no row\n" in text
        assert "loss  steps 1 to 40  " in text
        assert "rank 0  step 200 of 400  loss 3 " in text_of(Watcher(path).look())
        for words, rank in ((["--rank", "1"], 1), ([], 0)):
            assert run(["watch", str(path), "--format", "json", *words]) == 0
            document = json.loads(capsys.readouterr().out)
            assert document["rank"] == rank
            assert [each["last_step"] for each in document["ranks"]] == [200, 40, None]
        assert run(["watch", str(path), "--rank", "3"]) == 2
        assert "--rank 3: expected one of 0, 1, 2" in capsys.readouterr().err


def test_alarms_from_before_a_restart_are_marked(store: RunStore, path: Path) -> None:
    store.close()
    with RunStore(path, resume=True) as again:
        again.declare("step", STEP)
        again.add([step_row(100)], [alarm(100, message="Anew.")])
    text = " ".join(text_of(Watcher(path).look(), 200).split())
    assert "first wrong value step 150 (before the run was resumed)" in text
    assert "The loss rose. (before the run was resumed)" in text
    assert "Anew. (before" not in text


# Pictures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 40, 80, 120])
def test_the_picture_fits_and_says_what_matters(store: RunStore, path: Path, width: int) -> None:
    text = text_of(Watcher(path).look(), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    words = " ".join(text.split())
    assert "run.db decoder, 20 blocks running" in words
    assert "step 200 of 400 loss 3 (entropy 3.25, 0.25 below) lr 3e-4 0.25 s/step 4096 tokens/s" in words
    assert "loss steps 1 to 200 ▁ 3 to █ 4.99 (log scale) ! not finite: 1" in words
    assert "stream/rms steps 10 to 200" in words
    assert "! not finite: 13" in words
    assert SENTENCE in words
    assert words.index(SENTENCE) < words.index("loss steps") < words.index("The loss rose.")
    assert words.index("The loss rose.") < words.index("The loss is NaN.")


def test_the_map_has_depth_downwards_and_steps_to_the_right(store: RunStore, path: Path) -> None:
    text = text_of(Watcher(path).look())
    rows = re.findall(r"^ *(blocks\.\d+) \(\+1\) (.*)$", text, re.MULTILINE)
    assert [site for site, _ in rows] == SITES_OF_MODEL[::2]
    assert {len(cells) for _, cells in rows} == {20}
    assert [cells.find("!") for _, cells in rows] == [-1] * 3 + [14] * 7, "block 7 is in the fourth row"
    levels = np.array([[BLOCKS.find(cell) for cell in cells.replace("!", "")] for _, cells in rows[4:]])
    assert (np.diff(levels, axis=0) >= 0).all()
    assert (np.diff(levels, axis=1) >= 0).all()
    assert levels.max() == len(BLOCKS) - 1
    gradient = text_of(Watcher(path, "gradient/block").look())
    assert "gradient/block  steps 10 to 200  ▁ 1e-19 to █ 1 (log scale)\n" in gradient


def test_a_single_value_is_seen_however_long_the_run(path: Path) -> None:
    """A spike, a dip and a NaN of one step of 20 000; no mean, maximum or comparison hides them."""
    losses = np.ones(20_000)
    losses[4_000], losses[10_000], losses[16_000] = 8.0, 0.125, math.nan
    with RunStore(path) as store:
        store.declare("step", (("loss", ""),))
        store.add([Row(i, 0, 1.0, "step", losses[i : i + 1]) for i in range(len(losses))])
        text = text_of(Watcher(path).look(), 100)
    (strip,) = re.findall("^[▁▂▃▄▅▆▇█!]{100}$", text, re.MULTILINE)
    assert {place: strip[place] for place in range(100) if strip[place] != "▅"} == {20: "█", 50: "▁", 80: "!"}


def test_values_without_a_range_and_values_of_any_size(path: Path) -> None:
    with RunStore(path) as store:
        store.declare("sites", (("stream/rms", "a"), ("stream/rms", "b")))
        for step, values in enumerate([[1e308, -1e308], [0.0, -0.0], [math.nan, math.nan], [1.0, 5e-324]], 1):
            store.add([sites_row(step, values)])
        assert re.findall(r"^([ab]) (.*)$", text_of(Watcher(path).look()), re.MULTILINE) == [
            ("a", "█▅!▅"),
            ("b", "▁▅!▅"),
        ]
    for value, said in ((2.0, "▁ 2 to █ 2 (log scale)"), (math.nan, "! not finite: 2")):
        with RunStore(path, resume=True) as store:
            store.declare("sites", (("stream/rms", "a"), ("stream/rms", "b")))
            store.add([sites_row(1, [value, value])])
            assert said in text_of(Watcher(path).look())


def test_a_site_that_was_not_there_is_blank_and_not_wrong(path: Path) -> None:
    with RunStore(path) as store:
        store.declare("sites", (("stream/rms", "a"),))
        store.add([sites_row(1, [1.0])])
        store.declare("sites", (("stream/rms", "a"), ("stream/rms", "b")))
        store.add([sites_row(2, [1.0, math.nan]), sites_row(3, [1.0, 2.0])])
        assert re.findall(r"^([ab]) (.*)$", text_of(Watcher(path).look()), re.MULTILINE) == [
            ("a", "▁▁▁"),
            ("b", " !█"),
        ]


@pytest.mark.parametrize("height", [16, 24, 40])
def test_the_picture_fits_a_low_terminal_and_keeps_the_newest_alarm(
    store: RunStore, path: Path, height: int
) -> None:
    store.add(alarms=[alarm(step, message=f"Alarm of step {step}. " * 5) for step in range(160, 200)])
    text = text_of(Watcher(path).look(), 80, height)
    assert "Alarm of step 199." in text
    assert len(lines_with(text, "blocks.")) >= 4
    if height >= 24:
        assert len(text.splitlines()) <= height


def test_a_run_without_rows_has_a_picture(path: Path) -> None:
    with RunStore(path):
        text = text_of(Watcher(path).look())
        assert "no step yet" in text
        assert "no row of all sites yet" in text
        assert "no alarms" in text
        assert Watcher(path, "gradient/block").look().heat is None, "its name may be right: nobody knows yet"


# The command --------------------------------------------------------------------------------------------


def test_a_pipe_gets_one_picture(store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", str(path), "--quantity", "gradient/block"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "gradient/block  steps 10 to 200" in out
    assert "\x1b" not in out
    assert all(cell_len(line) <= 80 for line in out.splitlines())


def test_a_stream_of_ascii_gets_ascii(store: RunStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "normscope", "watch", str(path), "--once"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.isascii()
    assert "?" not in done.stdout
    assert f"loss  steps 1 to 200  {PLAIN[0]} 3 to {PLAIN[-1]} 4.99" in done.stdout


def test_json_holds_what_is_not_finite(
    store: RunStore, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.note("range", [-math.inf, 1.0])
    store.add([step_row(201, math.nan)])
    assert run(["watch", str(path), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["notes"]["range"] == ["-inf", 1.0]
    rows = {row["layout"]: row for row in document["last_rows"]}
    assert rows["step"]["values"][0] == {"quantity": "loss", "site": "", "value": "nan"}
    assert (rows["sites"]["step"], len(rows["sites"]["values"])) == (200, 40)
    assert [each["step"] for each in document["alarms"]] == [120, 150]
    assert document["first_wrong_value"]["data"]["sentence"] == SENTENCE


def test_a_wrong_call_is_one_line(
    store: RunStore, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(tmp_path / "map.sqlite").close()
    (tmp_path / "notes.txt").write_text("run\n" * 100)
    for words, said in (
        (["none.db"], 'none.db" (not found): expected a run store that normscope.Monitor wrote'),
        (["map.sqlite"], 'map.sqlite" (the results of normscope map): expected a run store'),
        (["notes.txt"], "expected a run store that normscope.Monitor wrote"),
        (["."], "not found"),
        (
            ["run.db", "--quantity", "stream/rns"],
            "expected one of stream/rms, gradient/block; the nearest",
        ),
        (["run.db", "--interval", "0"], "--interval"),
    ):
        assert run(["watch", str(tmp_path / words[0]), *words[1:]]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert said in err
    with pytest.raises(UsageError):
        Watcher(tmp_path / "none.db").look()


class Terminal:
    """`normscope watch` on a terminal of 80 columns."""

    def __init__(self, path: Path) -> None:
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
            words = ["-m", "normscope", "watch", str(path), "--interval", "0.1"]
            os.execv(sys.executable, [sys.executable, *words])
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Read until the terminal shows the words."""
        late = time.monotonic() + 60
        while words not in self.text:
            assert time.monotonic() < late, self.text[-2000:]
            assert self._read(), f"it ended without {words!r}: {self.text[-2000:]}"

    def status(self) -> int:
        """Exit status, after the last of the output."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        if select.select([self._end], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # Linux: the other end is closed
                if piece := os.read(self._end, 1 << 16):
                    self.text += re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", piece.decode(errors="replace"))
                    return True
            return False
        return True


def test_a_terminal_shows_the_run_until_its_end(store: RunStore, path: Path) -> None:
    first, second = Terminal(path), Terminal(path)
    for terminal in (first, second):
        terminal.wait_for("step 200 of 400")
    store.add([step_row(201, 2.5)], [alarm(201, message="Live.")])
    for terminal in (first, second):
        terminal.wait_for("step 201 of 400")
        terminal.wait_for("Live.")
    os.kill(first.pid, signal.SIGINT)
    assert first.status() == 130
    assert "Traceback" not in first.text
    store.end()
    assert second.status() == 0
    assert "run.db  decoder, 20 blocks  ended" in second.text


def test_of_ranks_that_share_a_wrong_value_the_one_that_knows_its_module_is_shown(path: Path) -> None:
    for rank, data in ((0, {"sentence": "somewhere"}), (1, {"sentence": SENTENCE, "module": "blocks.7"})):
        with RunStore(path, rank=rank) as store:
            store.add(events=[Event(150, rank, 150.0 + rank, "first-wrong-value", data)])
    wrong = Watcher(path).look().wrong
    assert wrong is not None
    assert wrong.data["module"] == "blocks.7"
