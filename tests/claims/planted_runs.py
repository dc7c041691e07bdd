"""A setup whose trainings are planted: what a claim makes of results that are known."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normscope.claims import CLAIMS, ClaimResult, Setup, measure_claim
from normscope.claims.training import unigram_losses
from normscope.maps import Result
from normscope.train import RunConfig

STANDS_STILL, FLIES_OFF, TRAINS, TRAINS_WELL = 0.0, math.inf, -0.5, -0.7


@dataclass(frozen=True)
class Planted(Setup):
    """`plan` says how many nats from the byte frequencies a config ends, or None to train it in fact."""

    plan: Callable[[RunConfig], float | None] = lambda config: TRAINS

    def train(self, configs: Sequence[RunConfig], replica: int = 0) -> list[Result]:
        """A planted result for each config, but for those whose plan is None."""
        ends = [self.plan(config) for config in configs]
        real = [config for config, end in zip(configs, ends, strict=True) if end is None]
        trained = iter(super().train(real, replica) if real else [])
        return [
            next(trained) if end is None else planted(config, end)
            for config, end in zip(configs, ends, strict=True)
        ]


def judged(
    id: str, plan: Callable[[RunConfig], float | None], seeds: Sequence[int] = (0,), *, long: bool = False
) -> ClaimResult:
    """A claim on planted results; nothing may go wrong on the way."""
    found = measure_claim(CLAIMS[id], Planted(seeds=seeds, plan=plan, long=long))
    assert found.error is None, found.evidence.notes
    json.dumps(found.to_dict(), allow_nan=False)
    kept = ClaimResult.from_cache(CLAIMS[id], json.loads(json.dumps(found.to_cache())))
    assert kept.judgement == found.judgement
    return found


def planted(config: RunConfig, end: float, *, fall: float = 20.0) -> Result:
    """Losses that fall from 5.5 nats to `end` from the byte frequencies; an infinite end flies off."""
    alone = unigram_losses(None, config.trial.seed, config.trial.steps)
    above = [2.3 * math.exp(-step / fall) for step in range(len(alone))]
    losses = tuple(
        1e9 * (step + 1) if math.isinf(end) else nats + extra + end * (1 - extra / 2.3)
        for step, (nats, extra) in enumerate(zip(alone, above, strict=True))
    )
    losses = (5.5, *losses[1:])
    return Result(
        losses=losses,
        unigram_entropy=3.16,
        verdict="trains" if end <= -0.1 else "fails",
        certain_at=None,
        certain=None,
        stopped=False,
        seconds=0.0,
        stack=1,
        versions={},
    )
