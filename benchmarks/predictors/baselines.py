"""Baselines to beat: the learning rate, depth × rate, "no norm", and the loss after some steps."""

import math

from benchmarks.predictors.setting import BROKEN, Cost, NotMeasuredError, Prediction, Setting, trained_stack

STEPS, RECENT = 36, 10
"""Steps as many as a rung of the forecast takes, and losses of which the mean is taken."""


def baselines(setting: Setting) -> list[Prediction]:
    """Scores without a forward: the rate, blocks × rate, and whether the model has no norm at all."""
    anatomy, rates = setting.anatomy, setting.rates
    if not anatomy.blocks:
        raise NotMeasuredError("no residual stream was read")
    bare = not anatomy.final_norm and all(not branch.norms for branch in anatomy.branches)
    depth = len(anatomy.blocks)
    return [
        Prediction("learning rate", tuple(rates), Cost()),
        Prediction("depth × learning rate", tuple(depth * rate for rate in rates), Cost()),
        Prediction("has no norm at all", (float(bare),) * len(rates), Cost()),
    ]


def loss_after_steps(setting: Setting) -> list[Prediction]:
    """The mean of the last training losses after `STEPS` steps at each rate, and over the first loss."""
    curves, _ = trained_stack(setting, STEPS)
    cost = Cost(steps=STEPS * len(curves))
    losses = tuple(_recent(losses) for losses in curves)
    shares = tuple(loss / losses[0] for loss, losses in zip(losses, curves, strict=True))
    best = min(zip(losses, setting.rates, strict=True))[1]
    return [
        Prediction(f"loss after {STEPS} steps", losses, cost, None, best),
        Prediction(f"loss after {STEPS} steps over the first", shares, cost, None, best),
    ]


def _recent(losses: list[float]) -> float:
    if len(losses) < STEPS or not math.isfinite(losses[-1]):
        return BROKEN
    return min(BROKEN, sum(losses[-RECENT:]) / RECENT)
