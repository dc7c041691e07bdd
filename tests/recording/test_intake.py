"""Trainers become Runs: their own loader, loss, optimizer and schedule, and they stay as they were."""

import itertools
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import normscope
from normscope.errors import BatchesError, UsageError
from normscope.recording.intake import as_run
from normscope.recording.own_loop import run_of_loop
from normscope.subjects.feed import Replay

VOCABULARY, LENGTH = 48, 16
IDS = torch.randint(0, VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(3))


class Smoothed(Trainer):
    """A trainer with a loss of its own, which takes the labels out of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def trainer(folder: Path, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **still))
    data = [{"input_ids": row, "labels": row} for row in IDS]
    given = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 3, "max_steps": 12}
    given |= {"weight_decay": 0.1, "max_grad_norm": 0.5, "report_to": [], "save_strategy": "no"}
    given |= {"use_cpu": True, "disable_tqdm": True, "output_dir": str(folder)}
    args = TrainingArguments(**given | options)
    return kind(model=model, args=args, train_dataset=data)


@pytest.mark.parametrize(("kind", "parts"), [(Trainer, 1), (Smoothed, 1), (Trainer, 2)])
def test_trials_of_a_trainer_take_its_own_steps(kind: type[Trainer], parts: int, tmp_path: Path) -> None:
    given = trainer(tmp_path, kind, gradient_accumulation_steps=parts)
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    report = normscope.check(given, steps=5, budget="fast")
    assert given.optimizer is None
    assert given.lr_scheduler is None
    assert all(torch.equal(value, before[name]) for name, value in given.model.state_dict().items())
    curve = {step.step: step.train_loss for step in report.forecast.curve}
    own = trainer(tmp_path, kind, logging_steps=1, gradient_accumulation_steps=parts)
    own.train()
    logged = [entry["loss"] for entry in own.state.log_history if "loss" in entry]
    assert report.forecast.optimizer.startswith("AdamW")
    assert report.forecast.lr == pytest.approx(1e-2)
    for step in (2, 5):
        assert curve[step] == pytest.approx(logged[step - 1], rel=1e-4)


def test_the_run_of_a_trainer_has_its_settings(tmp_path: Path) -> None:
    run = as_run(trainer(tmp_path, gradient_accumulation_steps=2, bf16=True))
    assert (run.clip, run.precision, run.accumulation) == (0.5, "bfloat16", 2)
    assert [group["weight_decay"] for group in run.optimizers[0].param_groups] == [0.1, 0.0]
    assert len(run.schedulers) == 1
    first, second = itertools.islice(run.batches, 2)
    assert first["input_ids"].shape == (4, LENGTH)
    assert not torch.equal(first["input_ids"], second["input_ids"])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, VOCABULARY))

    def training_step(self, batch: Any, index: int) -> dict[str, torch.Tensor]:
        (ids,) = batch
        logits = self.net(ids[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneCycle(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByEpoch(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Data(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.data = TensorDataset(IDS)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)


@pytest.mark.parametrize(
    ("kind", "optimizer", "schedulers"), [(Module, "SGD", 0), (OneCycle, "AdamW", 1), (ByEpoch, "AdamW", 0)]
)
def test_the_run_of_a_lightning_module(kind: type[Module], optimizer: str, schedulers: int) -> None:
    module = kind()
    for data in (Data(), DataLoader(TensorDataset(IDS), batch_size=4)):
        run = as_run((module, data))
        assert run.model is module.net
        assert [type(each).__name__ for each in run.optimizers] == [optimizer]
        assert len(run.schedulers) == schedulers
        batch = next(iter(run.batches))
        loss = run.loss(run.model(IDS[:4, :-1]), batch)
        torch.testing.assert_close(loss, module.training_step((IDS[:4],), 0)["loss"])


def test_no_hook_is_left(tmp_path: Path) -> None:
    next(iter(as_run((Module(), Data())).batches))
    assert not nn.modules.module._has_any_global_hook()


def test_what_cannot_be_taken_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="manual optimisation"):
        as_run((Manual(), Data()))
    empty = trainer(tmp_path)
    empty.train_dataset = None
    with pytest.raises(UsageError, match="without train_dataset"):
        as_run(empty)
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="no batch"):
        run_of_loop([], lambda batch: model(batch).sum(), model, "a loop")
    with pytest.raises(UsageError, match="one forward"):
        run_of_loop([torch.ones(2)], lambda batch: model.weight.sum(), model, "a loop")
    assert as_run(model) is model


def test_an_error_of_the_model_is_not_blamed_on_the_batches() -> None:
    calls: list[None] = []

    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            if len(calls) == 3:
                raise ValueError("broken inside")
            return super().forward(x)

    model = Failing(2, 2)
    run = run_of_loop([torch.ones(2)] * 9, lambda batch: model(batch).sum(), model, "a loop")
    drawn = Replay(run.batches)()
    next(drawn)
    next(drawn)
    said = "the model or the loss of a loop, which raised ValueError: broken inside on batch 3: expected"
    with pytest.raises(BatchesError, match=said) as caught:
        next(drawn)
    assert "fix the model or the loss" in str(caught.value)
