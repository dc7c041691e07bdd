"""`check` of a Run and of a factory that returns one, and the options of a recipe."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import normscope
from normscope import Run, UsageError
from normscope.anatomy import read_anatomy
from normscope.cli.main import run as command
from normscope.forecast import forecast
from normscope.schemas import schema
from normscope.subjects import load
from normscope.train import Recipe

SPEC = "nn:decoder,scheme=pre,depth=1,width=16,heads=2"
FAST: dict[str, Any] = {"budget": "fast", "steps": 3}


def loss_of(output: Any, batch: Any) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def batches() -> list[torch.Tensor]:
    return [torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(s)) for s in range(6)]


def a_run(lr: float = 1e-2, **given: Any) -> Run:
    model = load(SPEC).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return Run(model=model, batches=batches(), loss=loss_of, optimizer=optimizer, **given)


def test_a_run_is_checked_as_its_options_are() -> None:
    run = a_run(clip=0.5, accumulation=2, precision="bfloat16")
    before = copy.deepcopy(run.optimizer.state_dict()), [p.detach().clone() for p in run.model.parameters()]
    own = normscope.check(run, **FAST)
    options = normscope.check(
        a_run().model,
        batches(),
        loss_of,
        **FAST,
        lr=1e-2,
        beta2=0.95,
        weight_decay=0.1,
        clip=0.5,
        accumulation=2,
        precision="bfloat16",
    )
    assert own.forecast is not None
    assert options.forecast is not None
    assert own.forecast.curve == options.forecast.curve
    assert own.recipe is not None
    assert options.recipe is not None
    assert dict(own.recipe) == dict(options.recipe) | {"own": True}
    assert run.optimizer.state_dict() == before[0]
    assert all(torch.equal(p, old) for p, old in zip(run.model.parameters(), before[1], strict=True))
    jsonschema.validate(json.loads(own.to_json()), schema("report"))
    assert own.to_dict()["recipe"]["clip"] == 0.5


def test_the_schedule_of_a_run_is_stepped() -> None:
    run = a_run()
    run.scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda step: min(1.0, (step + 1) / 2))
    own, options = normscope.check(run, **FAST), normscope.check(a_run(), **FAST)
    assert own.forecast is not None
    assert options.forecast is not None
    assert own.forecast.warmup == 2
    assert own.forecast.curve != options.forecast.curve
    assert run.scheduler.last_epoch == 0


def test_a_rate_scales_a_run_and_a_ladder_takes_it() -> None:
    report = normscope.check(a_run(), lr=1e-3, forecast_rates=[1e-3, 1e-2], budget="fast")
    assert report.forecast is not None
    assert report.ladder is not None
    assert report.forecast.lr == 1e-3
    assert report.forecast.curve[-1].loss != normscope.check(a_run(), budget="fast").forecast.curve[-1].loss
    assert [rung.lr for rung in report.ladder.rungs] == [1e-3, 1e-2]
    assert report.recipe is not None
    assert report.recipe["optimizers"][0]["groups"][0]["lr"] == 1e-3


CONTRADICTIONS: dict[str, Any] = {
    "optimizer": "adam",
    "warmup": 5,
    "schedule": "cosine",
    "run_steps": 100,
    "weight_decay": 0.0,
    "eps": 1e-6,
    "beta1": 0.8,
    "beta2": 0.8,
    "clip": 1.0,
    "accumulation": 2,
    "precision": "bfloat16",
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_option_that_contradicts_a_run_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="together with a Run: expected the Run's own"):
        normscope.check(a_run(), **FAST, **{name: CONTRADICTIONS[name]})


def test_an_option_that_a_run_has_too_is_no_contradiction() -> None:
    normscope.check(a_run(clip=1.0), budget="fast", steps=0, clip=1.0)


def test_a_run_without_an_optimizer_takes_the_options_of_one() -> None:
    model = load(SPEC).model
    run = Run(model=model, batches=batches(), loss=loss_of, clip=0.5)
    report = normscope.check(run, **FAST, optimizer="adam", lr=1e-3)
    assert report.recipe is not None
    assert (report.recipe["own"], report.recipe["clip"]) == (False, 0.5)
    assert report.recipe["optimizers"][0]["name"] == "Adam"
    with pytest.raises(UsageError, match="the Run's own clip"):
        normscope.check(run, **FAST, clip=1.0)


def test_a_run_brings_its_batches() -> None:
    with pytest.raises(UsageError, match="either a Run, or a module"):
        normscope.check(a_run(), batches()[0])


def test_no_step_has_no_recipe() -> None:
    assert normscope.check(load(SPEC), budget="fast", steps=0).recipe is None
    frozen = load(SPEC)
    frozen.model.requires_grad_(False)
    assert normscope.check(frozen, **FAST).recipe is None


def test_the_options_of_a_recipe_reach_the_trial() -> None:
    given: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 1e-2,
        "warmup": 2,
        "schedule": "cosine",
        "run_steps": 4,
        "weight_decay": 0.2,
        "eps": 1e-6,
        "beta1": 0.8,
        "beta2": 0.9,
        "clip": 0.3,
        "accumulation": 2,
        "precision": "bfloat16",
    }
    subject = load(SPEC)
    seen = normscope.check(subject, **FAST, **given).forecast
    assert seen == forecast(subject, read_anatomy(subject), Recipe(steps=3, **given))
    for name, value in given.items():
        if name not in ("optimizer", "run_steps", "schedule"):
            other = {**given, name: 5 * value if not isinstance(value, str) else "float32"}
            other = {**other, name: 0.5} if name.startswith("beta") else other
            changed = normscope.check(subject, **FAST, **other).forecast
            assert changed is not None
            assert seen is not None
            assert changed.curve != seen.curve, name


def test_a_schedule_decays_within_the_trial_only_in_a_short_run() -> None:
    subject, plain = load(SPEC), {"lr": 1e-2, **FAST}
    constant = normscope.check(subject, **plain).forecast
    assert normscope.check(subject, **plain, schedule="cosine").forecast == constant
    assert normscope.check(subject, **plain, schedule="cosine", run_steps=4).forecast != constant
    hardly = normscope.check(subject, **plain, schedule="cosine", run_steps=100_000).forecast
    assert constant is not None
    assert hardly is not None
    assert hardly.curve[-1].loss == pytest.approx(constant.curve[-1].loss, abs=1e-5)


FACTORY = """
import torch
from normscope import Run, load

def build(depth=1):
    subject = load(f"nn:decoder,scheme=pre,depth={depth},width=16,heads=2")
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    batch = torch.randint(0, 256, (2, 16))
    return Run(model=subject.model, batches=batch, optimizer=optimizer, scheduler=scheduler, clip=1.0)
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_run.py").write_text(FACTORY)
    return "own_run.py:build"


def json_of(call: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert command(call) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_a_factory_may_return_a_run(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["check", factory, "--steps", "2", "--budget", "fast", "--format", "json"]
    data = json_of(call, capsys)
    assert data["recipe"]["own"]
    assert data["recipe"]["schedule"] == "StepLR"
    assert (data["forecast"]["optimizer"], data["forecast"]["lr"]) == ("SGD", 0.05)
    scaled = json_of([*call, "--lr", "0.01", "--seed", "3", "--forecast"], capsys)
    assert (scaled["forecast"]["lr"], scaled["seed"]) == (0.01, 3)
    assert 0.01 in [rung["lr"] for rung in scaled["ladder"]["rungs"]]
    around = json_of([*call, "--forecast"], capsys)
    assert 0.05 in [rung["lr"] for rung in around["ladder"]["rungs"]]
    assert command([*call[:-2]]) in (0, 1)
    assert "recipe  SGD, momentum 0.9: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--clip", "0.5"], "clip 0.5 together with a Run: expected the Run's own clip"),
        (["--optimizer", "adamw"], "optimizer 'adamw' together with a Run: expected the Run's own optimizer"),
        (["--warmup", "0"], "warmup 0 together with a Run: expected the Run's own scheduler"),
        (["--weight-decay", "0"], "weight decay 0.0 together with a Run: expected the Run's own optimizer"),
    ],
)
def test_options_on_the_command_line_contradict_a_run(
    factory: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["check", factory, *options]) == 2
    assert said in capsys.readouterr().err


def test_defaults_of_a_project_do_not_contradict_a_run(
    factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.normscope]\noptimizer = 'adam'\nlr = 0.5\nclip = 3.0\nsteps = 1\nbudget = 'fast'\n"
    )
    data = json_of(["check", factory, "--format", "json"], capsys)
    assert (data["forecast"]["optimizer"], data["forecast"]["lr"]) == ("SGD", 0.05)
    assert (data["forecast"]["steps"], data["recipe"]["clip"]) == (1, 1.0)


def test_states_follow_a_model_that_is_moved() -> None:
    run = a_run()
    loss_of(run.model(run.batches[0]), run.batches[0]).backward()
    run.optimizer.step()
    run.model.to(torch.float64)
    run.states_follow()
    kept = [value for state in run.optimizer.state.values() for value in state.values() if value.ndim]
    assert {value.dtype for value in kept} == {torch.float64}


STEPPED = """
import torch
from normscope import Run, load

def build():
    subject = load("nn:decoder,scheme=pre,depth=1,width=16,heads=2")
    optimizer = torch.optim.AdamW(subject.model.parameters())
    subject.loss().backward()
    optimizer.step()
    return Run(model=subject.model, batches=subject.batch, optimizer=optimizer)
"""


def test_a_factory_is_moved_with_its_states(tmp_path: Path) -> None:
    (tmp_path / "stepped.py").write_text(STEPPED)
    subject = load(f"{tmp_path / 'stepped.py'}:build", dtype=torch.float64)
    report = normscope.check(subject, **FAST)
    assert report.forecast is not None
    assert report.forecast.outcome != "not measured", report.forecast.reason
