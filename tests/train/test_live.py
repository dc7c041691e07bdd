"""Trials with a user's own optimizers, against the user's own loop with the original objects."""

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from normscope import Run
from normscope.errors import UsageError
from normscope.train import (
    CopyError,
    LiveOptimizers,
    LoneTrials,
    Recipe,
    Trial,
    build_optimizers,
    many_trials,
    why_not_stackable,
    working_copy,
)
from tests.train.optimizers import Lion, Plain, ScheduleFreeSGD, ShampooLike, every_optimizer

BATCHES = [torch.randn(6, 3, generator=torch.Generator().manual_seed(s)) for s in range(20)]
BEFORE, STEPS = 2, 5


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))


def all_alike(model: nn.Module) -> Any:
    return list(model.parameters())


def two_groups(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def lambda_lr(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def one_cycle(optimizer: Any) -> Any:
    cycled = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=9, cycle_momentum=cycled)


SETTINGS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any] | None]] = {
    "no scheduler": (all_alike, None),
    "LambdaLR": (all_alike, lambda_lr),
    "OneCycleLR": (all_alike, one_cycle),
    "two groups": (two_groups, None),
}


@dataclasses.dataclass
class Setup:
    """A run as a script builds it, and its loop."""

    make: Callable[[Any], Any]
    setting: str = "no scheduler"
    model: nn.Module = dataclasses.field(default_factory=small)
    taken: int = 0

    def __post_init__(self) -> None:
        groups, schedule = SETTINGS[self.setting]
        made = self.make(groups(self.model))
        self.optimizers = made if isinstance(made, list) else [made]
        self.schedulers = [] if schedule is None else [schedule(o) for o in self.optimizers]

    @property
    def run(self) -> Run:
        return Run(
            model=self.model, batches=BATCHES, optimizer=self.optimizers, scheduler=self.schedulers, loss=None
        )

    def steps(self, num: int) -> list[float]:
        losses = []
        for optimizer in self.optimizers:
            getattr(optimizer, "train", lambda: None)()
        for batch in BATCHES[self.taken : self.taken + num]:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = squared(self.model, batch)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
            losses.append(loss.item())
        self.taken += num
        return losses

    def trial(self, model: nn.Module, recipe: Recipe | None = None) -> Trial:
        return Trial(model, iter(BATCHES[self.taken :]), squared, recipe or Recipe.of(self.run))


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def plain(value: Any) -> Any:
    """Tensors and containers in a form that `==` compares."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(id(k) if isinstance(k, Tensor) else k, plain(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return id(value) if callable(value) or hasattr(value, "__dict__") else value


MADE = every_optimizer()
CASES = [
    (name, setting)
    for name, setting in itertools.product(MADE, SETTINGS)
    if not (name == "Plain" and SETTINGS[setting][1] is not None)  # torch's schedulers refuse it
]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_trial_of_copies_takes_the_steps_of_the_original_objects(name: str, setting: str) -> None:
    theirs, ours = Setup(MADE[name], setting), Setup(MADE[name], setting)
    assert theirs.steps(BEFORE) == ours.steps(BEFORE)
    everything = [*ours.optimizers, *ours.schedulers]
    states, start = [plain(vars(each)) for each in everything], weights(ours.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with working_copy(ours.model) as twin:
            trial = ours.trial(twin)
            losses = [trial.advance() for _ in range(STEPS)]
    assert losses == theirs.steps(STEPS)
    assert equal(weights(twin), weights(theirs.model))
    assert [plain(vars(each)) for each in everything] == states
    assert equal(weights(ours.model), start)
    assert {id(p) for o in trial.optimizers for g in o.param_groups for p in g["params"]} == {
        id(p) for p in twin.parameters()
    }


def test_several_optimizers_step_in_their_order() -> None:
    def pair(model: nn.Module) -> list[Any]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.02)]

    theirs, ours = (Setup(lambda _: []) for _ in range(2))
    for setup in (theirs, ours):
        setup.optimizers = pair(setup.model)
        setup.schedulers = [lambda_lr(o) for o in setup.optimizers]
    recipe = Recipe.of(ours.run)
    assert (recipe.optimizer_name, recipe.lr, recipe.warmup) == ("Muon + AdamW", 0.02, 4)
    twin = copy.deepcopy(ours.model)
    trial = ours.trial(twin)
    assert [trial.advance() for _ in range(STEPS)] == theirs.steps(STEPS)
    assert equal(weights(twin), weights(theirs.model))


def test_a_first_step_of_copies_warns_of_nothing() -> None:
    """A scheduler complains at its first step about an optimizer whose `step` it has not marked."""
    setup = Setup(MADE["AdamW"], "LambdaLR")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setup.trial(copy.deepcopy(setup.model)).advance()


def test_a_plateau_scheduler_is_given_the_loss() -> None:
    def plateau(optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.0)

    setup = Setup(MADE["SGD"])
    setup.schedulers = [plateau(o) for o in setup.optimizers]
    twin, scale = copy.deepcopy(setup.model), iter([1.0, 1.0, 1.0, 2.0])
    trial = Trial(
        twin, itertools.repeat(BATCHES[0]), lambda m, b: next(scale) * squared(m, b), Recipe.of(setup.run)
    )
    rates = [trial.advance() and trial.optimizers[0].param_groups[0]["lr"] for _ in range(4)]
    assert rates == [1e-2, 1e-2, 1e-2, pytest.approx(1e-3)], "it falls where the loss has risen"
    assert setup.optimizers[0].param_groups[0]["lr"] == 1e-2


def test_schedulers_within_schedulers_are_copied() -> None:
    def sequence(optimizer: Any) -> Any:
        parts = [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, 0.5),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    theirs, ours = Setup(MADE["AdamW"]), Setup(MADE["AdamW"])
    for setup in (theirs, ours):
        setup.schedulers = [sequence(o) for o in setup.optimizers]
    assert Recipe.of(ours.run).warmup == 3
    trial = ours.trial(copy.deepcopy(ours.model))
    assert [trial.advance() for _ in range(STEPS)] == theirs.steps(STEPS)


class Trainer:
    """Holds what cannot be copied, as a user's trainer does."""

    def __init__(self) -> None:
        self.stream: Iterator[int] = (i for i in range(3))

    def factor(self, step: int) -> float:
        return 1 / (1 + step)


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial], ids=["method", "partial"])
def test_a_schedule_that_is_a_method_keeps_its_object(wrap: Any) -> None:
    trainer = Trainer()
    setup = Setup(MADE["SGD"])
    setup.schedulers = [lr_scheduler.LambdaLR(setup.optimizers[0], wrap(trainer.factor))]
    trial = setup.trial(copy.deepcopy(setup.model))
    trial.advance()
    assert trial.optimizers[0].param_groups[0]["lr"] == 1e-2 / 2


def test_hooks_and_replaced_methods_stay_with_the_original() -> None:
    called: list[str] = []
    setup = Setup(MADE["AdamW"])
    (optimizer,) = setup.optimizers
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    own_step = optimizer.step
    optimizer.step = lambda *_: called.append("step") or own_step()
    before = weights(setup.model)
    twin = copy.deepcopy(setup.model)
    setup.trial(twin).advance()
    assert called == []
    assert not equal(weights(twin), before)
    assert optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("setting", SETTINGS)
def test_another_rate_scales_every_group_at_every_step(setting: str) -> None:
    def two_rates(groups: Any) -> Any:
        groups = groups if isinstance(groups[0], dict) else [{"params": groups[:2]}, {"params": groups[2:]}]
        groups[1]["lr"] = 2e-3
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)

    setup = Setup(two_rates, setting)
    recipe = Recipe.of(setup.run)
    assert recipe.lr == (0.02 if setting == "OneCycleLR" else 1e-2)
    seen: dict[float, list[list[float]]] = {}
    for scale in (1.0, 0.5):
        rows = seen[scale] = []
        trial = setup.trial(copy.deepcopy(setup.model), dataclasses.replace(recipe, lr=recipe.lr * scale))
        (optimizer,) = trial.optimizers
        optimizer.register_step_pre_hook(
            lambda o, *_, rows=rows: rows.append([float(g["lr"]) for g in o.param_groups])
        )
        for _ in range(STEPS):
            trial.advance()
    assert seen[0.5] == [[0.5 * rate for rate in row] for row in seen[1.0]]
    assert len(seen[0.5]) == STEPS


def test_a_rate_that_the_optimizer_changes_itself_is_scaled_too() -> None:
    setup = Setup(MADE["OwnRate"])
    recipe = Recipe.of(setup.run)
    trial = setup.trial(copy.deepcopy(setup.model), dataclasses.replace(recipe, lr=recipe.lr / 2))
    for _ in range(3):
        trial.advance()
    assert trial.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**3)


def test_an_optimizer_without_a_rate_can_be_stepped() -> None:
    setup = Setup(lambda groups: Plain(groups, lr=0.0))
    recipe = Recipe.of(setup.run)
    assert recipe.lr == 1.0
    setup.trial(copy.deepcopy(setup.model), recipe).advance()

    class Without(Plain):
        def step(self) -> None:
            assert "lr" not in self.param_groups[0]

    setup = Setup(Without)
    del setup.optimizers[0].param_groups[0]["lr"]
    setup.trial(copy.deepcopy(setup.model)).advance()


def test_a_recorded_schedule_is_replayed_and_kept_after_its_end() -> None:
    setup = Setup(MADE["SGD"], "two groups")
    rows = ((0.001, 0.002), (0.003, 0.004))
    live = LiveOptimizers(setup.model, tuple(setup.optimizers), rates=rows)
    assert (live.lr, live.full_rates) == (1e-2, (1e-2, 1e-2))
    recipe = Recipe(optimizer=live, lr=live.lr, schedule="own")
    trial = setup.trial(copy.deepcopy(setup.model), recipe)
    seen: list[list[float]] = []
    trial.optimizers[0].register_step_pre_hook(lambda o, *_: seen.append([g["lr"] for g in o.param_groups]))
    for _ in range(3):
        trial.advance()
    assert seen == [[0.001, 0.002], [0.003, 0.004], [0.003, 0.004]]


@pytest.mark.parametrize(
    ("rows", "full", "warmup"),
    [
        ([0.01] * 3, 0.01, 0),
        ([0.005, 0.01, 0.01], 0.01, 2),
        ([0.01 * (n + 1) / 100 for n in range(20)], 0.01, 100),  # the warm-up outlasts the record
        ([0.02, 0.01], 0.02, 0),
    ],
)
def test_the_warmup_of_a_record_is_found(rows: list[float], full: float, warmup: int) -> None:
    setup = Setup(MADE["SGD"])
    live = LiveOptimizers(setup.model, tuple(setup.optimizers), rates=tuple((row,) for row in rows))
    assert (live.lr, live.warmup) == (full, warmup)


@pytest.mark.parametrize(
    ("schedule", "lr", "warmup"),
    [
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1, step / 50)), 1e-2, 51),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1, step / 20)), 1e-2, 21),  # as transformers'
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / 20)), 1e-2, 20),
        (lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3), 1e-2, 4),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), 1e-2, 0),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20, pct_start=0.25), 0.3, 5),
        (lambda o: lr_scheduler.StepLR(o, 3), 1e-2, 0),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.1), 1e-2, 0),
    ],
)
def test_the_full_rate_and_the_warmup_of_a_scheduler_are_found(
    schedule: Callable[[Any], Any], lr: float, warmup: int
) -> None:
    setup = Setup(MADE["AdamW"])
    setup.schedulers = [schedule(setup.optimizers[0])]
    counted = setup.schedulers[0].last_epoch
    recipe = Recipe.of(setup.run)
    assert (recipe.lr, recipe.warmup, recipe.schedule) == (pytest.approx(lr), warmup, "own")
    assert setup.schedulers[0].last_epoch == counted


@pytest.mark.parametrize(
    ("schedule", "decays"),
    [
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / 20)), False),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1), False),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 30_000), True),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), True),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20), True),
    ],
)
def test_a_schedule_that_falls_after_its_largest_rate_decays(
    schedule: Callable[[Any], Any], decays: bool
) -> None:
    setup = Setup(MADE["AdamW"])
    assert not Recipe.of(setup.run).decays
    setup.schedulers = [schedule(setup.optimizers[0])]
    assert Recipe.of(setup.run).decays == decays
    assert Recipe(schedule="cosine").decays
    assert not Recipe().decays


def test_another_warmup_replaces_the_own_schedule() -> None:
    setup = Setup(MADE["SGD"], "LambdaLR")
    recipe = Recipe.of(setup.run)
    assert recipe.with_warmup(4) is recipe
    trial = setup.trial(copy.deepcopy(setup.model), recipe.with_warmup(0))
    seen: list[float] = []
    trial.optimizers[0].register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    trial.advance()
    assert seen == [1e-2]


def test_a_trial_of_its_first_steps_keeps_the_own_schedule() -> None:
    recipe = Recipe.of(Setup(MADE["SGD"], "OneCycleLR").run)
    assert recipe.at_start() is recipe
    assert Recipe(schedule="cosine").at_start() == Recipe()


def test_another_eps_reaches_groups_with_betas_only() -> None:
    setup = Setup(MADE["AdamW"])
    recipe = Recipe.of(setup.run)
    assert (recipe.adam_eps, Recipe(optimizer="sgd").adam_eps, Recipe().adam_eps) == (1e-8, None, 1e-8)
    changed = dataclasses.replace(recipe, eps=1e-5)
    assert changed.adam_eps == 1e-5
    trial = setup.trial(copy.deepcopy(setup.model), changed)
    assert trial.optimizers[0].param_groups[0]["eps"] == 1e-5
    assert setup.optimizers[0].param_groups[0]["eps"] == 1e-8
    for name in ("RMSprop", "Lion"):
        other = Setup(MADE[name])
        assert Recipe.of(other.run).adam_eps is None
        trial = other.trial(copy.deepcopy(other.model), dataclasses.replace(Recipe.of(other.run), eps=0.1))
        assert trial.optimizers[0].param_groups[0].get("eps") in (None, 1e-8)


class TestChangedModels:
    """Copies that a remedy has changed."""

    def made(self, change: Callable[[nn.Sequential], None]) -> tuple[Setup, nn.Sequential, Any]:
        setup = Setup(MADE["AdamW"], "two groups")
        setup.steps(BEFORE)
        twin = copy.deepcopy(setup.model)
        change(twin)  # type: ignore[arg-type]
        (optimizer,) = Recipe.of(setup.run).optimizer.build(twin).optimizers  # type: ignore[union-attr]
        return setup, twin, optimizer  # type: ignore[return-value]

    def test_new_parameters_join_the_group_of_their_kind(self) -> None:
        def change(model: nn.Sequential) -> None:
            model.append(nn.Linear(3, 3))

        _, twin, optimizer = self.made(change)
        matrices, vectors = (group["params"] for group in optimizer.param_groups)
        assert [p is twin[4].weight for p in matrices] == [False, False, True]
        assert sum(p is twin[4].bias for p in vectors) == 1
        assert all(p is not twin[4].weight for p in vectors)

    def test_parameters_that_are_gone_leave_their_group_and_state(self) -> None:
        def change(model: nn.Sequential) -> None:
            model[1] = nn.Identity()

        _, twin, optimizer = self.made(change)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in twin.parameters()}
        assert set(map(id, optimizer.state)) == set(map(id, held))

    def test_a_state_of_another_shape_starts_anew(self) -> None:
        def change(model: nn.Sequential) -> None:
            model[3] = nn.Linear(4, 5)

        _, twin, optimizer = self.made(change)
        assert twin[3].weight not in optimizer.state
        assert twin[0].weight in optimizer.state
        assert sum(p is twin[3].weight for p in optimizer.param_groups[0]["params"]) == 1

    def test_a_parameter_that_nothing_holds_stays_out(self) -> None:
        setup = Setup(lambda groups: torch.optim.SGD(groups[:-1], lr=0.1))
        twin = copy.deepcopy(setup.model)
        trial = setup.trial(twin)
        trial.advance()
        assert torch.equal(twin[3].bias, setup.model[3].bias)  # type: ignore[index]
        assert not torch.equal(twin[3].weight, setup.model[3].weight)  # type: ignore[index]

    def test_a_weight_that_is_no_longer_tied_is_stepped(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        live = LiveOptimizers(model, (torch.optim.SGD(model.parameters(), lr=0.1),))
        twin = copy.deepcopy(model)
        twin[1].weight = nn.Parameter(twin[0].weight.detach().clone())
        (optimizer,) = live.build(twin).optimizers
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in twin.parameters()]


def test_the_source_itself_can_be_trained() -> None:
    theirs, ours = Setup(MADE["ShampooLike"], "LambdaLR"), Setup(MADE["ShampooLike"], "LambdaLR")
    trial = ours.trial(ours.model)
    assert [trial.advance() for _ in range(STEPS)] == theirs.steps(STEPS)
    assert ours.optimizers[0].count == 0


def test_parameters_outside_the_model_are_cloned() -> None:
    extra = nn.Parameter(torch.ones(2))
    setup = Setup(lambda groups: torch.optim.SGD([*groups, extra], lr=0.1))
    (optimizer,) = setup.trial(copy.deepcopy(setup.model)).optimizers
    last = optimizer.param_groups[0]["params"][-1]
    assert last is not extra
    assert torch.equal(last, extra)


def test_an_optimizer_that_holds_the_model_gets_the_other_one() -> None:
    setup = Setup(MADE["SGD"])
    setup.model.register_buffer("scale", torch.ones(1))
    optimizer = setup.optimizers[0]
    optimizer.model, optimizer.layers = setup.model, [setup.model[0]]  # type: ignore[index]
    optimizer.scale = setup.model.scale
    twin = copy.deepcopy(setup.model)
    (made,) = LiveOptimizers(setup.model, (optimizer,)).build(twin).optimizers
    assert (made.model, made.layers) == (twin, [twin[0]])  # type: ignore[index]
    assert made.scale is twin.scale


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_keep_the_names() -> None:
    setup = Setup(MADE["AdamW"])
    compiled = torch.compile(setup.model)  # compiles at the first call, which does not come
    live = LiveOptimizers(compiled, tuple(setup.optimizers))  # type: ignore[arg-type]
    twin = copy.deepcopy(setup.model)
    (optimizer,) = live.build(twin).optimizers
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in twin.parameters()}


def test_a_schedule_free_optimizer_is_set_to_training() -> None:
    setup = Setup(ScheduleFreeSGD)
    setup.trial(copy.deepcopy(setup.model)).advance()
    assert setup.optimizers[0].param_groups[0]["train_mode"] is False


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # the scaler skips the first step
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_precision_clipping_and_accumulation_are_those_of_the_run(precision: str) -> None:
    setups = [Setup(MADE["AdamW"], "LambdaLR") for _ in range(2)]
    theirs, ours = setups
    run = dataclasses.replace(ours.run, precision=precision, clip=0.1, accumulation=2)
    recipe = Recipe.of(run, steps=7)
    assert (recipe.clip, recipe.accumulation, recipe.precision, recipe.steps) == (0.1, 2, precision, 7)
    twin = copy.deepcopy(ours.model)
    trial = ours.trial(twin, recipe)
    losses = [trial.advance() for _ in range(3)]
    (optimizer,), (scheduler,) = theirs.optimizers, theirs.schedulers
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    feed, expected = iter(BATCHES), []
    for _ in range(3):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(2):
            with torch.autocast("cpu", getattr(torch, precision)):
                loss = squared(theirs.model, next(feed))
            total += loss.item() / 2
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        expected.append(total)
    assert losses == pytest.approx(expected, rel=1e-7)
    assert equal(weights(twin), weights(theirs.model))


def test_live_optimizers_are_not_stacked() -> None:
    setup = Setup(MADE["AdamW"])
    recipe = Recipe.of(setup.run)
    models = [copy.deepcopy(setup.model) for _ in range(2)]
    configs = [recipe, dataclasses.replace(recipe, lr=0.1)]
    trials = many_trials(models, [iter(BATCHES), iter(BATCHES)], squared, configs)
    assert isinstance(trials, LoneTrials)
    assert why_not_stackable(models[0], BATCHES[0], squared, recipe) == "live optimizers step one model each"
    trials.advance()
    assert not equal(weights(models[0]), weights(models[1]))


def test_build_optimizers_gives_the_copies() -> None:
    setup = Setup(MADE["Lion"])
    twin = copy.deepcopy(setup.model)
    (optimizer,) = build_optimizers(twin, Recipe.of(setup.run))
    assert type(optimizer) is Lion
    assert optimizer.param_groups[0]["params"][0] is twin[0].weight  # type: ignore[index]


def test_a_finished_trial_leaves_no_state_behind() -> None:
    """Its memory is free at once: a trial of a large model follows another."""
    setup = Setup(MADE["AdamW"], "LambdaLR")
    trial = setup.trial(copy.deepcopy(setup.model))
    trial.advance()
    gone = weakref.ref(trial.optimizers[0])
    gc.disable()
    try:
        del trial
        assert gone() is None
    finally:
        gc.enable()


class TestRefusals:
    def test_no_optimizer(self) -> None:
        with pytest.raises(UsageError, match="no optimizer"):
            LiveOptimizers(small(), ())

    def test_without_one_the_recipe_is_of_options(self) -> None:
        run = Run(model=small(), batches=BATCHES, clip=2.0)
        assert Recipe.of(run, lr=0.1) == Recipe(lr=0.1, clip=2.0)

    def test_not_an_optimizer(self) -> None:
        with pytest.raises(UsageError, match="type Linear, without param_groups"):
            LiveOptimizers(small(), (nn.Linear(2, 2),))

    def test_a_scheduler_of_another_optimizer(self) -> None:
        one, other = Setup(MADE["SGD"]), Setup(MADE["SGD"], "LambdaLR")
        with pytest.raises(UsageError, match="of another optimizer"):
            LiveOptimizers(one.model, tuple(one.optimizers), tuple(other.schedulers))

    def test_a_row_of_the_wrong_length(self) -> None:
        setup = Setup(MADE["SGD"])
        with pytest.raises(UsageError, match="2 learning rates for 1 parameter groups"):
            LiveOptimizers(setup.model, tuple(setup.optimizers), rates=((0.1, 0.2),))

    def test_an_attribute_that_cannot_be_copied(self) -> None:
        setup = Setup(ShampooLike)
        setup.optimizers[0].left = (i for i in range(3))
        with pytest.raises(CopyError, match=r"ShampooLike\.left cannot be copied"):
            setup.trial(copy.deepcopy(setup.model))

    def test_a_closure(self) -> None:
        setup = Setup(torch.optim.LBFGS)
        why = Recipe.of(setup.run).optimizer.why_not_stepped()  # type: ignore[union-attr]
        assert why is not None
        assert "closure" in why

    @pytest.mark.parametrize("name", ["weight_decay", "beta1", "beta2"])
    def test_fields_that_the_optimizer_has_itself(self, name: str) -> None:
        recipe = Recipe.of(Setup(MADE["AdamW"]).run)
        with pytest.raises(UsageError, match="with optimizer 'AdamW'"):
            dataclasses.replace(recipe, **{name: 0.5})

    def test_the_own_schedule_is_of_live_optimizers(self) -> None:
        with pytest.raises(UsageError, match="schedule 'own'"):
            Recipe(schedule="own")

    def test_nothing_to_train(self) -> None:
        setup = Setup(Plain)
        recipe = Recipe.of(setup.run)
        twin = copy.deepcopy(setup.model).requires_grad_(False)
        with pytest.raises(UsageError, match="without trainable parameters"), contextlib.suppress(KeyError):
            setup.trial(twin, recipe)
