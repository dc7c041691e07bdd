"""Learning rate by step."""


def warmup_factor(step: int, warmup: int) -> float:
    """Share of the full rate at 0-based `step` under linear warm-up: min(1, (step + 1) / warmup).

    The first step has rate lr/warmup, not zero: a step that does nothing would tell nothing.
    """
    return 1.0 if warmup == 0 else min(1.0, (step + 1) / warmup)
