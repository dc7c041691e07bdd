"""Short training of models that are changed at their start, and kept."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from normscope.claims.form import Setup
from normscope.maps import Cell
from normscope.maps.training import loaded
from normscope.train import RunConfig, TrialConfig, in_flushed_thread, many_trials


@dataclass(frozen=True)
class ShortRun:
    """A run of one seed: the loss before each step, and the model after the last."""

    losses: list[float]
    model: nn.Module


def small(
    scheme: str, depth: int = 6, *, steps: int, lr: float = 3e-3, width: int = 32, **options: object
) -> RunConfig:
    """A decoder under AdamW without warm-up, on batches of 4 × 32 bytes."""
    said = "".join(f",{name}={value}" for name, value in options.items())
    return RunConfig(
        model=f"nn:decoder,scheme={scheme}{said},depth={depth},width={width},heads=2",
        seq_len=32,
        validation=0.0,
        trial=TrialConfig(lr=lr, steps=steps),
    )


def train_changed(
    setup: Setup, config: RunConfig, change: Callable[[nn.Module], None] = lambda model: None
) -> dict[int, ShortRun]:
    """Runs of `config` by seed, all seeds in one stack; `change` is done to each model before its first step.

    Use `setup.train` where nothing is changed and the models are not needed: those runs are kept.
    """
    text = None if setup.text is None else str(setup.text)
    configs = [config.replace(seed=seed, text=text) for seed in setup.seeds]
    subjects = [loaded(Cell(each)) for each in configs]
    for subject in subjects:
        change(subject.model)
    first, models = subjects[0], [subject.model for subject in subjects]
    trials = many_trials(
        models,
        [subject.batches() for subject in subjects],
        lambda model, batch: first.loss(batch, model),
        [each.trial for each in configs],
    )

    def advance(checkpoint: Callable[[], None]) -> None:
        for _ in range(config.trial.steps):
            trials.advance()
            checkpoint()

    in_flushed_thread(advance)
    for k, model in enumerate(models):
        trials.export(k, model)
    return {
        seed: ShortRun(trials.losses[k], model)
        for k, (seed, model) in enumerate(zip(setup.seeds, models, strict=True))
    }
