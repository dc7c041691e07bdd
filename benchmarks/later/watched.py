"""A stack of runs that is observed on the way to its end, and one record for each of its runs.

Shapes: K runs in the stack.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.later.failures import curve_of, hardness
from benchmarks.later.ladders import REFERENCE, STEPS, TOKENS, Ladder, Setting
from benchmarks.later.observed import Figures, finite, matrices_of, observe, rounded, sharpness
from benchmarks.process import EVERY
from benchmarks.regimes import data
from normscope.nn import Decoder
from normscope.train import Recipe, TrialStack, rate_factor
from normscope.train.optim import betas
from normscope.train.recipe import ADAM_EPS

AT = (36, 100, 300, 600, 1000)
"""Steps after which a run is observed."""
NEAR = {36: 26, 100: 80, 300: 260, 600: 540, 1000: 940}
"""The earlier step with which each is compared, for growth."""
RECENT = 30
"""Steps over which losses and gradient norms are summed up."""
OBSERVED_SEED = 77_000


class Watched(TrialStack):
    """A stack that keeps the gradient norms of its runs and what is seen of them.

    Attributes:
        norms: gradient norms of each run, one a step.
        seen: figures of each run by step.
    """

    def __init__(self, *args: Any, fixed: Tensor) -> None:
        super().__init__(*args)
        self.fixed = fixed
        self.norms: list[list[float]] = [[] for _ in self.models]
        self.seen: list[dict[int, Figures]] = [{0: observe(_decoder(m), fixed)} for m in self.models]

    def _update(self) -> None:
        step = self.step + 1
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        norms_K = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        for k, norm in zip(self.live, norms_K.tolist(), strict=True):
            self.norms[k].append(norm)
        if step not in AT and step not in NEAR.values():
            super()._update()
            return
        before = [{id(p): p.detach().clone() for p in matrices_of(self.models[k])} for k in self.live]
        super()._update()
        squares = self._squares()
        for row, k in enumerate(self.live):
            own = {name: square[row] for name, square in squares.items()}
            g = {name: gradient[row] for name, gradient in gradients.items()}
            self.seen[k][step] = self._observed(k, step, before[row], own, g)

    def _squares(self) -> dict[str, Tensor]:
        """v̂ of Adam by parameter, (K, …)."""
        trained = [name for name, p in self._parameters.items() if p.requires_grad]
        beta2 = betas(self.configs[0])[1]
        entries = zip(trained, self._optimizer._entries, strict=True)
        return {name: entry.state[1] / (1 - beta2**entry.steps) for name, entry in entries if entry.state}

    def _observed(
        self,
        k: int,
        step: int,
        before: dict[int, Tensor],
        squares: dict[str, Tensor],
        gradients: dict[str, Tensor],
    ) -> Figures:
        model, config = _decoder(self.models[k]), self.configs[k]
        found = observe(model, self.fixed)
        ratios = [float((p.detach() - before[id(p)]).norm() / p.detach().norm()) for p in matrices_of(model)]
        found["update/median"], found["update/max"] = statistics.median(ratios), max(ratios)
        lags = [float(gradients[n].square().mean() / squares[n].mean().clamp_min(1e-30)) for n in squares]
        found["lag/max"], found["lag/median"] = max(lags) ** 0.5, statistics.median(lags) ** 0.5
        if step in AT:
            eps = ADAM_EPS if config.eps is None else config.eps
            beta1 = betas(config)[0]
            largest = sharpness(model, self.fixed, squares, eps)
            rate = config.lr * rate_factor(config, step - 1)
            found["sharpness"] = rate * largest * (1 - beta1) / (2 + 2 * beta1)
        return found | recent(self.losses[k], self.norms[k])


def recent(losses: Sequence[float], norms: Sequence[float]) -> Figures:
    """Level and jumps of the last losses and gradient norms."""
    last, norm = losses[-RECENT:], norms[-RECENT:]
    level, middle = statistics.median(last), statistics.median(norm)
    return {
        "recent/loss": sum(last) / len(last),
        "recent/loss-jump": max(last) - level,
        "recent/loss-spread": statistics.pstdev(last),
        "recent/gradient": middle,
        "recent/gradient-jump": max(norm) / max(middle, 1e-30),
    }


def train(ladder: Ladder) -> list[dict[str, Any]]:
    """Train a ladder's runs together and observe them; the records of `runs.jsonl`."""
    settings = (REFERENCE, *ladder.settings)
    models = [ladder.model(setting.seed) for setting in settings]
    feeds = [ladder.batches(setting) for setting in settings]
    fixed = next(data.windows(ladder.ids(), 4, TOKENS, OBSERVED_SEED))
    stack = Watched(models, feeds, _loss, [recipe(ladder, each) for each in settings], fixed=fixed)
    while stack.step < STEPS and stack.live:
        stack.advance()
    harder = hardness(stack.losses[0])
    return [_record(ladder, setting, stack, k, harder) for k, setting in enumerate(settings)]


def recipe(ladder: Ladder, setting: Setting) -> Recipe:
    """The settings of a run."""
    return Recipe(
        lr=setting.lr,
        warmup=setting.warmup,
        weight_decay=setting.decay,
        clip=setting.clip,
        beta2=ladder.beta2,
        seed=setting.seed,
        steps=STEPS,
    )


def _record(ladder: Ladder, setting: Setting, stack: Watched, k: int, harder: np.ndarray) -> dict[str, Any]:
    windows = [stack.norms[k][i : i + EVERY] for i in range(0, len(stack.norms[k]), EVERY)]
    curve = curve_of(stack.losses[k], None if setting.repeat else harder)
    return {
        "ladder": ladder.name,
        "kind": setting.kind,
        "part": ladder.part,
        "lr": setting.lr,
        "warmup": setting.warmup,
        "seed": setting.seed,
        "entropy": round(ladder.entropy(), 4),
        "steps": len(stack.losses[k]),
        "curve": rounded(curve, 4),
        "gradient": rounded([statistics.median(each) for each in windows], 3),
        "gradient-max": rounded([max(each) for each in windows], 3),
        "seen": {str(step): finite(figures) for step, figures in stack.seen[k].items()},
    }


def _loss(model: Any, ids: Tensor) -> Tensor:
    return data.next_token(model(ids).logits, ids)


def _decoder(model: Any) -> Decoder:
    assert isinstance(model, Decoder)
    return model
