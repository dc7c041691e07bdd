"""Schedule, clipping, precision, accumulation, ε and observers, each against a hand-written loop."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from normscope.train import Recipe, Trial, rate_factor

BATCHES = [torch.randn(5, 3, generator=torch.Generator().manual_seed(s)) for s in range(12)]
STEPS = 6


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).float() - 1).square().mean()


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    ours, theirs = (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def run(model: nn.Module, config: Recipe, **more: object) -> Trial:
    trial = Trial(model, itertools.cycle(BATCHES), squared, config, **more)
    for _ in range(config.steps):
        trial.advance()
    return trial


def by_hand(model: nn.Module, config: Recipe, rates: list[float]) -> list[float]:
    """The same steps, written out."""
    batches, losses = itertools.cycle(BATCHES), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, eps=config.eps or 1e-8)
    scaler = torch.amp.GradScaler("cpu", enabled=config.precision == "float16")
    half = config.precision != "float32"
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        total = 0.0
        for _ in range(config.accumulation):
            with torch.autocast("cpu", getattr(torch, config.precision), enabled=half):
                loss = squared(model, next(batches)) / config.accumulation
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        if config.clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    return losses


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("eps", [None, 1e-2])
def test_steps_are_those_written_by_hand(
    precision: str, accumulation: int, clip: float | None, eps: float | None
) -> None:
    config = Recipe(lr=0.1, steps=STEPS, precision=precision, accumulation=accumulation, clip=clip, eps=eps)
    ours, theirs = pair()
    trial = run(ours, config)
    assert trial.losses == pytest.approx(by_hand(theirs, config, [0.1] * STEPS), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert len(set(trial.losses)) == STEPS, "it moves"


def test_every_setting_changes_the_steps() -> None:
    """Without this, the comparison above would compare nothing."""
    model, _ = pair()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    curves = []
    for change in ({}, {"clip": 0.05, "optimizer": "sgd"}, {"optimizer": "sgd"}, {"eps": 1e-2}):
        for more in ({}, {"accumulation": 2}, {"precision": "bfloat16"}, {"schedule": "cosine"}):
            model.load_state_dict(state)
            curves.append(tuple(run(model, Recipe(lr=0.1, steps=STEPS, **change, **more)).losses))
    assert len(set(curves)) == len(curves)


def test_accumulated_equal_batches_are_one_large_batch() -> None:
    ours, theirs = pair()
    run(ours, Recipe(optimizer="sgd", lr=0.1, steps=3, accumulation=4))  # Adam hides a wrong scale
    large = [torch.cat(BATCHES[i : i + 4]) for i in (0, 4, 8)]
    trial = Trial(theirs, iter(large), squared, Recipe(optimizer="sgd", lr=0.1))
    for _ in large:
        trial.advance()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_batch_whose_loss_is_not_finite_takes_the_others_of_its_step_along() -> None:
    """The position in the data stays steps × accumulation."""
    model, _ = pair()
    taken = iter(BATCHES)
    trial = Trial(model, taken, lambda m, b: squared(m, b) * math.nan, Recipe(accumulation=3))
    trial.advance()
    assert torch.equal(next(taken), BATCHES[3])
    assert trial.diverged


def test_clipping_scales_all_gradients_to_one_norm() -> None:
    model, _ = pair()
    run(model, Recipe(lr=0.1, steps=1, clip=1e-3))
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_a_scaled_overflow_skips_the_step_and_halves_the_scale() -> None:
    model, _ = pair()
    trial = Trial(model, itertools.cycle(BATCHES), squared, Recipe(precision="float16"))
    assert trial.scaler is not None
    before, scale = model[0].weight.detach().clone(), trial.scaler.get_scale()
    model[0].weight.register_hook(lambda grad: grad * math.inf)
    trial.advance()
    assert torch.equal(model[0].weight, before)
    assert trial.scaler.get_scale() == scale / 2


def test_the_cosine_starts_at_the_warm_ups_end_and_ends_at_a_tenth() -> None:
    config = Recipe(schedule="cosine", steps=101, warmup=11)
    factors = [rate_factor(config, step) for step in range(120)]
    assert factors[:11] == [(step + 1) / 11 for step in range(11)]
    assert factors[11] == 1.0
    assert factors[100] == pytest.approx(0.1)
    assert factors[101:] == [pytest.approx(0.1)] * 19
    assert factors[11:101] == sorted(factors[11:101], reverse=True)
    halfway = 11 + (100 - 11) / 2
    assert (factors[math.floor(halfway)] + factors[math.ceil(halfway)]) / 2 == pytest.approx(0.55, abs=1e-3)


def test_a_cosine_and_a_wsd_end_at_their_share_of_the_rate() -> None:
    for schedule in ("cosine", "wsd"):
        config = Recipe(schedule=schedule, steps=50, lr_end=0.02)
        assert rate_factor(config, 49) == pytest.approx(0.02)
        assert rate_factor(config, 99) == pytest.approx(0.02)


@pytest.mark.parametrize(("decay_steps", "begin"), [(None, 80), (10, 90), (200, 11)])
def test_wsd_is_constant_and_then_falls_in_a_straight_line(decay_steps: int | None, begin: int) -> None:
    config = Recipe(schedule="wsd", steps=101, warmup=11, decay_steps=decay_steps)
    factors = [rate_factor(config, step) for step in range(101)]
    assert factors[:11] == [(step + 1) / 11 for step in range(11)]
    assert factors[11 : begin + 1] == [1.0] * (begin - 10)
    line = [1 - 0.9 * (step - begin) / (100 - begin) for step in range(begin, 101)]
    assert factors[begin:] == pytest.approx(line)


def test_betas_are_those_of_torchs_own() -> None:
    ours, theirs = pair()
    run(ours, Recipe(lr=0.1, steps=STEPS, beta1=0.5, beta2=0.7))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=(0.5, 0.7))
    for batch in BATCHES[:STEPS]:
        optimizer.zero_grad()
        squared(theirs, batch).backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_constant_schedule_after_a_warm_up() -> None:
    assert [rate_factor(Recipe(warmup=2), step) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert rate_factor(Recipe(warmup=100), 49) == 0.5


def test_observers_see_every_step_once_after_it() -> None:
    model, _ = pair()
    seen: list[tuple[int, float]] = []
    trial = run(model, Recipe(steps=4), observers=[lambda t: seen.append((t.step, t.losses[-1]))])
    assert seen == list(enumerate(trial.losses, start=1))
