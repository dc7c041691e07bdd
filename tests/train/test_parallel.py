"""Two processes of torchrun (gloo, CPU) take the steps that one takes, copied (DDP) or sharded (FSDP2)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from together import COMMON, CONFIGS, train

from normscope.errors import UsageError
from normscope.train import RunConfig
from normscope.train.batches import require_share, share_of, with_a_label
from normscope.train.distributed import leave
from normscope.train.processes import Processes

HERE = Path(__file__).parent


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    return subprocess.run(
        command,
        cwd=HERE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def curve(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return [value for record in records for name, value in record.items() if name in ("loss", "validation")]


@pytest.mark.parametrize(
    ("parallel", "names"),
    [
        ("ddp", ["tied", "halves"]),
        ("fsdp", ["tied"]),
        pytest.param("ddp", [*CONFIGS], marks=pytest.mark.slow),
        pytest.param("fsdp", [*CONFIGS], marks=pytest.mark.slow),
    ],
)
def test_two_processes_step_as_one_and_go_on_to_the_bit(
    parallel: str, names: list[str], tmp_path: Path
) -> None:
    done = torchrun("together.py", parallel, str(tmp_path), *names)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in names:
        config = RunConfig.from_dict(COMMON | CONFIGS[name])
        train(config, tmp_path / name / "alone", Processes())
        folders = {part: tmp_path / name / part for part in ("alone", "whole", "resumed")}
        tolerance = 2e-2 if config.trial.precision == "bfloat16" else 2e-5
        assert curve(folders["whole"]) == pytest.approx(curve(folders["alone"]), rel=tolerance), name
        assert curve(folders["resumed"]) == curve(folders["whole"]), name
        weights = {part: load_file(folder / "model/model.safetensors") for part, folder in folders.items()}
        for key, alone in weights["alone"].items():
            assert torch.equal(weights["resumed"][key], weights["whole"][key])
            if (
                config.trial.precision == "float32" and config.trial.optimizer == "sgd"
            ):  # Adam divides by noise
                torch.testing.assert_close(weights["whole"][key], alone, rtol=1e-4, atol=1e-6)


def test_the_group_is_left_where_another_process_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("rank 1 did not come")

    left: list[bool] = []
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "monitored_barrier", fails)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(True))
    with pytest.raises(RuntimeError, match="rank 1"):
        leave(together=True)
    assert left == [True]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_shares_are_the_batch_and_their_weighted_losses_its_loss(size: int) -> None:
    labels = torch.randint(5, (6, 7))
    labels[torch.rand(6, 7) < 0.7] = -100
    labels[3:] = -100  # shares without a label: their mean is 0/0
    labels[0, 0] = 1
    logits, mask = torch.randn(6, 7, 5, requires_grad=True), torch.ones(7, 7)
    batch = {"logits": logits, "labels": labels, "mask": mask}
    shares = [share_of(batch, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([share["logits"] for share in shares]), logits)
    assert all(share["mask"] is mask for share in shares)

    def loss(part: dict) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(part["logits"].flatten(0, 1), part["labels"].flatten())

    weighed = [with_a_label(batch, share, size) for share in shares]
    parts = [loss(share) * weight for share, weight in weighed]
    torch.testing.assert_close(sum(parts) / size, loss(batch))
    (expected,) = torch.autograd.grad(loss(batch), logits)
    (found,) = torch.autograd.grad(sum(parts) / size, logits)
    torch.testing.assert_close(found, expected)


def test_a_batch_that_cannot_be_shared_is_said() -> None:
    with pytest.raises(UsageError, match="a batch of 3 sequences for 2 processes") as error:
        require_share(torch.zeros(3, 8), 2)
    assert "\n" not in str(error.value)
    require_share(torch.zeros(4, 8), 2)


@pytest.mark.parametrize("name", ["ids", "labels"])
def test_batches_without_labels_of_classes_count_alike(name: str) -> None:
    batch = {name: torch.zeros(4, 3)}
    share = share_of(batch, 1, 2)
    found, weight = with_a_label(batch, share, 2)
    assert found is share
    assert weight == 1.0


def test_a_batch_without_any_label_stays_no_number_in_every_share() -> None:
    batch = {"labels": torch.full((4, 3), -100)}
    for rank in range(2):
        share, weight = with_a_label(batch, share_of(batch, rank, 2), 2)
        assert weight == 0
        assert (share["labels"] == -100).all(), "as it is in one process"
