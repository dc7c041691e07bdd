"""Learning rate by step."""

import math

from normscope.train.recipe import Recipe


def warmup_factor(step: int, warmup: int) -> float:
    """Fraction of the full learning rate at 0-based `step` in linear warm-up: min(1, (step + 1) / warmup).

    The first step has the learning rate lr/warmup, not zero, so that no step is wasted.
    """
    return 1.0 if warmup == 0 else min(1.0, (step + 1) / warmup)


def rate_factor(config: Recipe, step: int) -> float:
    """Fraction of the full learning rate at 0-based `step` of a trial.

    After the warm-up, "cosine" falls from 1 to `config.lr_end` at the last of `config.steps`, or of
    `config.run_steps` where the trial is a part of a longer run. "wsd" (Hu et al. 2024, arXiv:2404.06395) is
    constant and then falls linearly to `lr_end` at the last step. Later steps keep that value.
    """
    steps = config.steps if config.run_steps is None else config.run_steps
    last, begin = steps - 1, config.warmup
    if config.schedule == "wsd":
        decay = max(1, steps // 5) if config.decay_steps is None else config.decay_steps
        begin = max(begin, last - decay)
    if step < begin or config.schedule == "constant":
        return warmup_factor(step, config.warmup)
    share = min(1.0, (step - begin) / max(1, last - begin))
    height = (1 + math.cos(math.pi * share)) / 2 if config.schedule == "cosine" else 1 - share
    return config.lr_end + (1 - config.lr_end) * height
