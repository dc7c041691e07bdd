"""Sides: where each text and object goes, processes of their own, saved reports, files of commands."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import repository, write
from torch import nn

import normscope
from normscope.anatomy import Anatomy, reading
from normscope.compare import sides
from normscope.compare.commands import command_of
from normscope.compare.remote import RemoteSide
from normscope.compare.side import LiveSide, NotGivenError, SavedSide, Settings
from normscope.compare.sides import opened, side_of
from normscope.errors import UsageError
from normscope.subjects import Run, Subject

SMALL = "nn:decoder,depth=2,width=16,heads=2,vocab=64,context=16"
SETTINGS = Settings(batch_size=1, seq_len=8)


def epsilon(subject: Subject, anatomy: Anatomy) -> tuple[float, int]:
    """ε of the first norm, and the process."""
    return next(m.eps for m in subject.model.modules() if isinstance(m, nn.LayerNorm)), os.getpid()


def failing(subject: Subject, anatomy: Anatomy) -> None:
    raise ValueError("the part failed")


def dying(subject: Subject, anatomy: Anatomy) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def weights(build: Any, anatomy: Anatomy, seeds: tuple[int, ...]) -> list[float]:
    return [next(build(seed).parameters()).sum().item() for seed in seeds]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = repository(tmp_path / "code")
    monkeypatch.chdir(folder)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)])
    )
    return folder


def test_two_revisions_and_their_imports_do_not_meet(here: Path) -> None:
    with opened("git:HEAD~1:model.py:build", "model.py:build,depth=1", SETTINGS) as (a, b):
        assert (type(a), type(b)) == (RemoteSide, LiveSide)
        (eps_a, process), (eps_b, own) = a.read(epsilon), b.run(epsilon)
        assert (eps_a, eps_b) == (1e-5, 1e-6)
        assert own == os.getpid() != process
        assert len(set(a.start(weights, (0, 1, 0)))) == 2
        with pytest.raises(RuntimeError, match="ValueError: the part failed in the process of git:HEAD~1"):
            a.run(failing)
        assert a.read(epsilon)[0] == 1e-5  # it still serves
        with pytest.raises(UsageError, match="ended by signal 9"):
            a.run(dying)
        files = a._revision.root  # type: ignore[attr-defined]
        assert files.exists()
    assert not files.exists()


def test_two_copies_of_the_code_do_not_share_their_imports(here: Path) -> None:
    write(here / "old", "1e-3")
    with opened("model.py:build", "old/model.py:build", SETTINGS) as (a, b):
        assert (a.read(epsilon)[0], b.read(epsilon)[0]) == (1e-6, 1e-3)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ("model.py:build", "model.py:build,depth=3", (False, False)),
        ("./model.py:build", "model.py:build", (False, False)),
        ("old/model.py:build", "model.py:build", (False, True)),
        ("model.py:build", "hf:gpt2", (True, False)),
        ("hf:gpt2", "model.py:build", (False, True)),
        ("hf:gpt2", SMALL, (False, False)),
        ("git:HEAD:model.py:build", "model.py:build", (False, False)),
        ("model.py:build", "report.json", (False, False)),
        ("package.a:build", "package.b:build", (False, True)),
    ],
)
def test_code_of_the_users_has_a_process_of_its_own_beside_other_code(
    here: Path, monkeypatch: pytest.MonkeyPatch, a: str, b: str, apart: tuple[bool, bool]
) -> None:
    seen = []

    def noted(given: Any, settings: Settings, batch: Any, *, is_apart: bool) -> SavedSide:
        seen.append(is_apart)
        return SavedSide(str(given), {})

    monkeypatch.setattr(sides, "side_of", noted)
    with opened(a, b, SETTINGS):
        assert tuple(seen) == apart


def test_each_model_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, record = [], reading.record

    def counted(*arguments: Any, **options: Any) -> Any:
        count.append(arguments[0])
        return record(*arguments, **options)

    monkeypatch.setattr(reading, "record", counted)
    fed = {"batch_size": 1, "seq_len": 8}
    found = normscope.diff(SMALL, SMALL.replace("depth=2", "depth=3"), parts="structure,start,recipe", **fed)
    assert len(found.rows.parts) == 1
    assert len(count) == 2


def test_fresh_weights_of_a_function_follow_the_seed_and_leave_the_generator() -> None:
    state = torch.get_rng_state()
    side = side_of(lambda: nn.TransformerEncoderLayer(16, 2, 32), SETTINGS)
    first = side.start(weights, (0, 1, 0))
    assert first[0] == first[2] != first[1]
    assert torch.equal(state, torch.get_rng_state())


def test_a_module_has_no_fresh_weights() -> None:
    side = side_of(nn.TransformerEncoderLayer(16, 2, 32), SETTINGS)
    with pytest.raises(NotGivenError, match="cannot be built again"):
        side.start(weights, (0,))


@pytest.mark.parametrize("is_called", [False, True])
def test_a_module_brings_its_batch_and_its_loss(is_called: bool) -> None:
    batch = torch.randn(2, 5, 16)
    given = (nn.TransformerEncoderLayer(16, 2, 32), batch, lambda output, batch: output.sum())
    side = side_of((lambda: given) if is_called else given, SETTINGS)
    assert side.run(lambda subject, anatomy: (subject.batch is batch, subject.loss_fn is given[2])) == (
        True,
        True,
    )


def test_a_run_brings_its_model() -> None:
    def made() -> Run:
        model = nn.TransformerEncoderLayer(16, 2, 32)
        return Run(model=model, batches=torch.randn(2, 5, 16), loss=lambda output, batch: output.sum())

    side = side_of(made, SETTINGS)
    assert side.read(lambda subject, anatomy: subject.run is not None)
    assert len(set(side.start(weights, (0, 1)))) == 2


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match="a int to compare"):
        side_of(3, SETTINGS)
    with pytest.raises(UsageError, match="returned a list"):
        side_of(list, SETTINGS)


def test_a_model_beyond_the_memory_is_read_and_not_run() -> None:
    side = side_of("nn:decoder,depth=2,width=400000,heads=4", SETTINGS)
    assert side.read(lambda subject, anatomy: len(anatomy.blocks)) == 2
    for ask in (lambda: side.run(failing), lambda: side.start(weights, (0,)), lambda: side.reports({}, (0,))):
        with pytest.raises(NotGivenError, match="do not fit into memory"):
            ask()


def test_a_saved_report_is_a_side(tmp_path: Path) -> None:
    report = normscope.check(normscope.load(SMALL, batch_size=1, seq_len=8), steps=0, budget="fast")
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    for given in (str(path), report):
        side = side_of(given, SETTINGS)
        assert side.is_saved
        assert side.report()["verdict"] == report.verdict
        assert side.reports({}, (0, 1)) == [side.report()]
        for method, *words in (("read", failing), ("run", failing), ("start", weights, (0,))):
            with pytest.raises(NotGivenError, match="is a report"):
                getattr(side, str(method))(*words)


def test_functions_whose_copies_do_not_fit_into_memory_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from normscope.compare import compare as room

    monkeypatch.setattr(room, "available_bytes", lambda device: 100)
    found = normscope.diff(SMALL, SMALL, parts="structure,function", batch_size=1, seq_len=8)
    assert [part.how for part in found.parts] == ["whole", "not"]
    assert "copies in float64" in found.parts[1].why[0]


QUICK = {"steps": 0, "budget": "fast"}


def test_a_model_is_checked_at_several_seeds_and_a_module_once() -> None:
    seeds = [report["seed"] for report in side_of(SMALL, SETTINGS).reports(QUICK, (0, 1, 2))]
    assert seeds == [0, 1, 2]
    assert len(side_of(nn.TransformerEncoderLayer(16, 2, 32), SETTINGS).reports(QUICK, (0, 1))) == 1


def test_a_model_beside_a_report_is_checked_as_the_report_was(tmp_path: Path) -> None:
    subject = normscope.load(SMALL, batch_size=1, seq_len=8)
    report = normscope.check(subject, steps=0, budget="fast")
    found = normscope.diff(report, SMALL, parts="verdict", check=True, batch_size=1, seq_len=8)
    assert found.is_same
    assert found.parts[0].figures["reports"] == [1, 1]
    asked = normscope.diff(report, SMALL, parts="verdict", check={"steps": 2}, batch_size=1, seq_len=8)
    assert not asked.is_same


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("broken.json", "{", "broken.json"),
        ("other.json", json.dumps({"schema": "normscope.map/1"}), "the schema normscope.map/1"),
        ("config.json", json.dumps({"model_type": "gpt2"}), 'write "hf:'),
        ("list.json", "[]", "without a schema"),
        ("page.html", "<html>", "--format json"),
        ("missing.json", None, "No such file"),
        ("missing.db", None, "missing.db"),
        ("notes.txt", "nothing", "notes.txt"),
        ("model.py", "", "name the factory too"),
        ("weights.pt", "any", "weights without a model"),
        ("weights.safetensors", "any", "write a factory"),
    ],
)
def test_a_file_that_is_no_report_is_refused(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as refused:
        side_of(str(tmp_path / name), SETTINGS)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("config", "kind"), [("{}", "hf"), (b"\xff", "hf"), ('{"format": "normscope.model/1"}', "nn")]
)
def test_a_folder_of_weights_is_told_its_model(tmp_path: Path, config: str | bytes, kind: str) -> None:
    (tmp_path / "config.json").write_bytes(config.encode() if isinstance(config, str) else config)
    with pytest.raises(UsageError, match=f'write "{kind}:'):
        side_of(str(tmp_path), SETTINGS)


COMMANDS = """# the two runs
normscope check --steps 3 --budget=fast -- python train.py \\
    --lr 1e-3

-- python "my train.py"
"""


def test_commands_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.txt"
    path.write_text(COMMANDS)
    first, second = command_of(f"{path}:1"), command_of(f"{path}:2")
    assert first.words == ("python", "train.py", "--lr", "1e-3")
    assert first.options == {"steps": 3, "budget": "fast"}
    assert (second.words, second.options) == (("python", "my train.py"), {})
    for text, words in ((str(path), "2 commands"), (f"{path}:3", "check the number")):
        with pytest.raises(UsageError, match=words):
            command_of(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--lr 3 -- python a.py", "--lr"),
        ("--steps x -- python", "whole number"),
        ("--", "after --"),
        ('-- "a', "quote"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "run.txt").write_text(line)
    with pytest.raises(UsageError, match=words):
        command_of(str(tmp_path / "run.txt"))


SCRIPT = """import torch
from torch import nn
model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 4, 16)).square().mean().backward()
    optimizer.step()
"""


def test_a_script_is_run_and_is_then_a_report(here: Path) -> None:
    (here / "train.py").write_text(SCRIPT.replace("LR", "1e-3"))
    (here / "run.txt").write_text("--steps 2 --budget fast -- python train.py\n")
    side = side_of("run.txt", SETTINGS)
    assert side.is_saved
    assert side.report()["recipe"]["optimizers"][0]["groups"][0]["lr"] == 1e-3


def test_a_script_that_fails_is_refused_with_its_error(here: Path) -> None:
    (here / "train.py").write_text("raise ValueError('no data')\n")
    (here / "run.txt").write_text("--steps 2 -- python train.py\n")
    with pytest.raises(UsageError, match="no data") as refused:
        side_of("run.txt", SETTINGS)
    assert '"run.txt"' in str(refused.value)
