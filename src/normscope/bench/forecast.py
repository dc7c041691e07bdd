"""`normscope bench forecast`: is the forecast right, on models, rates and a text that it was not set on?

Every ladder of `LADDERS` is forecast now and compared with the result of 300 training steps. Those results
are kept (see forecast_cells.py); some are trained again now, which also gives the time of a lone run. All the
time of a forecast is counted: steps, measurements, and the ramps that are tried where the wanted rate fails.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.anatomy import read_anatomy
from normscope.bench.forecast_cells import LADDERS, RATES, Ladder, kept, name, train
from normscope.forecast import LadderForecast, forecast_ladder
from normscope.train import CRITERION_STEPS, TrialConfig

Row = dict[str, Any]

WANTED = 1e-3
"""The rate whose warm-up is asked for, on every ladder."""

AGAIN = 5
"""Every so manieth ladder, one cell is trained again, alone."""


@dataclass(frozen=True)
class Held:
    """A ladder's forecast and its truth; `lone_s` is the time of a lone run of 300 steps, where measured."""

    ladder: Ladder
    said: LadderForecast
    trained: tuple[bool, ...]
    seconds: float
    lone_s: float | None = None
    same: bool | None = None

    @property
    def pairs(self) -> list[tuple[str, bool]]:
        """Outcome and truth of each cell."""
        return [(rung.outcome, truth) for rung, truth in zip(self.said.rungs, self.trained, strict=True)]

    @property
    def edge(self) -> float | None:
        """The largest rate that trained."""
        return max((rate for rate, truth in zip(RATES, self.trained, strict=True) if truth), default=None)

    @property
    def edge_is_right(self) -> bool:
        """Whether the forecast's largest rate is within a factor of 2 of it."""
        said, edge = self.said.largest_rate, self.edge
        if said is None or edge is None:
            return said is edge
        return 0.499 < said / edge < 2.001


def bench_forecast() -> list[Row]:
    """Rows of figure and target."""
    truths = kept()
    held = [
        _held(ladder, truths, again=i % AGAIN == 0)
        for i, ladder in enumerate(LADDERS)
        if all(name(ladder, rate) in truths for rate in RATES)
    ]
    if not held:
        return [
            _row("the forecast", "not measured", "", "no kept truth of this Python's text: train it first")
        ]
    return [*_accuracies(held), _edges(held), _cost(held), _again(held), *_confusion(held)]


def _held(ladder: Ladder, truths: dict[str, dict[str, Any]], *, again: bool) -> Held:
    subject = ladder.subject()
    config = TrialConfig(optimizer=ladder.optimizer, lr=WANTED, seed=ladder.seed)
    started = time.perf_counter()
    said = forecast_ladder(subject, read_anatomy(subject), config, RATES)
    seconds = time.perf_counter() - started
    trained = tuple(bool(truths[name(ladder, rate)]["trains"]) for rate in RATES)
    if not again:
        return Held(ladder, said, trained, seconds)
    cell = train(ladder, [WANTED])[0]
    return Held(ladder, said, trained, seconds, cell.seconds, cell.trains == trained[RATES.index(WANTED)])


def _accuracies(held: Sequence[Held]) -> list[Row]:
    new = [ladder for ladder in held if ladder.ladder.new]
    tuned = [ladder for ladder in held if not ladder.ladder.new]
    return [
        _accuracy("cells said right, trains or not", held, "≥ 93 %"),
        _accuracy("of schemes and models that were not tuned on", new, ""),
        _accuracy("of schemes that were, at other widths, depths and starts", tuned, ""),
    ]


def _accuracy(what: str, held: Iterable[Held], target: str) -> Row:
    right = [(outcome == "trains") == truth for ladder in held for outcome, truth in ladder.pairs]
    if not right:
        return _row(what, "not measured", target, "no such ladder was kept")
    low, high = wilson(sum(right), len(right))
    how = f"{sum(right)} of {len(right)}; 95 % interval {100 * low:.0f} to {100 * high:.0f} %"
    return _row(what, f"{100 * sum(right) / len(right):.1f} %", target, how)


def _edges(held: Sequence[Held]) -> Row:
    right = [ladder.edge_is_right for ladder in held]
    missed = [f"{h.ladder.model}: {_rate(h.said.largest_rate)} for {_rate(h.edge)}" for h in held]
    wrong = "; ".join(text for text, good in zip(missed, right, strict=True) if not good)
    how = f"{sum(right)} of {len(right)} ladders" + (f"; not {wrong}" if wrong else "")
    return _row("largest rate that trains within ×2", f"{100 * sum(right) / len(right):.0f} %", "≥ 95 %", how)


def _cost(held: Sequence[Held]) -> Row:
    """The row for a forecast's time per learning rate, as a share of the time of a lone run of 300 steps."""
    timed = [(ladder.seconds / len(RATES), ladder.lone_s) for ladder in held if ladder.lone_s]
    shares = [forecast / lone for forecast, lone in timed if lone]
    whole = sum(forecast for forecast, _ in timed) / sum(lone for _, lone in timed if lone)
    how = f"{len(shares)} ladders, each beside a lone run: " + ", ".join(f"{100 * s:.0f} %" for s in shares)
    return _row(f"time a rate, of {CRITERION_STEPS} lone steps", f"{100 * whole:.1f} %", "≤ 15 %", how)


def _again(held: Sequence[Held]) -> Row:
    same = [ladder.same for ladder in held if ladder.same is not None]
    how = f"at {WANTED:g}, on one thread or many; all others are as kept in forecast_truth.json"
    return _row("kept truths that came out the same, trained now", f"{sum(same)} of {len(same)}", "all", how)


def _confusion(held: Sequence[Held]) -> list[Row]:
    counts = Counter(pair for ladder in held for pair in ladder.pairs)
    return [
        _row(
            f"said: {outcome}", f"{counts[outcome, True]} / {counts[outcome, False]}", "", "trained / did not"
        )
        for outcome in sorted({outcome for outcome, _ in counts})
    ]


def wilson(right: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score."""
    z, share = 1.96, right / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return middle - half, middle + half


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"


def _row(what: str, figure: str, target: str, how: str) -> Row:
    return {"what": what, "figure": figure, "target": target, "how": how}
