"""`normscope watch -- COMMAND`: real scripts in real processes, which are watched and left as they are."""

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from normscope.monitor import RunReader
from normscope.monitor.launch import Settings
from normscope.monitor.script import Script
from normscope.monitor.store import RunStore

SCRIPTS = Path(__file__).parents[1] / "capture" / "scripts"
SHORT = """
import os, sys
import torch
from parts import Decoder, batches, cross_entropy, say
torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (inputs, targets) in zip(range(1, 13), batches()):
    loss = cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(step, loss)
"""


def environment(**more: str) -> dict[str, str]:
    paths = [str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


def watched(cwd: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normscope", "watch", *options, "--", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )


def short(folder: Path, more: str = "", before: str = "") -> str:
    (folder / "short.py").write_text(before + SHORT + more)
    return "short.py"


def losses(path: Path, rank: int = 0) -> np.ndarray:
    with RunReader(path) as reader:
        steps, values = reader.series("loss", rank=rank)
    np.testing.assert_array_equal(steps, np.arange(1, len(steps) + 1))
    return values


def printed(text: str) -> list[float]:
    return [
        float(each) for each in re.findall(r"^(?:loss of )?step \d+ ([-+.\dnaife]+)$", text, re.MULTILINE)
    ]


def said(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("normscope:")]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


@pytest.fixture(scope="module")
def shown_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the short script without normscope."""
    folder = tmp_path_factory.mktemp("alone")
    words = [sys.executable, short(folder)]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    assert len(printed(done.stdout)) == 12
    return done.stdout


def test_the_store_holds_the_run_and_the_script_is_its_own(tmp_path: Path, shown_alone: str) -> None:
    script = short(tmp_path, "print('to stderr', file=sys.stderr)\nsys.exit(3)")
    done = watched(tmp_path, "python", script)
    assert done.returncode == 3
    assert done.stdout == shown_alone
    lines = done.stderr.splitlines()
    assert lines[0] == "to stderr"
    assert lines[1:] == [
        "normscope: the script failed (SystemExit: 3); no alarm; the run is in normscope-run.db, and "
        "`normscope watch normscope-run.db` shows it"
    ]
    assert files(tmp_path) == {"short.py", "normscope-run.db"}
    path = tmp_path / "normscope-run.db"
    np.testing.assert_allclose(losses(path), printed(done.stdout), rtol=1e-4)
    with RunReader(path) as reader:
        assert reader.notes()["model"] == "Decoder"
        (rank,) = reader.ranks()
        assert (rank.state, rank.reason) == ("failed", "SystemExit: 3"), "its exit status is not 0"
        streams = reader.grid("stream/rms")
        assert len(streams.sites) == 4
        assert not streams.present[0].any(), "the first forward is read at its end"
        assert streams.present[1:].all()
        assert (reader.series("gradient/norm")[1] > 0).all()
        assert not any("hooks" in note for note in reader.notes()["notes"])


def test_a_store_is_not_overwritten_but_resumed(tmp_path: Path) -> None:
    script = short(tmp_path)
    assert watched(tmp_path, script, options=("--store", "a.db")).returncode == 0
    refused = watched(tmp_path, script, options=("--store", "a.db"))
    assert refused.returncode == 2
    assert refused.stderr == (
        'normscope: store "a.db" (it holds a run up to step 12): expected a new file; replace it with '
        "--overwrite, go on with its run by --resume, or name another one with --store.\n"
    )
    assert refused.stdout == ""
    assert watched(tmp_path, script, options=("--store", "a.db", "--resume")).returncode == 0
    assert len(losses(tmp_path / "a.db")) == 24


def test_overwrite_replaces_the_run_and_one_without_steps_needs_none(tmp_path: Path) -> None:
    script, path = short(tmp_path), tmp_path / "a.db"
    with RunStore(path):
        pass  # as of a script that failed before its first step
    with contextlib.closing(sqlite3.connect(path)) as store, store:
        store.execute("UPDATE ranks SET pid = 1, started = 'long ago'")
    assert watched(tmp_path, script, options=("--store", "a.db")).returncode == 0
    with RunReader(path) as reader:
        (began,) = [rank.began for rank in reader.ranks()]
    assert watched(tmp_path, script, options=("--store", "a.db", "--overwrite")).returncode == 0
    assert len(losses(path)) == 12
    with RunReader(path) as reader:
        (rank,) = reader.ranks()
    assert rank.began > began
    assert rank.attempt == 0


def test_a_store_whose_run_goes_on_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with RunStore(path):
        refused = watched(tmp_path, short(tmp_path), options=("--store", "a.db", "--overwrite"))
    assert refused.returncode == 2
    assert f"its run still goes on in process {os.getpid()} on " in refused.stderr
    assert path.exists()


def test_overwrite_removes_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("not a store")
    refused = watched(tmp_path, short(tmp_path), options=("--store", "notes.db", "--overwrite"))
    assert refused.returncode == 2
    assert "expected a run store" in refused.stderr
    assert path.read_text() == "not a store"


def test_an_error_of_the_script_is_shown_as_without_us(tmp_path: Path) -> None:
    more = """
def fails():
    loss = model(inputs).sum()
    loss.backward()
    loss.backward()
fails()
"""
    script = short(tmp_path, more)
    done = watched(tmp_path, script)
    alone = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == alone.returncode == 1
    assert done.stderr.startswith(alone.stderr)
    (line,) = said(done.stderr)
    assert line.startswith("normscope: the script failed (RuntimeError: Trying to backward through the graph")
    assert "); no alarm; the run is in normscope-run.db" in line
    with RunReader(tmp_path / "normscope-run.db") as reader:
        state = reader.ranks()[0]
    assert state.state == "failed"
    assert "backward through the graph a second time" in state.reason


@pytest.mark.parametrize(
    ("more", "status", "state", "reason"),
    [
        # The store's test above has the first, each of the loops below the second.
        pytest.param("import sys\nsys.exit(7)\n", 7, "failed", "SystemExit: 7", marks=pytest.mark.slow),
        pytest.param("import sys\nsys.exit()\n", 0, "ended", "", marks=pytest.mark.slow),
        ("import sys\ntry:\n    sys.exit(7)\nexcept SystemExit:\n    sys.exit(0)\n", 0, "ended", ""),
    ],
)
def test_the_status_given_to_sys_exit_is_the_end_of_the_run(
    more: str, status: int, state: str, reason: str, tmp_path: Path
) -> None:
    assert watched(tmp_path, short(tmp_path, more)).returncode == status
    with RunReader(tmp_path / "normscope-run.db") as reader:
        (rank,) = reader.ranks()
    assert (rank.state, rank.reason) == (state, reason)


def test_a_step_after_a_sys_exit_that_was_caught_clears_it() -> None:
    script = Script(Settings("a.db", "a.db", 10, False, None, None, None, 0, 0.0))

    def leave(status: object) -> NoReturn:
        raise SystemExit(status)

    with pytest.raises(SystemExit, match="7"):
        script.seen_by(leave)(7)
    assert str(script._exit) == "7"
    script._monitor, script._stepping = MagicMock(is_over=False), [MagicMock()]
    script._guarded(script._end_step)
    assert script._exit is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_to_the_script(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "normscope", "watch", "--store", str(tmp_path / "a.db"), "--"]
    script = subprocess.Popen(
        [*command, "python", str(SCRIPTS / "plain.py"), "--pre"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    lines = [script.stdout.readline() for _ in range(12)]
    script.send_signal(number)
    rest, errors = script.communicate(timeout=60)
    assert script.returncode == -number
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert files(tmp_path) == {"a.db"}
        values = printed("".join([*lines, rest]))
        found = losses(tmp_path / "a.db")
        assert len(values) <= len(found) <= len(values) + 1
        np.testing.assert_allclose(found[: len(values)], values, rtol=1e-4)
        assert len(said(errors)) == 1


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        pytest.param(["accumulated.py"], 1e-4, marks=pytest.mark.slow),  # the next accumulates too
        (["accumulated.py", "--float16", "--overflow"], 1e-4),
        (["accumulated.py", "--compile"], 1e-4),
        (["loops.py", "muon"], 1e-4),
        pytest.param(["loops.py", "two_optimizers"], 1e-4, marks=pytest.mark.slow),  # as Muon and the next
        (["loops.py", "two_scaled"], 1e-4),
        (["loops.py", "side_loss"], 1e-4),
        (["loops.py", "lbfgs"], 1e-4),
        (["loops.py", "online"], 1e-4),
        (["loops.py", "checkpointed"], 1e-4),
    ],
)
def test_losses_are_those_that_are_printed(words: list[str], tolerance: float, tmp_path: Path) -> None:
    """Loops of other shapes, ended after some steps by the pipe that they print to."""
    ending = tmp_path / "sitecustomize.py"  # it is hidden by ours, and run as well
    ending.write_text(
        "import builtins, sys\n"
        "def say(*words, print=builtins.print, **options):\n"
        "    print(*words, **options)\n"
        "    if ' '.join(map(str, words)).startswith('loss of step 12 '): sys.exit()\n"
        "builtins.print = say\n"
    )
    command = [sys.executable, "-m", "normscope", "watch", "--every", "4", "--", "python"]
    done = subprocess.run(
        [*command, str(SCRIPTS / words[0]), *words[1:]],
        cwd=tmp_path,
        env=environment(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    values, found = printed(done.stdout), losses(tmp_path / "normscope-run.db")
    assert len(values) == 12, done.stderr
    assert len(found) in (11, 12), "say() comes before or after the step"
    np.testing.assert_allclose(found, values[: len(found)], rtol=tolerance)
    with RunReader(tmp_path / "normscope-run.db") as reader:
        (rank,) = reader.ranks()
    assert (rank.state, rank.reason) == ("ended", ""), "it ends by sys.exit()"


def test_gradients_are_those_before_clipping(tmp_path: Path) -> None:
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()"
    clipped = SHORT.replace("    optimizer.step()", f"    print('norm', {clip})\n    optimizer.step()")
    (tmp_path / "short.py").write_text(clipped)
    done = watched(tmp_path, "short.py")
    norms = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("norm")]
    with RunReader(tmp_path / "normscope-run.db") as reader:
        found = reader.series("gradient/norm")[1]
    np.testing.assert_allclose(found[2:], norms[2:], rtol=1e-4)  # once the model is sure
    assert min(norms) > 0.1


def test_a_script_is_looked_at_on_a_schedule_and_stays_the_same(tmp_path: Path, shown_alone: str) -> None:
    done = watched(tmp_path, "python", short(tmp_path), options=("--look-every", "5"))
    assert done.stdout == shown_alone
    with RunReader(tmp_path / "normscope-run.db") as reader:
        found = reader.events("look")
    assert [(each.step, each.data["why"]) for each in found] == [(5, "on schedule"), (10, "on schedule")]
    assert all(each.data["measurements"] and not each.data["unmeasured"] for each in found)


@pytest.mark.parametrize("options", [[], ["--shard"]], ids=["ddp", "fsdp2"])
def test_every_process_of_torchrun_is_watched(options: list[str], tmp_path: Path) -> None:
    ending = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import parts
forever = parts.batches
parts.batches = lambda: (pair for _, pair in zip(range(12), forever()))
import distributed
from normscope.train.distributed import leave
leave(together=True)
"""
    (tmp_path / "train.py").write_text(ending)
    done = watched(tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", "train.py", *options)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "normscope-run.db"
    assert files(tmp_path) == {"train.py", "normscope-run.db"}
    np.testing.assert_allclose(losses(path), printed(done.stdout), rtol=1e-4)
    assert len(losses(path, rank=1)) == 12
    assert not np.allclose(losses(path), losses(path, rank=1)), "each has batches of its own"
    with RunReader(path) as reader:
        gradients = [reader.series("gradient/norm", rank=rank)[1] for rank in (0, 1)]
        assert [state.state for state in reader.ranks()] == ["ended", "ended"]
        assert reader.notes()["model"] == "Decoder"
        assert reader.columns()["stream/rms"][-1].endswith(".hidden")
    if options:  # each has a shard; the other test has their sum
        assert not np.allclose(*gradients)
    else:
        np.testing.assert_allclose(*gradients, rtol=1e-5)  # DDP has averaged them
    assert len(said(done.stderr)) == 1, done.stderr


FSDP1 = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import torch
import torch.distributed as dist
from normscope.train.distributed import leave
from parts import Decoder, batches, cross_entropy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group("gloo")
model = Decoder()
policy = ModuleWrapPolicy({{type(model.blocks[0])}})
options = dict(auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params="--orig" in sys.argv)
model = FullyShardedDataParallel(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _, (inputs, targets) in zip(range(5), batches()):
    cross_entropy(model(inputs), targets).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
leave(together=True)
"""


@pytest.mark.parametrize("options", [[], ["--orig"]], ids=["flat", "orig"])
def test_fsdp1_is_watched_or_said_not_to_be(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FSDP1)
    done = watched(tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", "train.py", *options)
    assert done.returncode == 0, done.stderr
    if options:
        assert "normscope: not watched: FSDP1 with use_orig_params=True" in done.stderr
        return
    with RunReader(tmp_path / "normscope-run.db") as reader:
        norms = reader.whole("gradient/norm").values
    np.testing.assert_allclose(norms, np.ones((5, 1)), rtol=1e-4)  # clipped; the root's parameters count once


@pytest.mark.parametrize(("start", "num_workers"), [("fork", 2), ("spawn", 1)])  # the spawned import PyTorch
def test_workers_that_load_data_are_left_alone(start: str, num_workers: int, tmp_path: Path) -> None:
    script = """
import contextlib
import os
import torch
from parts import Decoder, batches, cross_entropy, say

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return torch.arange(25).roll(i)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(Rows(), 1, num_workers=NUM, multiprocessing_context=START)
    for step, rows in enumerate(data, 1):
        loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)
"""
    (tmp_path / "train.py").write_text(script.replace("START", repr(start)).replace("NUM", str(num_workers)))
    (tmp_path / "run.sh").write_text("python -c pass && python train.py && exit 7")
    done = watched(tmp_path, "bash", "run.sh")
    assert done.returncode == 7, done.stderr
    assert len(said(done.stderr)) == 1, done.stderr
    assert files(tmp_path) == {"train.py", "run.sh", "normscope-run.db"}
    np.testing.assert_allclose(losses(tmp_path / "normscope-run.db"), printed(done.stdout), rtol=1e-4)


def test_an_alarm_is_one_line_with_its_step(tmp_path: Path) -> None:
    """A weight that becomes infinite before step 6, and what the monitor traces it to."""
    broken = SHORT.replace(
        "    loss = cross",
        "    if step == 6:\n        model.head.weight.data[3] = torch.inf\n    loss = cross",
    )
    (tmp_path / "short.py").write_text(broken)
    done = watched(tmp_path, "python", "short.py")
    assert done.returncode == 0
    lines = said(done.stderr)
    assert lines[0].startswith("normscope: step 6: first wrong value: ")
    assert "head" in lines[0]
    assert all(line.startswith("normscope: step ") for line in lines[:-1])
    assert any(line.startswith("normscope: step 6: not-finite: ") for line in lines), lines
    assert re.match(r"normscope: \d+ alarms?; the run is in", lines[-1])
    assert len(lines) == len(done.stderr.splitlines())


def test_a_monitor_that_fails_ends_neither_the_script_nor_its_losses(tmp_path: Path) -> None:
    failing = """
import normscope.monitor.turns
def look(self, step):
    raise RuntimeError("broken")
normscope.monitor.turns.Turns.look = look
"""
    done = watched(tmp_path, short(tmp_path, before=failing))
    assert done.returncode == 0
    assert len(printed(done.stdout)) == 12
    assert said(done.stderr)[0] == (
        "normscope: step 0: the monitor stopped, the run goes on: RuntimeError: broken"
    )
    assert len(done.stderr.splitlines()) == 2


def test_a_script_that_trains_nothing_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print('hello')")
    done = watched(tmp_path, "other.py")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert said(done.stderr) == ["normscope: nothing was watched: PyTorch was not imported"]
    assert files(tmp_path) == {"other.py"}


TWO_MODELS = """
import contextlib
import os
from torch import nn

class Generator(Decoder):
    pass

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Linear(128, 1)
    def forward(self, x):
        return self.rate(x)

torch.manual_seed(0)
generator, critic = Generator(), Critic()
first = torch.optim.SGD(critic.parameters(), lr=0.1)
second = torch.optim.SGD(generator.parameters(), lr=0.1)
for step, (inputs, targets) in zip(range(1, 13), batches()):
    with torch.no_grad():
        fake = generator(inputs)
    own = critic(fake).mean() - critic(torch.randn(8, 24, 128)).mean()
    critic.zero_grad()
    own.backward()
    first.step()
    loss = -critic(generator(inputs)).mean()
    generator.zero_grad()
    loss.backward()
    second.step()
    PRINT
"""


@pytest.mark.parametrize("module", ["Generator", "Critic"])
def test_one_of_two_models_is_watched(module: str, tmp_path: Path) -> None:
    say = "say(step, loss if sys.argv[1] == 'Generator' else own)"
    if module == "Critic":  # the critic's step ends with its optimizer; its later loss reaches the next one
        say = "say(step, own); critic.zero_grad()"
    start = SHORT[: SHORT.index("torch.manual_seed")]
    (tmp_path / "short.py").write_text(start + TWO_MODELS.replace("PRINT", say))
    options = ("--module", module) if module == "Critic" else ()
    done = watched(tmp_path, "short.py", module, options=options)
    with RunReader(tmp_path / "normscope-run.db") as reader:
        assert reader.notes()["model"] == module
    found = losses(tmp_path / "normscope-run.db")
    np.testing.assert_allclose(found, printed(done.stdout), rtol=1e-4, err_msg=done.stderr)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "loops.py", "in_backward"], "the optimizers step inside the backward"),
    ],
)
def test_what_cannot_be_watched_is_said(words: list[str], expected: str, tmp_path: Path) -> None:
    words = [str(SCRIPTS / each) if each.endswith(".py") else each for each in words]
    command = [sys.executable, "-m", "normscope", "watch", "--", *words]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        lines = [script.stdout.readline() for _ in range(5)]
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=60)
    assert len(printed("".join(lines))) == 5
    assert any(line.startswith(f"normscope: not watched: {expected}") for line in said(errors)), errors
    assert said(errors)[-1] == "normscope: nothing was watched: no steps of a model that can be"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--once", "--", "python", "short.py"], "an option of the picture"),
        (["run.db", "--", "python", "short.py"], "one of the two"),
        (["run.db", "--resume"], "a training script after --"),
        (["--resume", "--overwrite", "--", "python", "-c", "pass"], "one of the two"),
        (["run.db", "--overwrite"], "a training script after --"),
        (["run.db", "--look-every", "5"], "--look-every with RUN: expected a training script after --"),
        (["run.db", "--open"], "--open without --page"),
        (["--store", ".", "--", "python", "-c", "pass"], "(a folder): expected a file"),
        (["--"], "the command of a training script"),
        ([], "the store of a run, or a training script"),
        (["--", "python", "absent.py"], "a Python file"),
        (["--store", "absent/run.db", "--", "python", "-c", "pass"], "a file in a folder"),
    ],
)
def test_forms_of_the_command_are_not_mixed(words: list[str], expected: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "normscope", "watch", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert files(tmp_path) == set()


SPOILT = SHORT.replace("range(1, 13)", "range(1, 34)").replace(
    "    loss.backward()", "    (loss * {28: float('nan'), 30: 1000}.get(step, 1)).backward()"
)
FAILING = """
from normscope.monitor.turns import Turns
def look(self, step):
    if step == 20:
        raise RuntimeError("put in")
    return [], torch.zeros(0)
Turns.look = look
"""


@pytest.mark.parametrize("more", ["", FAILING], ids=["works", "fails"])
def test_a_script_is_rescued_if_asked_also_when_its_monitor_fails(more: str, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SPOILT.replace("torch.manual_seed(0)", "torch.manual_seed(0)" + more))
    done = watched(tmp_path, "python", "short.py", options=("--rescue", "skip,lower=0.5"))
    assert done.returncode == 0, done.stderr
    assert np.isfinite(printed(done.stdout)).all()
    with RunReader(tmp_path / "normscope-run.db") as reader:
        events = [(each.step, each.data["action"]) for each in reader.events("rescue")]
        assert len(reader.events("monitor-failed")) == bool(more)
    assert events == [(28, "skip"), (30, "skip"), (30, "lower")]
    assert "step 28: rescue: step skipped: a gradient is not finite" in done.stderr
    if not more:
        lost = subprocess.run(
            [sys.executable, "short.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        assert np.isnan(printed(lost.stdout)[28:]).all()


def test_an_unknown_rescue_is_refused_before_the_script_starts(tmp_path: Path) -> None:
    short(tmp_path)
    done = watched(tmp_path, "python", "short.py", options=("--rescue", "skip,jump"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert 'rescue "skip,jump"' in done.stderr.replace("\n", " ")


def test_no_hook_stays_on_an_output_that_is_a_parameter() -> None:
    script: Any = Script(Settings("a.db", "a.db", 10, False, None, None, None, 0, 0.0))
    nothing = lambda *_: None  # noqa: E731
    script._monitor = SimpleNamespace(forward_ends=nothing, step=nothing, close=nothing)
    weight = torch.nn.Parameter(torch.ones(4))
    for end in (script._end_step, lambda: script._leave("")):
        for _ in range(3):
            script._end_forward((), {}, weight)
        assert list(weight._backward_hooks.values()) == [script._reached]
        script._stepping = [torch.optim.SGD([weight])]
        end()
        assert not weight._backward_hooks
