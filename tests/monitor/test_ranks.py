"""Runs of several processes: their ranks are compared, and none waits for another."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several_ranks
import torch

from normscope.cli.watch_view import picture
from normscope.monitor import Raised, Row, RunReader, RunStore, replica
from normscope.monitor.attention import AttentionWatch
from normscope.monitor.plan import plan_of
from normscope.monitor.scene import Scene, Watcher
from normscope.monitor.sharded import Sharded
from normscope.monitor.together import BEHIND, Together
from normscope.report.console import as_text
from normscope.rules import Severity
from normscope.subjects import load

SPECS = (
    "nn:decoder,scheme=pre,depth=2,width=16,heads=2",
    "nn:encoder,scheme=post,depth=2,width=16,heads=2",
    "hf:gpt2,n_layer=2,n_embd=16,n_head=2,vocab_size=64",
    "hf:llama,num_hidden_layers=2,hidden_size=16,num_attention_heads=2,num_key_value_heads=2,"
    "intermediate_size=32,vocab_size=64",
    "hf:t5,num_layers=2,d_model=16,num_heads=2,d_ff=32,d_kv=8,vocab_size=64",
)


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """New processes that have finished their imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["several_ranks", "normscope.monitor.monitor"])
    return context


def go(
    processes: multiprocessing.context.ForkServerContext, name: str, size: int, folder: Path, *more: str
) -> list[int | None]:
    """Run a scenario of `several_ranks`; the exit status of each process."""
    ranks = [
        processes.Process(target=several_ranks.run, args=(name, rank, size, str(folder), *more))
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(90)
        if each.is_alive():
            each.kill()
            pytest.fail(f"{name}: a process hangs")
    return [each.exitcode for each in ranks]


def scene(folder: Path) -> Scene:
    return Watcher(folder / several_ranks.STORE).look()


def apart(found: Scene) -> list[Raised]:
    return [each for each in found.alarms if each.finding.code == "NS814"]


def test_ranks_of_torchrun_that_agree_raise_no_alarm(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, several_ranks.__file__, "agree", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = scene(tmp_path)
    assert apart(found) == []
    assert [each for each in found.events if each.kind == "ranks"] == []
    assert [found.last_step_of(rank) for rank in (0, 1)] == [25, 25]


@pytest.mark.parametrize(("name", "step", "said"), [("skip", 12, "skipped "), ("drift", 20, "gain/rms at ")])
def test_weights_that_part_are_one_alarm_on_rank_0(
    name: str, step: int, said: str, processes, tmp_path: Path
) -> None:
    assert go(processes, name, 2, tmp_path) == [0, 0]
    first, *more = apart(scene(tmp_path))
    assert more == []
    assert (first.rank, first.step, first.finding.severity) == (0, step, Severity.ERROR)
    assert said in first.finding.message


def test_a_rank_with_other_data_is_a_warning_among_three(processes, tmp_path: Path) -> None:
    assert go(processes, "data", 3, tmp_path) == [0, 0, 0]
    found = apart(scene(tmp_path))
    assert {each.rank for each in found} == {0}
    assert {each.finding.severity for each in found} == {Severity.WARNING}
    assert any("loss" in each.finding.message and "on rank 2" in each.finding.message for each in found)


@pytest.mark.parametrize(
    ("name", "states", "last", "said"),
    [
        ("die", ["ended", "gone"], 15, "rank 1 has written no row after step 15: not compared since"),
        ("lag", ["ended", "ended"], 60, "rank 1 has written no row after step 15: not compared since"),
        ("alone", ["ended"], None, "rank 1 has written no row to this store: not compared"),
    ],
)
def test_a_rank_that_writes_no_more_is_named_and_nobody_waits(
    name: str, states: list[str], last: int | None, said: str, processes, tmp_path: Path
) -> None:
    assert go(processes, name, 2, tmp_path) == [0, -signal.SIGKILL if name == "die" else 0]
    found = scene(tmp_path)
    assert [each["state"] for each in found.to_dict()["ranks"]] == states
    assert found.last_step_of(0) == 60
    assert found.last_step_of(1) == last
    assert [each.data["sentence"] for each in found.events if each.kind == "ranks"] == [said]
    with RunReader(tmp_path / several_ranks.STORE) as reader:
        assert reader.notes()["notes"][-1] == said
    assert apart(found) == []


# DDP ----------------------------------------------------------------------------------------------------


def test_accumulation_and_a_skipped_step_under_ddp(processes, tmp_path: Path) -> None:
    assert go(processes, "accumulate", 2, tmp_path) == [0, 0]
    found = scene(tmp_path)
    assert apart(found) == []
    with RunReader(tmp_path / several_ranks.STORE) as reader:
        for rank in (0, 1):
            losses = [float(line) for line in (tmp_path / f"losses{rank}").read_text().split()]
            np.testing.assert_allclose(reader.series("loss", rank=rank)[1], losses, rtol=1e-6)
            steps, skipped = reader.series("skipped", rank=rank)
            assert steps[skipped == 1].tolist() == [6]
            assert set(reader.series("tokens", rank=rank)[1]) == {2.0 * 4 * 12}
        gradients = [reader.series("gradient/norm", rank=rank)[1] for rank in (0, 1)]
    np.testing.assert_allclose(*gradients, rtol=1e-5)
    assert np.isfinite(np.delete(gradients[0], 5)).all()


def test_tokens_that_are_equal_show_under_ddp_with_dropout(processes, tmp_path: Path) -> None:
    """Each rank runs its model once more alone, and the run stays the same to the bit."""
    assert go(processes, "drop_out", 2, tmp_path) == [0, 0]
    with RunReader(tmp_path / several_ranks.STORE) as reader:
        for rank in (0, 1):
            steps, _, values = reader.table("stream/diversity", rank=rank)
            assert list(steps) == [1, 3, 6]
            assert (values < 1e-10).all()


def test_a_bad_batch_of_one_rank_is_named_there(processes, tmp_path: Path) -> None:
    assert go(processes, "bad_batch", 2, tmp_path) == [0, 0]
    with RunReader(tmp_path / several_ranks.STORE) as reader:
        found = {each.rank: each for each in reader.events("first-wrong-value")}
    assert {each.step for each in found.values()} == {8}
    assert found[1].data["phase"] == "data"
    assert (
        "vectors holds NaN before the forward: 1 of its 192 entries, the first at [2, 3, 4]"
        in (found[1].data["sentence"])
    )
    assert "module" not in found[0].data
    assert found[0].data["sentence"].startswith("the gradient of read.weight is not finite, but a replay of")
    assert "on another rank" in found[0].data["sentence"]
    shown = scene(tmp_path).wrong
    assert shown is not None
    assert shown.rank == 1


def test_a_store_outlives_a_rank_that_is_killed(processes, tmp_path: Path) -> None:
    first, second = go(processes, "kill", 2, tmp_path)
    assert second == -signal.SIGKILL
    assert first not in (0, None), "its collective failed"
    found = scene(tmp_path)
    assert found.state == "failed", "rank 0 met the error, and said so"
    assert [each["state"] for each in found.to_dict()["ranks"]] == ["failed", "gone"]
    assert found.last_step_of(1) == 25, "all but the last flush"
    assert found.last_step_of(0) == 27
    assert "rank 1 is gone after step 25" in text(found)


def text(found: Scene) -> str:
    return as_text(lambda width: picture(found, width), 100)


# Sharded weights ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps in one process, whose rows other tests hold against dense references."""
    folder = tmp_path_factory.mktemp("dense")
    several_ranks.dense(folder, 2)
    return folder / several_ranks.STORE


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp", "fsdp1", "flat"])
def test_rows_of_a_sharded_model_are_those_of_the_whole_one(
    kind: str, processes, dense: Path, tmp_path: Path
) -> None:
    assert go(processes, "shard", 2, tmp_path, kind) == [0, 0]
    found = scene(tmp_path)
    assert found.notes["model"] == "Decoder"
    assert found.alarms == found.events == ()
    assert any("sharded over 2 processes" in note for note in found.notes["notes"])
    with RunReader(tmp_path / several_ranks.STORE) as reader, RunReader(dense) as whole:
        for rank in (0, 1):
            losses = [float(line) for line in (tmp_path / f"losses{rank}").read_text().split()]
            np.testing.assert_allclose(reader.series("loss", rank=rank)[1], losses, rtol=1e-6)
        assert len(losses) == 12
        streams = np.array([reader.grid("stream/rms", rank).values for rank in (0, 1)])
        rms = np.sqrt((streams**2).mean(0))  # both ranks have as many tokens
        np.testing.assert_allclose(rms, whole.grid("stream/rms").values, rtol=1e-4)
        known = ["gradient/norm", "gradient/block"]
        if kind != "flat":  # flat parameters hold several kinds
            known += ["gradient/kind", "weight/norm", "gain/rms"]
        for quantity in known:
            parts, expected = reader.whole(quantity), whole.grid(quantity)
            assert parts.sites == expected.sites, quantity
            np.testing.assert_allclose(parts.values, expected.values, rtol=1e-4, err_msg=quantity)
        assert set(reader.columns()) == set(whole.columns()) - ({"gain/rms"} if kind == "flat" else set())
    heat = Watcher(tmp_path / several_ranks.STORE, "gradient/block").look().heat
    assert heat is not None
    assert (
        heat.values[0, 0]
        > Watcher(tmp_path / several_ranks.STORE, "gradient/block", 0).look().heat.values[0, 0]
    )


def test_a_sharded_model_in_bfloat16_with_micro_batches(processes, tmp_path: Path) -> None:
    assert go(processes, "shard_cast", 2, tmp_path) == [0, 0]
    found = scene(tmp_path)
    assert found.alarms == found.events == ()
    assert len(found.notes["notes"]) == 1, "the note on shards; the model was read"
    assert found.notes["facts"]["dtype"] == "bfloat16"
    with RunReader(tmp_path / several_ranks.STORE) as reader:
        assert len(reader.columns()["stream/rms"]) == 4
        norms = [float(line) for line in (tmp_path / "norms0").read_text().split()]
        np.testing.assert_allclose(reader.whole("gradient/norm").values[:, 0], norms, rtol=1e-4)


def test_rows_under_tensor_parallelism(processes, tmp_path: Path) -> None:
    assert go(processes, "split", 2, tmp_path) == [0, 0]
    (tmp_path / "dense").mkdir()
    several_ranks.dense(tmp_path / "dense", 1)
    dense = tmp_path / "dense" / several_ranks.STORE
    assert scene(tmp_path).alarms == ()
    with RunReader(tmp_path / several_ranks.STORE) as reader, RunReader(dense) as whole:
        for quantity in ("gradient/norm", "gradient/block", "gradient/kind", "weight/norm", "gain/rms"):
            expected = whole.grid(quantity).values
            np.testing.assert_allclose(reader.whole(quantity).values, expected, rtol=1e-4, err_msg=quantity)
        for quantity in ("loss", "stream/rms"):
            for rank in (0, 1):
                found = reader.grid(quantity, rank).values
                np.testing.assert_allclose(found, whole.grid(quantity).values, rtol=1e-4, err_msg=quantity)


def test_the_whole_of_ranks_is_of_the_steps_that_all_have(two: "Stored", tmp_path: Path) -> None:
    two.add(0, range(1, 41), weight=3.0)
    two.add(1, range(1, 31), weight=4.0)
    with RunReader(tmp_path / "run.db") as reader:
        found = reader.whole("weight/norm", after=10)
    assert found.steps.tolist() == [20, 30]
    assert found.values.tolist() == [[5.0], [5.0]]


@pytest.mark.parametrize("most", [replica.MOST_BYTES, 0], ids=["random", "fake"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_replica_is_read_as_the_model_is(spec: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MOST_BYTES", most)
    subject = load(spec)
    before = [p.detach().clone() for p in subject.model.parameters()]
    expected = plan_of(subject.model, subject.batch)
    found, attention = Sharded(subject.model).read(subject.batch)
    attention.remove()
    whole = AttentionWatch(subject.model, expected.anatomy, subject.batch)
    assert attention.layout == whole.layout
    for name in ("streams", "columns", "places", "beside"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.streams
    for name in ("names", "blocks", "kinds"):
        assert getattr(found.groups, name) == getattr(expected.groups, name), name
    pairs = zip(found.groups.parameters, expected.groups.parameters, strict=True)
    assert all(own is whole for own, whole in pairs)
    assert found.groups.sizes.tolist() == [p.numel() for p in expected.groups.parameters]
    assert all(map(torch.equal, before, subject.model.parameters()))
    assert not any(module._forward_hooks for module in subject.model.modules())


class Reaching(torch.nn.Module):
    """A module that another one reaches past its parents."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self.reach = lambda x: found[0](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.reach(x)


def test_a_model_that_is_reached_from_its_replica_is_not_run() -> None:
    outside: list[Any] = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Reaching(outside))
    outside.append(model[0])
    plan, _ = Sharded(model).read(torch.randn(2, 3, 4))
    assert plan.streams == ()
    assert "a part of it is reached from outside, Linear" in plan.notes[0]
    assert len(plan.groups.parameters) == 2


@pytest.mark.parametrize(
    ("name", "module", "phase", "said", "on_the_other"),
    [
        pytest.param(
            "shard_weight",
            "blocks.1.mlp.0",
            "parameter",
            "Parameter or buffer blocks.1.mlp.0.weight, this rank's shard, holds NaN before the forward",
            "The first stream that is not finite on this rank is that at blocks.1, that at blocks.0 is ",
            id="weight",
        ),
        pytest.param(
            "shard_stream",
            "blocks.1",
            "forward",
            "The first stream that is not finite on this rank is that at blocks.1, that at blocks.0 is ",
            "The streams are finite on this rank, the gradients of ",
            id="stream",
        ),
        pytest.param(
            "shard_stream_late",
            "blocks.1",
            "forward",
            "The first stream that is not finite on this rank is that at blocks.1, that at blocks.0 is ",
            "The streams are finite on this rank, the gradients of ",
            id="stream, read late",
        ),
    ],
)
def test_a_wrong_value_of_a_sharded_model_is_named_without_a_replay(
    name: str, module: str, phase: str, said: str, on_the_other: str, processes, tmp_path: Path
) -> None:
    assert go(processes, name, 2, tmp_path) == [0, 0]
    found = scene(tmp_path).wrong
    assert found is not None
    assert (found.step, found.rank) == (8, 1)
    assert (found.data["module"], found.data["phase"]) == (module, phase)
    assert found.data["sentence"].startswith(said)
    with RunReader(tmp_path / several_ranks.STORE) as reader:
        (other,) = [each for each in reader.events("first-wrong-value") if each.rank == 0]
    assert other.data["sentence"].startswith(on_the_other)
    assert other.step == 8


# The comparison itself, of rows that are written here ----------------------------------------------------

OF_STEP, OF_SITES = (("loss", ""), ("lr", "")), (("weight/norm", "norm"), ("gain/rms", "norm.weight"))


class Stored:
    """Ranks that write to one store, and the comparison on rank 0."""

    def __init__(self, folder: Path, size: int = 2, every: int = 10) -> None:
        self.stores = [RunStore(folder / "run.db", rank=rank) for rank in range(size)]
        for store in self.stores:
            store.declare("step", OF_STEP)
            store.declare("sites", OF_SITES)
        self.together = Together(folder / "run.db", size, start=0, began=1.0, every=every, facts={})

    def add(self, rank: int, steps: range, lr: float = 1e-3, weight: float = 1.0, sites: int = 10) -> None:
        rows = [Row(step, rank, 2.0, "step", np.array([2.0, lr])) for step in steps]
        rows += [
            Row(each, rank, 2.0, "sites", np.array([weight, weight])) for each in steps if each % sites == 0
        ]
        self.stores[rank].add(rows)

    def found(self) -> list[int]:
        return [each.step for each in self.together.compared()]

    def close(self) -> None:
        self.together.close()
        for store in self.stores:
            store.close()

    def resume(self, rank: int) -> None:
        """Begin this rank anew; its next steps replace those that it has done."""
        self.stores[rank].close()
        self.stores[rank] = RunStore(self.stores[rank].path, rank=rank, resume=True)
        self.stores[rank].declare("step", OF_STEP)
        self.stores[rank].declare("sites", OF_SITES)


@pytest.fixture
def two(tmp_path: Path):
    stored = Stored(tmp_path)
    yield stored
    stored.close()


def test_bunches_out_of_phase_are_compared_step_by_step(two: Stored) -> None:
    two.add(0, range(1, 11))
    assert two.found() == []
    two.add(1, range(1, 5))
    two.add(0, range(11, 21))
    assert two.found() == []
    two.add(1, range(5, 8))
    two.add(1, range(8, 31), lr=2e-3)
    assert two.found() == [8]
    two.add(0, range(21, 31))
    assert two.found() == [], "raised once"
    assert two.together.sentences == []


def test_weights_that_stay_parted_are_said_once_however_far_apart_they_are_measured(two: Stored) -> None:
    for begin in range(1, 1000, 100):
        two.add(0, range(begin, begin + 100), sites=100)
        two.add(1, range(begin, begin + 100), sites=100, weight=1.1)
        assert two.found() == ([100] if begin == 1 else [])


def test_a_rank_that_goes_back_is_not_compared_with_what_it_did_before(two: Stored) -> None:
    two.add(0, range(1, 26))
    two.add(1, range(1, 21))
    assert two.found() == []
    for rank in (0, 1):
        two.resume(rank)
    two.add(0, range(11, 21), lr=2e-3)
    two.add(1, range(11, 12), lr=2e-3)
    assert two.found() == [], "rank 1 has done none of the others again"
    two.add(1, range(12, 21), lr=2e-3)
    two.add(0, range(21, 31), lr=2e-3)
    two.add(1, range(21, 31), lr=2e-3)
    assert two.found() == []
    two.add(0, range(31, 41), lr=2e-3)
    two.add(1, range(31, 41), lr=3e-3)
    assert two.found() == [31]


def test_a_rank_that_catches_up_is_compared_again(two: Stored) -> None:
    two.add(1, range(1, 3))
    two.add(0, range(1, 2 * BEHIND))
    assert two.found() == []
    assert two.together.sentences == ["rank 1 has written no row after step 2: not compared since"]
    two.add(1, range(3, 2 * BEHIND), lr=2e-3)
    two.add(0, range(2 * BEHIND, 2 * BEHIND + 10))
    assert two.found() == [], "those steps are over"
    two.add(1, range(2 * BEHIND, 2 * BEHIND + 10), lr=2e-3)
    assert two.found() == [2 * BEHIND]


def test_rows_of_an_earlier_attempt_and_of_other_columns_are_not_compared(two: Stored) -> None:
    old = [Row(step, 1, 0.5, "step", np.array([2.0, 9.0])) for step in range(1, 11)]
    two.stores[1].add(old)
    two.add(0, range(1, 11))
    assert two.found() == []
    two.stores[1].declare("step", (("tokens", ""), ("lr", "")))
    two.stores[1].add([Row(step, 1, 2.0, "step", np.array([64.0, 1e-3])) for step in range(11, 21)])
    two.add(0, range(11, 21))
    assert two.found() == []
    two.stores[1].add([Row(step, 1, 2.0, "step", np.array([64.0, 2e-3])) for step in range(21, 31)])
    two.add(0, range(21, 31))
    assert two.found() == [21]


def test_ranks_with_different_parts_of_a_model_share_no_weights(two: Stored) -> None:
    parts = [(("lr", ""), ("gradient/norm", ""), ("gradient/block", f"blocks.{rank}")) for rank in (0, 1)]
    for rates, found in (((1e-3, 1e-3), []), ((1e-3, 2e-3), [11])):
        for store, layout, rate in zip(two.stores, parts, rates, strict=True):
            store.declare("step", layout)
            values = np.array([rate, 1.0 + store.rank, 1.0 + store.rank])
            first = 11 if found else 1
            store.add([Row(step, store.rank, 2.0, "step", values) for step in range(first, first + 10)])
        assert two.found() == found


def test_an_error_ends_the_comparison_and_not_the_monitor(two: Stored) -> None:
    two.together.close()
    assert two.found() == []
    (sentence,) = two.together.sentences
    assert sentence.startswith("ranks are no longer compared: ")
    assert two.found() == []
    assert len(two.together.sentences) == 1


def test_ranks_on_other_machines_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    stored = Stored(tmp_path, size=6)
    assert stored.together.sentences == ["on other machines, not compared with the rest: ranks 2 to 5"]
    stored.close()
