"""The probe of the next step, on a quadratic in float64 whose answers are known in closed form."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy
from normscope.probes import Budget, Measurements, Spending, measure_next_step
from normscope.probes.next_step import (
    CRITICAL,
    MOST_OF_CHECK,
    PLAIN,
    PRECONDITIONED,
    SHARPNESS,
    at_learning_rate,
    critical_rate,
)
from normscope.probes.sharpness import largest_eigenvalue
from normscope.subjects import Run, Subject, load, make_subject
from normscope.train import LiveOptimizers, Recipe

CURVATURE = torch.tensor([4.0, 1.0, 0.5, 0.25], dtype=torch.float64)
POINT = torch.tensor([0.3, -0.2, 1.0, 2.0], dtype=torch.float64)
GRADIENT = CURVATURE * POINT


class Bowl(nn.Module):
    """½ Σ hᵢwᵢ² in float64; its gradient is h⊙w and its Hessian diag h."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(POINT.clone())
        self.spare = nn.Parameter(torch.ones(2, dtype=torch.float64))  # the loss does not depend on it

    def forward(self, x: Tensor) -> Tensor:
        return (CURVATURE * self.weight.square()).sum() / 2 + 0 * x.sum()


def subject(model: nn.Module | None = None) -> Subject:
    return make_subject(model or Bowl(), torch.zeros(1, 1), lambda output, batch: output)


def measured(given: Subject, recipe: Recipe | None = None, budget: str = "deep") -> Measurements:
    return Measurements(measure_next_step(given, Anatomy(()), recipe, Spending(Budget.of(budget))))


def along(update: Tensor) -> float:
    """η at which the loss of a step −η·update is that of no step: 2 gᵀΔ / ΔᵀHΔ."""
    return float(2 * (GRADIENT @ update) / (update @ (CURVATURE * update)))


@pytest.mark.parametrize(
    ("recipe", "update"),
    [
        (Recipe(optimizer="sgd", lr=0.1), GRADIENT),
        (Recipe(optimizer="sgd", lr=30.0), GRADIENT),
        (Recipe(optimizer="sgd", lr=0.1, clip=0.5), GRADIENT * 0.5 / GRADIENT.norm()),
        (Recipe(optimizer="adam", lr=1e-3), GRADIENT.sign()),
        (Recipe(optimizer="adamw", lr=1e-3, weight_decay=0.5), GRADIENT.sign() + 0.5 * POINT),
    ],
    ids=["sgd", "from above", "clipped", "adam", "decay"],
)
def test_the_critical_rate_against_its_closed_form(recipe: Recipe, update: Tensor) -> None:
    """2 gᵀP⁻¹g / (gᵀP⁻¹HP⁻¹g) for Δθ = P⁻¹g: for Adam's first step P = diag |g|."""
    exact = along(update)
    found = measured(subject(), recipe)
    assert found.of("step/critical-rate")[""] == pytest.approx(exact, rel=1 / 16)
    assert found.of("step/critical-sharpness")[""] == pytest.approx(2 / exact, rel=1 / 16)
    assert found.of("step/critical-over-lr")[""] == pytest.approx(exact / recipe.lr, rel=1 / 16)
    assert "forwards" in found.find("step/critical-rate").how


def test_sharpness_against_its_closed_form() -> None:
    found = measured(subject(), Recipe(optimizer="adam", lr=0.02))
    largest = float((CURVATURE / (0.1 * GRADIENT.abs())).max())  # h/((1 − β₁)|g|)
    assert found.of("step/lambda-max")[""] == pytest.approx(4, rel=1e-2)
    assert found.of("step/lambda-max-times-lr")[""] == pytest.approx(0.08, rel=1e-2)
    assert found.of("step/preconditioned-lambda-max")[""] == pytest.approx(largest, rel=1e-2)
    assert found.of("step/preconditioned-lambda-max-times-lr")[""] == pytest.approx(0.02 * largest, rel=1e-2)
    assert "unstable above 38" in found.find("step/preconditioned-lambda-max").how
    plain = measured(subject(), Recipe(optimizer="sgd", lr=0.1))
    assert plain.find("step/preconditioned-lambda-max") is None


def test_another_learning_rate_changes_the_rows_that_it_is_a_part_of() -> None:
    found = measured(subject(), Recipe(optimizer="adam", lr=0.02))
    changed = at_learning_rate(found, 0.2)
    assert [row.quantity for row in changed] == [row.quantity for row in found]
    share = {row.quantity: changed.of(row.quantity)[""] / row.value for row in found}
    assert share.pop("step/critical-over-lr") == pytest.approx(0.1)
    assert share.pop(PLAIN[1]) == pytest.approx(10)
    assert share.pop(PRECONDITIONED[1]) == pytest.approx(10)
    assert set(share.values()) == {1.0}


def test_without_a_learning_rate_there_is_no_next_step() -> None:
    model = Bowl()
    live = LiveOptimizers(model, (torch.optim.SGD(model.parameters(), lr=0.0),))
    rows = measured(subject(model), Recipe(optimizer=live, lr=live.lr, schedule="own"))
    assert "the learning rate is 0 at the start" in rows.find("step/critical-over-lr").how


def test_sharpness_needs_the_deep_budget() -> None:
    spending = Spending(Budget.STANDARD)
    rows = Measurements(measure_next_step(subject(), Anatomy(()), None, spending))
    assert rows.find("step/critical-rate").measured
    for quantity in (*PLAIN, *PRECONDITIONED):
        assert "--budget deep" in rows.find(quantity).how
    assert SHARPNESS in spending.left_out
    deep = Spending(Budget.DEEP)
    list(measure_next_step(subject(), Anatomy(()), None, deep))
    assert 0 < deep.parts[SHARPNESS].forwards < 4000


class Cliff(nn.Module):
    """A loss that falls for every step, or is not finite, as asked."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return {
            "falls": w.sum(),
            "nan": w.sum() * math.nan,
            "constant": x.sum(),
            "flat": 0 * w.sum(),
            "infinite": w.relu().sqrt().sum() * 0 + (w - 1).abs().sqrt().sum(),
        }[self.kind]


def quantities(recipe: Recipe) -> tuple[str, ...]:
    return (*CRITICAL, *PLAIN, *(PRECONDITIONED if recipe.optimizer == "adamw" else ()))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nan", "the loss of the first batch is nan"),
        ("constant", "no parameter of the model gets a gradient"),
        ("flat", "are all zero"),
        ("infinite", "gradients of the first batch are not finite"),
    ],
)
def test_what_cannot_be_measured_has_its_reason(kind: str, reason: str) -> None:
    recipe = Recipe()
    rows = measured(subject(Cliff(kind)), recipe)
    assert [row.quantity for row in rows] == list(quantities(recipe))
    assert all(row.value is None and reason in row.how for row in rows)


def test_a_loss_that_no_step_raises() -> None:
    rows = measured(subject(Cliff("falls")), Recipe(optimizer="sgd", lr=1.0))
    assert f"up to {2.0 ** (MOST_OF_CHECK):.1e} raises the loss" in rows.find("step/critical-rate").how
    assert "no second derivative" in rows.find("step/lambda-max").how


def test_without_a_loss_weights_or_precision() -> None:
    bare = replace(subject(), loss_fn=None)
    assert "no loss function" in measured(bare).find("step/critical-rate").how
    frozen = Bowl().requires_grad_(False)
    assert "requires a gradient" in measured(subject(frozen)).find("step/critical-over-lr").how
    half = Cliff("falls").to(torch.bfloat16)
    assert "half precision" in measured(subject(half)).find("step/critical-rate").how


def test_an_error_of_the_loss_is_the_reason() -> None:
    def fails(output: Tensor, batch: Tensor) -> Tensor:
        raise ValueError("no targets")

    rows = measured(replace(subject(), loss_fn=fails))
    assert all("ValueError: no targets" in row.how for row in rows)


def test_a_loss_that_holds_the_model_is_measured_on_the_model() -> None:
    model = Bowl()
    own = make_subject(model, torch.zeros(1, 1), lambda output, batch: model(batch))
    rows = measured(own, Recipe(optimizer="sgd", lr=0.1))
    assert rows.of("step/critical-rate")[""] == pytest.approx(along(GRADIENT), rel=1 / 16)
    assert rows.of("step/lambda-max")[""] == pytest.approx(4, rel=1e-2)
    assert torch.equal(model.weight, POINT)


def test_a_users_optimizer_steps_each_group_at_its_share() -> None:
    model = Bowl()
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": 0.1}, {"params": [model.spare], "lr": 0.2}], momentum=0.9
    )
    run = Run(model=model, batches=[torch.zeros(1, 1)], loss=lambda o, b: o, optimizer=optimizer)
    recipe = Recipe.of(run)
    rows = measured(make_subject(run), recipe)
    assert recipe.lr == 0.2
    assert rows.of("step/critical-rate")[""] == pytest.approx(2 * along(GRADIENT), rel=1 / 16)
    assert not optimizer.state
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("budget", ["standard", "deep"])
def test_the_model_is_left_as_it_was(budget: str) -> None:
    given = load("nn:decoder,scheme=post,depth=2,width=16,heads=2,dropout=0.1", seed=0)
    model = given.model.train()
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    first, second = ([m.value for m in measured(given, budget=budget)] for _ in range(2))
    assert first == second
    assert first[0] > 0
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_loss_rises_at_the_critical_rate_of_a_real_model() -> None:
    """One step of the recipe's optimiser, below η_c and above it."""
    given = load("nn:decoder,scheme=pre,depth=2,width=16,heads=2", seed=0)
    critical = measured(given, Recipe(optimizer="adamw")).of("step/critical-rate")[""]
    losses = []
    for rate in (0.9 * critical, 1.1 * critical):
        model = copy.deepcopy(given.model).eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        loss = given.loss(model=model)
        loss.backward()
        optimizer.step()
        losses.append(float(given.loss(model=model).detach()) - float(loss.detach()))
    assert losses[0] < 0 < losses[1]


@pytest.mark.parametrize("guess", [1e-4, 0.3, 50.0])
def test_the_search_finds_the_rate_from_either_side(guess: float) -> None:
    found = critical_rate(lambda rate: 1.0 if rate > 0.37 else 0.0, 0.5, guess)
    assert found.lower <= 0.37 <= found.upper
    assert 1 - found.lower / found.upper <= 1 / 16


def test_a_loss_that_is_not_finite_counts_as_raised() -> None:
    found = critical_rate(lambda rate: math.nan if rate > 0.37 else 0.0, 0.5, 0.1)
    assert found.lower <= 0.37 <= found.upper


def test_a_loss_that_never_rises_ends_the_search() -> None:
    assert critical_rate(lambda rate: 0.0, 0.5, 1.0).rate > 1e15


def test_lanczos_finds_the_largest_signed_eigenvalue() -> None:
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64)).Q
    values = torch.linspace(-50, 3, 40, dtype=torch.float64)
    matrix = basis @ torch.diag(values) @ basis.T
    start = torch.randn(40, generator=generator, dtype=torch.float64)
    found = largest_eigenvalue(lambda v: matrix @ v, start, steps=40, tolerance=1e-8)
    assert found.value == pytest.approx(3)
    assert found.residual < 1e-7
    rough = largest_eigenvalue(lambda v: matrix @ v, start, steps=10)
    assert abs(rough.value - values).min() <= rough.residual


class Noisy(nn.Module):
    """A model that draws random numbers in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + 0.5 * torch.randn_like(x))


def test_each_loss_has_the_same_random_draws() -> None:
    torch.manual_seed(0)
    subject = make_subject(Noisy(), torch.randn(8, 4), lambda output, batch: output.square().mean())
    found = set()
    for seed in range(3):
        torch.manual_seed(seed)
        rows = {row.quantity: row.value for row in measure_next_step(subject, Anatomy(()), Recipe(lr=1e-3))}
        found.add(rows["step/critical-rate"])
    assert len(found) == 1
