"""Learning rate by step."""

import math

from normscope.train.config import TrialConfig

COSINE_END = 0.1
"""Share of the full rate that a cosine ends at."""


def warmup_factor(step: int, warmup: int) -> float:
    """Share of the full rate at 0-based `step` under linear warm-up: min(1, (step + 1) / warmup).

    The first step has rate lr/warmup, not zero: a step that does nothing would tell nothing.
    """
    return 1.0 if warmup == 0 else min(1.0, (step + 1) / warmup)


def rate_factor(config: TrialConfig, step: int, warmup: int | None = None) -> float:
    """Share of the full rate at 0-based `step` of a trial, with `warmup` steps of warm-up.

    A cosine starts where the warm-up ends, is at `COSINE_END` at the last of `config.steps`, and stays.

    Args:
        warmup: None for the config's own.
    """
    warmup = config.warmup if warmup is None else warmup
    if step < warmup or config.schedule == "constant":
        return warmup_factor(step, warmup)
    length = max(1, config.steps - 1 - warmup)
    share = min(1.0, (step - warmup) / length)
    return COSINE_END + (1 - COSINE_END) * (1 + math.cos(math.pi * share)) / 2
