"""`normscope bench forecast`: accuracy of the forecast on held-out models, learning rates and text.

Every ladder of `LADDERS` is forecast now and compared with the result of 300 training steps. Those results
are kept (see cells.py). Some are trained again now, which also gives the time of a single run. The
time of a forecast includes everything: steps, measurements, and warm-ups that are tried if the wanted rate
fails. Published predictors are scored on the same ladders, and on divergence of models with norms and without
(see benchmarks/predictors).
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.forecast.cells import KEPT, LADDERS, RATES, Ladder, kept, name, train
from benchmarks.predictors.cells import read
from benchmarks.predictors.rows import auroc_rows, divergence_rows
from benchmarks.process import Row, row, wilson
from benchmarks.regimes import best_rates, scores
from normscope.anatomy import read_anatomy
from normscope.forecast import LadderForecast, forecast_ladder
from normscope.train import CRITERION_STEPS, Recipe

WANTED = 1e-3
"""The learning rate for which warm-up is forecast, on every ladder."""

AGAIN = 5
"""One cell of every fifth ladder is trained again, alone."""


@dataclass(frozen=True)
class Held:
    """A ladder's forecast and its truth.

    Attributes:
        gaps: loss after 300 steps minus the unigram entropy at each rate; None where it is not finite.
        lone_s: time of a single run of 300 steps, if measured.
    """

    ladder: Ladder
    said: LadderForecast
    trained: tuple[bool, ...]
    gaps: tuple[float | None, ...]
    seconds: float
    lone_s: float | None = None
    same: bool | None = None

    @property
    def pairs(self) -> list[tuple[str, bool]]:
        """Outcome and truth of each cell."""
        return [(rung.outcome, truth) for rung, truth in zip(self.said.rungs, self.trained, strict=True)]

    @property
    def edge(self) -> float | None:
        """The largest learning rate that trained."""
        return max((rate for rate, truth in zip(RATES, self.trained, strict=True) if truth), default=None)

    @property
    def edge_is_right(self) -> bool:
        """True if the forecast's largest learning rate is within a factor of 2 of the trained one."""
        said, edge = self.said.largest_rate, self.edge
        if said is None or edge is None:
            return said is edge
        return 0.499 < said / edge < 2.001

    @property
    def scored(self) -> scores.Scored:
        """The ladder as those of the regimes are scored, with one replica."""
        found = zip(self.said.rungs, self.trained, self.gaps, strict=True)
        cells = [
            scores.Cell(
                {**rung.to_dict(), "tokens": rung.tokens, "hidden": rung.hidden},
                ({"trains": trained, "last": gap, "baseline": 0.0},),
            )
            for rung, trained, gap in found
        ]
        return scores.Scored(f"bytes: {self.ladder.model}", tuple(cells))


def bench_forecast() -> list[Row]:
    """Rows with figures and targets."""
    truths = kept()
    held = [
        _held(ladder, truths, again=i % AGAIN == 0)
        for i, ladder in enumerate(LADDERS)
        if all(name(ladder, rate) in truths for rate in RATES)
    ]
    if not held:
        why = "no kept truth of this Python's text: train it first"
        return [row("the forecast", "not measured", "", why)]
    cells = {each.name: each for each in read(KEPT)}
    beside = auroc_rows([(cells[each.ladder.model], each.said) for each in held])
    return [
        *_accuracies(held),
        *_certainties([each.scored for each in held]),
        _edges(held),
        _best_rates([best_rates.named(each.scored) for each in held]),
        _cost(held),
        _again(held),
        *_confusion(held),
        *beside,
        *divergence_rows(),
    ]


def _held(ladder: Ladder, truths: dict[str, dict[str, Any]], *, again: bool) -> Held:
    subject = ladder.subject()
    config = Recipe(optimizer=ladder.optimizer, lr=WANTED, seed=ladder.seed)
    started = time.perf_counter()
    said = forecast_ladder(subject, read_anatomy(subject), config, RATES)
    spent = time.perf_counter() - started
    cells = [truths[name(ladder, rate)] for rate in RATES]
    trained = tuple(bool(cell["trains"]) for cell in cells)
    found = Held(ladder, said, trained, tuple(cell["gap"] for cell in cells), spent)
    if not again:
        return found
    cell = train(ladder, [WANTED])[0]
    return replace(found, lone_s=cell.seconds, same=cell.trains == trained[RATES.index(WANTED)])


def _accuracies(held: Sequence[Held]) -> list[Row]:
    new = [ladder for ladder in held if ladder.ladder.new]
    tuned = [ladder for ladder in held if not ladder.ladder.new]
    return [
        _accuracy("cells predicted correctly, trains or not", held, "≥ 93 %"),
        _accuracy("the same, for schemes and models that the rule was not set on", new, ""),
        _accuracy("the same, for schemes that it was set on, at other widths, depths and starts", tuned, ""),
    ]


def _accuracy(what: str, held: Iterable[Held], target: str) -> Row:
    right = [(outcome == "trains") == truth for ladder in held for outcome, truth in ladder.pairs]
    if not right:
        return row(what, "not measured", target, "no such ladder is stored")
    low, high = wilson(sum(right), len(right))
    how = f"{sum(right)} of {len(right)}; 95 % interval {100 * low:.0f} to {100 * high:.0f} %"
    return row(what, f"{100 * sum(right) / len(right):.1f} %", target, how)


def _certainties(found: Sequence[scores.Scored]) -> list[Row]:
    """Rows for the cells that the forecast is sure of, and for its calibration."""
    sure = [cell for ladder in found for cell in ladder.cells if cell.is_sure]
    right = sum((cell.truth == "trained") == ((cell.certainty or 0.0) > 0.5) for cell in sure)
    cells = sum(len(ladder.cells) for ladder in found)
    tenths = [f"{said:.2f}: {share:.2f} of {n}" for said, share, n in scores.calibration(found)]
    return [
        row(
            "sure cells predicted correctly",
            f"{100 * right / len(sure):.1f} %" if sure else "not measured",
            "≥ 95 %",
            f"{right} of {len(sure)}; sure of {len(sure)} of {cells} cells",
        ),
        row(
            "Brier score of the certainty",
            f"{scores.brier(found):.3f}",
            "",
            f"mean certainty, and share of the cells that trained, by tenths: {'; '.join(tenths)}",
        ),
    ]


def _best_rates(found: Sequence[best_rates.Named]) -> Row:
    """The row for the learning rate to use, against the lowest loss of one run at each rate."""
    counted = [each for each in found if each.trains]
    right = sum(each.is_right for each in counted)
    how = f"{right} of {len(counted)} ladders on which some rate trains; one run each"
    share = f"{100 * right / len(counted):.0f} %" if counted else "not measured"
    return row(f"learning rate to use, within ×{best_rates.NEAR:g} of the best", share, "≥ 90 %", how)


def _edges(held: Sequence[Held]) -> Row:
    wrong = [
        f"{ladder.ladder.model}: {_rate(ladder.said.largest_rate)} for {_rate(ladder.edge)}"
        for ladder in held
        if not ladder.edge_is_right
    ]
    right = len(held) - len(wrong)
    how = f"{right} of {len(held)} ladders" + (f"; not {'; '.join(wrong)}" if wrong else "")
    return row(
        "largest learning rate that trains, within ×2", f"{100 * right / len(held):.0f} %", "≥ 95 %", how
    )


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"


def _cost(held: Sequence[Held]) -> Row:
    """The row for a forecast's time per learning rate, as a fraction of a single run of 300 steps."""
    timed = [(ladder.seconds / len(RATES), ladder.lone_s) for ladder in held if ladder.lone_s]
    shares = [forecast / lone for forecast, lone in timed]
    whole = sum(forecast for forecast, _ in timed) / sum(lone for _, lone in timed)
    how = f"{len(shares)} ladders, each beside a lone run: " + ", ".join(f"{100 * s:.0f} %" for s in shares)
    return row(
        f"time for a learning rate, as a share of {CRITERION_STEPS} steps of one run",
        f"{100 * whole:.1f} %",
        "≤ 15 %",
        how,
    )


def _again(held: Sequence[Held]) -> Row:
    same = [ladder.same for ladder in held if ladder.same is not None]
    how = f"at {WANTED:g}, on one thread or many; all others are as kept in forecast/truth.json"
    return row(
        "stored cells with the same outcome when trained again", f"{sum(same)} of {len(same)}", "all", how
    )


def _confusion(held: Sequence[Held]) -> list[Row]:
    counts = Counter(pair for ladder in held for pair in ladder.pairs)
    return [
        row(f"forecast: {each}", f"{counts[each, True]} / {counts[each, False]}", "", "trained / did not")
        for each in sorted({outcome for outcome, _ in counts})
    ]
