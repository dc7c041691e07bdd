"""Clients of the monitor: Hugging Face's Trainer, TRL, Lightning, accelerate, trackers."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from normscope.errors import UsageError
from normscope.monitor import Monitor, Rescue, RunReader
from normscope.monitor.clients.jsonl import JsonLines
from normscope.subjects import call_model, load

VOCABULARY, LENGTH = 64, 12
ROWS = torch.randint(0, VOCABULARY, (96, LENGTH), generator=torch.Generator().manual_seed(1))


QUIET = pytest.mark.filterwarnings("ignore")  # these libraries advise on workers, GPUs and old options


def stored(path: Path, quantity: str, site: str = "") -> np.ndarray:
    with RunReader(path) as reader:
        return reader.series(quantity, site)[1]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 4 * LENGTH, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**size))


def logged_losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trainer_of(folder: Path, model: Any, *callbacks: Any, kind: Any = None, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_steps": 6,
        "max_grad_norm": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    arguments = TrainingArguments(**given | more)
    return (kind or Trainer)(model, arguments, train_dataset=rows, callbacks=list(callbacks))


def test_a_trainer_is_watched_and_trains_the_same(tmp_path: Path) -> None:
    from normscope.monitor.clients.huggingface import MonitorCallback

    path, ends = tmp_path / "run.db", []
    for watched in (False, True):
        model, callback = gpt2(), MonitorCallback(store=path, every=2)
        backward, clip = torch.autograd.backward, torch.nn.utils.clip_grad_norm_
        trainer = trainer_of(tmp_path, model, *[callback] * watched)
        trainer.train()
        ends.append((logged_losses(trainer), weights(model)))
        assert torch.autograd.backward is backward
        assert torch.nn.utils.clip_grad_norm_ is clip
    assert callback.monitor is not None
    assert callback.monitor.failure is None, callback.monitor.failure
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1]), "to the bit, dropout on"
    assert stored(path, "loss") == pytest.approx(ends[1][0], abs=1e-5)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert min(norms) > 0.1
    assert stored(path, "gradient/norm") == pytest.approx(norms, rel=1e-4), "before clipping"
    assert np.isfinite(stored(path, "stream/rms", "transformer.h.1")).all()
    with RunReader(path) as reader:
        assert [rank.state for rank in reader.ranks()] == ["ended"]


@QUIET
def test_a_trainer_that_compiles_is_watched_by_its_losses_and_gradients(tmp_path: Path) -> None:
    from normscope.monitor.clients.huggingface import MonitorCallback

    path, callback = tmp_path / "run.db", MonitorCallback(store=tmp_path / "run.db")
    trainer = trainer_of(
        tmp_path, gpt2(), callback, torch_compile=True, torch_compile_backend="eager", max_steps=2
    )
    trainer.train()
    assert callback.monitor is not None
    assert callback.monitor.failure is None, callback.monitor.failure
    assert "did not fire" in " ".join(callback.monitor.notes)
    assert stored(path, "loss") == pytest.approx(logged_losses(trainer), abs=1e-5)
    assert (stored(path, "gradient/norm") > 0.1).all()


def test_a_nan_that_a_trainer_hides_is_an_alarm_at_its_step(tmp_path: Path) -> None:
    from transformers import Trainer

    from normscope.monitor.clients.huggingface import MonitorCallback

    class Wrong(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (math.nan if self.state.global_step == 3 else 1.0)

    path, callback = tmp_path / "run.db", MonitorCallback(store=tmp_path / "run.db", on_alarm=lambda _: None)
    trainer = trainer_of(tmp_path, gpt2(), callback, kind=Wrong, max_steps=5, logging_steps=5)
    trainer.train()
    (logged,) = logged_losses(trainer)
    assert math.isfinite(logged), "the filter of the Trainer"
    assert np.isnan(stored(path, "loss")).tolist() == [False, False, False, True, True]
    assert callback.monitor is not None
    first = callback.monitor.alarms[0]
    assert (first.step, first.finding.name) == (4, "not-finite")


def test_a_trainer_is_rescued(tmp_path: Path) -> None:
    from transformers import Trainer

    from normscope.monitor.clients.huggingface import MonitorCallback

    class Wrong(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (math.nan if self.state.global_step == 3 else 1.0)

    path = tmp_path / "run.db"
    trainer = trainer_of(tmp_path, gpt2(), MonitorCallback(path, rescue=Rescue()), kind=Wrong)
    trainer.train()
    assert np.isnan(stored(path, "loss")).tolist() == [False, False, False, True, False, False]
    assert stored(path, "rescued").tolist() == [0, 0, 0, 1, 0, 0]


def test_a_training_that_raises_ends_its_run_for_that_error(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from normscope.monitor.clients.huggingface import MonitorCallback

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("out of disk")

    path, model, backward = tmp_path / "run.db", gpt2(), torch.autograd.backward
    with (
        pytest.raises(RuntimeError, match="out of disk"),
        MonitorCallback(store=path) as callback,
    ):
        trainer_of(tmp_path, model, callback, Fails()).train()
    assert torch.autograd.backward is backward
    with RunReader(path) as reader:
        (rank,) = reader.ranks()
        assert (rank.state, rank.reason) == ("failed", "RuntimeError: out of disk")
        assert reader.last_step == 2
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


AT_EXIT = """
import sys
from normscope.monitor.clients.watched import WatchedRun
import torch
model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
run = WatchedRun(store=sys.argv[1])
run.begin(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 0)
raise RuntimeError("out of disk")
"""


def test_a_run_is_ended_at_the_exit_of_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    subprocess.run([sys.executable, "-c", AT_EXIT, str(path)], capture_output=True, check=False)
    with RunReader(path) as reader:
        (rank,) = reader.ranks()
    assert (rank.state, rank.reason) == ("failed", "RuntimeError: out of disk")


def test_a_resumed_trainer_goes_on_in_its_store(tmp_path: Path) -> None:
    from normscope.monitor.clients.huggingface import MonitorCallback

    path = tmp_path / "run.db"
    for steps, resumed in ((4, None), (6, True)):
        trainer = trainer_of(
            tmp_path,
            gpt2(),
            MonitorCallback(store=path),
            max_steps=steps,
            save_strategy="steps",
            save_steps=3,
            lr_scheduler_type="constant",
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if resumed else None)
    with RunReader(path) as reader:
        assert reader.series("loss")[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert stored(path, "loss")[3:] == pytest.approx(logged_losses(trainer)[-3:], abs=1e-5)


def test_a_loss_that_is_not_seen_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from normscope.monitor.clients.watched import WatchedRun

    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = WatchedRun(store=tmp_path / "run.db")
    run.begin(model, [optimizer], 0)
    for _ in range(2):
        ids = torch.randint(0, 9, (2, 5))
        cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        run.step()
    run.end()
    assert caplog.text.count("logging_nan_inf_filter") == 1
    assert len(stored(tmp_path / "run.db", "gradient/norm")) == 2


def test_a_loss_that_a_scaler_has_scaled_is_undone(tmp_path: Path) -> None:
    from normscope.monitor.clients.watched import WatchedRun

    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = WatchedRun(store=tmp_path / "run.db")
    run.begin(model, [optimizer], 0)
    losses = []
    for fault in (1.0, math.inf, 1.0):
        ids = torch.randint(0, 9, (2, 5))
        loss = cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        losses.append(loss.item())
        scaled = scaler.scale(loss)
        run.differentiates(scaled, scaler)
        scaled.backward()
        model[1].weight.grad.mul_(fault)  # type: ignore[union-attr, operator]
        assert run.monitor is not None
        scaler.unscale_(optimizer)
        run.monitor.see_gradients()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.step()
    run.end()
    assert run.monitor.failure is None, run.monitor.failure
    assert stored(tmp_path / "run.db", "loss") == pytest.approx(losses, abs=1e-5)
    assert stored(tmp_path / "run.db", "skipped").tolist() == [0, 1, 0]
    assert stored(tmp_path / "run.db", "loss-scale").tolist() == [1024, 512, 512], "after each step"
    assert not run.monitor.alarms, "a step that a scaler skips is how it finds its scale"
    with RunReader(tmp_path / "run.db") as reader:
        assert not reader.events("first-wrong-value")


@QUIET
def test_trl_is_watched_by_the_same_callback(tmp_path: Path) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from normscope.monitor.clients.huggingface import MonitorCallback

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2", unk_token="0")
    texts = [" ".join(map(str, row)) for row in ROWS.tolist()]
    path = tmp_path / "run.db"
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=True,
        disable_tqdm=True,
        max_length=LENGTH,
    )
    callback = MonitorCallback(store=path)
    trainer = SFTTrainer(
        gpt2(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()
    assert callback.monitor is not None
    assert callback.monitor.failure is None, callback.monitor.failure
    assert stored(path, "loss") == pytest.approx(logged_losses(trainer), abs=1e-4), "TRL rounds"


SPEC = f"nn:decoder,scheme=pre,depth=2,width=32,heads=2,vocab={VOCABULARY}"


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())


def lightning_run(folder: Path, *callbacks: Any, wrong_at: int = -1, **more: Any) -> Any:
    """The LightningModule after `fit`, with the losses of its steps."""
    import lightning

    class LanguageModel(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = load(SPEC).model
            self.parts: list[float] = []
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = next_token_loss(self.model, batch[0])
            if self.global_step == wrong_at:
                loss = loss * math.nan
            self.parts.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.losses.append(sum(self.parts) / len(self.parts))
            self.parts = []

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    given = {"max_steps": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    trainer = lightning.Trainer(
        **given | more,
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = LanguageModel()
    trainer.fit(model, DataLoader(TensorDataset(ROWS), batch_size=4))
    return model


@QUIET
@pytest.mark.parametrize("module", [None, "model"])
def test_lightning_is_watched_and_trains_the_same(module: str | None, tmp_path: Path) -> None:
    from normscope.monitor.clients.lightning import MonitorCallback

    path, callback = tmp_path / "run.db", MonitorCallback(store=tmp_path / "run.db", module=module)
    plain, watched = lightning_run(tmp_path), lightning_run(tmp_path, callback)
    assert callback.monitor is not None
    assert callback.monitor.failure is None, callback.monitor.failure
    assert plain.losses == watched.losses
    assert same(weights(plain), weights(watched))
    assert stored(path, "loss") == pytest.approx(watched.losses, abs=1e-5)
    assert (stored(path, "gradient/norm") > 0.2).all(), "before clipping"
    assert np.isfinite(stored(path, "stream/rms", "blocks.1")).all()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    with RunReader(path) as reader:
        assert [rank.state for rank in reader.ranks()] == ["ended"]


def fit_by_hand(folder: Path, callback: Any, *, is_split: bool) -> Any:
    """A LightningModule that optimizes by hand; `is_split` calls a small and a large module itself."""
    import lightning

    class ByHand(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.model = nn.Linear(2, 2), load(SPEC).model

        def forward(self, ids: Tensor) -> Tensor:
            return self.first(torch.ones(2)).mean() + next_token_loss(self.model, ids)

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.forward(*batch) if is_split else self(*batch))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", callbacks=[callback], default_root_dir=folder, logger=False, **quiet
    )
    model = ByHand()
    trainer.fit(model, DataLoader(TensorDataset(ROWS), batch_size=4))
    return model


@QUIET
@pytest.mark.parametrize("is_split", [False, True])
def test_lightning_by_hand_is_watched_from_its_first_forward(is_split: bool, tmp_path: Path) -> None:
    from normscope.monitor.clients.lightning import MonitorCallback

    callback = MonitorCallback(store=tmp_path / "run.db")
    model = fit_by_hand(tmp_path, callback, is_split=is_split)
    assert callback.monitor is not None
    assert callback.monitor.failure is None, callback.monitor.failure
    with RunReader(tmp_path / "run.db") as reader:
        assert reader.notes()["model"] == type(model.model if is_split else model).__name__
        assert reader.series("loss")[0].tolist() == [1, 2, 3]
    assert np.isfinite(stored(tmp_path / "run.db", "loss")).all()


@QUIET
def test_a_nan_in_lightning_is_an_alarm_at_its_step(tmp_path: Path) -> None:
    from normscope.monitor.clients.lightning import MonitorCallback

    callback = MonitorCallback(store=tmp_path / "run.db", on_alarm=lambda _: None)
    lightning_run(tmp_path, callback, wrong_at=2)
    assert callback.monitor is not None
    first = callback.monitor.alarms[0]
    assert (first.step, first.finding.name) == (3, "not-finite")


@QUIET
def test_lightning_is_rescued(tmp_path: Path) -> None:
    from normscope.monitor.clients.lightning import MonitorCallback

    path = tmp_path / "run.db"
    lightning_run(tmp_path, MonitorCallback(store=path, rescue=Rescue()), wrong_at=2)
    assert np.isnan(stored(path, "loss")).tolist() == [False, False, True, False]
    assert stored(path, "rescued").tolist() == [0, 0, 1, 0]


@QUIET
def test_an_error_in_lightning_ends_the_run_for_it(tmp_path: Path) -> None:
    import lightning

    from normscope.monitor.clients.lightning import MonitorCallback

    class Fails(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step == 2:
                raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        lightning_run(tmp_path, MonitorCallback(store=tmp_path / "run.db"), Fails())
    with RunReader(tmp_path / "run.db") as reader:
        (rank,) = reader.ranks()
        assert (rank.state, rank.reason) == ("failed", "RuntimeError: out of disk")


@QUIET
def test_a_wrong_path_of_a_lightning_module_is_said(tmp_path: Path) -> None:
    from normscope.monitor.clients.lightning import MonitorCallback

    with pytest.raises(UsageError, match=r'module="modle".*one of model'):
        lightning_run(tmp_path, MonitorCallback(module="modle"))


def accelerate_run(path: Path | None, **options: Any) -> tuple[list[float], list[Tensor], Monitor | None]:
    """The loop of accelerate's examples, with accumulation and clipping."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = load(SPEC).model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(ROWS), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = None if path is None else Monitor(model, optimizer, store=path, **options).__enter__()
    losses: list[float] = []
    parts: list[Tensor] = []
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = next_token_loss(model, ids)
            parts.append(loss.detach())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if monitor is not None:
                    monitor.see_gradients()
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            mean, parts = torch.stack(parts).mean(), []
            losses.append(float(mean))
            if monitor is not None:
                monitor.step(mean)
    if monitor is not None:
        monitor.__exit__(None, None, None)
    return losses, weights(model), monitor


def test_a_loop_of_accelerate_is_watched_and_trains_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    plain, watched = accelerate_run(None), accelerate_run(path)
    assert watched[2] is not None
    assert watched[2].failure is None, watched[2].failure
    assert not any("optimizer" in note for note in watched[2].notes), watched[2].notes
    assert plain[0] == watched[0]
    assert same(plain[1], watched[1])
    assert stored(path, "loss") == pytest.approx(watched[0], abs=1e-5)
    assert (stored(path, "gradient/norm") > 0.2).all(), "before clipping"
    assert (stored(path, "update/ratio", "attention") > 0).all()
    assert stored(path, "adam/lag", "attention")[0] == pytest.approx(1, rel=1e-3), "Adam got the clipped ones"
    assert not stored(path, "skipped").any()


def test_an_optimizer_with_a_closure_is_watched(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    subject = load(SPEC)
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.1)
    twin = copy.deepcopy(subject.model)
    batch = next(subject.batches())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = subject.loss(batch)
        loss.backward()
        return loss

    with Monitor(subject.model, optimizer, store=path) as monitor:
        monitor.step(optimizer.step(closure))
    assert monitor.failure is None, monitor.failure
    subject.loss_fn(call_model(twin, batch), batch).backward()
    whole = math.sqrt(sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None))
    assert stored(path, "gradient/norm") == pytest.approx([whole], rel=1e-4)


# Trackers.


class Kept:
    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.steps[step] = dict(values)


class LikeMlflow(Kept):
    log = None  # type: ignore[assignment]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self.steps[step] = dict(metrics)


class LikeSummaryWriter(Kept):
    log = None  # type: ignore[assignment]

    def add_scalar(self, tag: str, value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.steps.setdefault(global_step, {})[tag] = value


class Broken(Kept):
    def log(self, values: Mapping[str, float], step: int) -> None:
        super().log(values, step)
        if step == 2:
            raise ConnectionError("no route to the server")


def small_run(steps: Iterator[Callable[[Tensor], Tensor | None]], **options: Any) -> Monitor:
    subject = load(SPEC)
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.1)
    batch = next(subject.batches())
    with Monitor(subject.model, optimizer, on_alarm=lambda _: None, **options) as monitor:
        for given in steps:
            loss = subject.loss(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(given(loss))
    assert monitor.failure is None, monitor.failure
    return monitor


@pytest.mark.parametrize("kind", [Kept, LikeMlflow, LikeSummaryWriter])
def test_a_tracker_gets_the_figures_of_the_store(kind: type[Kept], tmp_path: Path) -> None:
    path, tracker = tmp_path / "run.db", kind()
    small_run(iter([lambda x: x] * 4), store=path, trackers=[tracker], every=3)
    assert list(tracker.steps) == [1, 2, 3, 4]
    for name in ("loss", "gradient/norm", "lr", "seconds", "tokens"):
        assert [values[name] for values in tracker.steps.values()] == stored(path, name).tolist(), name
    assert "stream/rms/blocks.1" not in tracker.steps[2]
    assert tracker.steps[3]["stream/rms/blocks.1"] == stored(path, "stream/rms", "blocks.1")[2]
    assert tracker.steps[3]["stream/max/blocks.1"] == stored(path, "stream/max", "blocks.1")[-1]
    assert all(type(value) is float for values in tracker.steps.values() for value in values.values())


def test_a_nan_is_passed_on_and_a_loss_that_was_not_given_is_not(tmp_path: Path) -> None:
    tracker, lines = Kept(), JsonLines(tmp_path / "run.jsonl")
    losses = [lambda x: x, lambda x: None, lambda x: x * math.nan, lambda x: x * math.inf]
    small_run(iter(losses), trackers=[tracker, lines])
    assert math.isfinite(tracker.steps[1]["loss"])
    assert "loss" not in tracker.steps[2]
    assert math.isnan(tracker.steps[3]["loss"])
    assert tracker.steps[4]["loss"] == math.inf
    written = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [line["step"] for line in written] == [1, 2, 3, 4]
    assert [line.get("loss") for line in written] == [tracker.steps[1]["loss"], None, "nan", "inf"]
    assert math.isnan(float(written[2]["loss"]))


def test_a_tracker_that_raises_is_dropped_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    good, broken = Kept(), Broken()
    monitor = small_run(iter([lambda x: x] * 4), trackers=[broken, good])
    assert list(good.steps) == [1, 2, 3, 4]
    assert list(broken.steps) == [1, 2]
    assert caplog.text.count("Broken gets no more figures: ConnectionError: no route to the server") == 1
    assert monitor.failure is None


def test_a_tracker_of_accelerate_gets_the_figures(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

    kept = Kept()

    class Own(GeneralTracker):
        name = "own"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()

        @property
        def tracker(self) -> Kept:
            return kept

        def store_init_configuration(self, values: Any) -> None: ...

        @on_main_process
        def log(self, values: Mapping[str, float], step: int | None = None, **more: Any) -> None:
            assert step is not None
            kept.log(values, step)

    accelerator = Accelerator(cpu=True, log_with=Own())
    accelerator.init_trackers("a run")
    small_run(iter([lambda x: x] * 2), trackers=accelerator.trackers)
    assert list(kept.steps) == [1, 2]
    small_run(iter([lambda x: x] * 3), trackers=[accelerator])
    assert list(kept.steps) == [1, 2, 3]


def test_an_object_that_is_no_tracker_is_a_usage_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="a tracker of type object"):
        Monitor(model, optimizer, trackers=[object()])
    with pytest.raises(UsageError, match="No such file"):
        JsonLines(tmp_path / "nowhere" / "run.jsonl")
