"""`judge`: from cases to a verdict. The only place where verdicts come from."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from normscope.claims.claim import Kind, Sentence
from normscope.claims.evidence import Case

CONFIDENCE = 0.95
"""Confidence of the interval of an effect's mean."""


class Verdict(StrEnum):
    """Verdict on a sentence."""

    HOLDS = "holds"
    CONDITION = "holds under our condition"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """An effect in one cell: the cases of one `where`.

    Attributes:
        where: the cell, in words.
        mean: over seeds, each of which counts once however many replicas it has.
        low, high: the 95 % interval of the mean (Student's t over seeds).
        seeds: how many.
        met: whether the sentence's condition is met there.
        fresh: whether it was measured on seeds unused when the condition was found.
        holds: whether the interval lies at or above the smallest effect that counts (True), under it
            (False), or on both sides (None).
    """

    where: str
    mean: float
    low: float
    high: float
    seeds: int
    met: bool
    fresh: bool
    holds: bool | None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict and what it rests on.

    Attributes:
        sentence: what is judged.
        verdict: of all seeds together.
        by_seed: of each seed alone; empty where nothing was drawn by a seed, and for effects.
        cases, held: how many cases there are, and for how many the sentence is true. Confirming cases on
            fresh seeds are not in these numbers.
        met: in how many its condition is met.
        outside: how many cases were left out since they do not meet the text's own hypothesis.
        counterexample: a case that meets the condition and that the sentence is not true of; where there is
            none, one that does not meet it.
        effects: the intervals that decided, where the sentence has a smallest effect.
    """

    sentence: Sentence
    verdict: Verdict
    by_seed: dict[int, Verdict]
    cases: int
    held: int
    met: int
    outside: int
    counterexample: Case | None
    effects: tuple[Effect, ...] = ()

    @property
    def is_stable(self) -> bool:
        """True where every seed alone gives the same verdict."""
        return all(verdict is self.verdict for verdict in self.by_seed.values())


def judge(sentence: Sentence, cases: Sequence[Case], kind: Kind = Kind.LAW) -> Judgement:
    """Compute the verdict of `cases` on `sentence`.

    Cases outside the text's own hypothesis do not count. A law is judged by all cases at once. A sentence
    with a smallest effect is judged cell by cell, by intervals. Another tendency is judged seed by seed, and
    is undecided where seeds disagree. A condition of ours saves a sentence only where fresh cases confirm it.
    """
    inside = [case for case in cases if case.within]
    usual = [case for case in inside if not case.fresh]
    cells: tuple[Effect, ...] = ()
    by_seed: dict[int, Verdict] = {}
    if sentence.smallest is not None:
        cells = _effects(inside, sentence.smallest)
        verdict = _verdict(sentence, cells)
    else:
        by_seed = _by_seed(sentence, inside)
        verdict = _verdict(sentence, inside)
        if kind is Kind.TENDENCY and by_seed and verdict is not Verdict.NOT_MEASURED:
            verdict = _agreed(list(by_seed.values()), verdict)
    return Judgement(
        sentence=sentence,
        verdict=verdict,
        by_seed={seed: each for seed, each in by_seed.items() if seed in {case.seed for case in usual}},
        cases=len(usual),
        held=sum(case.holds for case in usual),
        met=sum(case.met for case in usual),
        outside=sum(not case.within and not case.fresh for case in cases),
        counterexample=_counterexample(inside),
        effects=cells,
    )


def _verdict(sentence: Sentence, units: Sequence[Case | Effect], *, alone: bool = False) -> Verdict:
    """The verdict of `units`; `alone` is one seed, whose condition nothing else has to confirm."""
    if not any(alone or not unit.fresh for unit in units):
        return Verdict.NOT_MEASURED
    if all(unit.holds is True for unit in units):
        return Verdict.HOLDS
    met = [unit for unit in units if unit.met]
    confirmed = alone or {unit.fresh for unit in met} == {True, False}
    if sentence.condition and met and confirmed and all(unit.holds is True for unit in met):
        return Verdict.CONDITION
    return Verdict.REFUTED if any(unit.holds is False for unit in units) else Verdict.UNDECIDED


def _by_seed(sentence: Sentence, cases: Sequence[Case]) -> dict[int, Verdict]:
    """The verdict of each seed alone; what no seed drew belongs to all of its form, usual or fresh."""
    found = {}
    for seed, fresh in sorted({(case.seed, case.fresh) for case in cases if case.seed is not None}):
        its = [case for case in cases if case.seed == seed or (case.seed is None and case.fresh == fresh)]
        found[seed] = _verdict(sentence, its, alone=True)
    return found


def _agreed(by_seed: Sequence[Verdict], together: Verdict) -> Verdict:
    """The verdict of all cases together; undecided where some seeds refute the sentence and others do not."""
    refuting = sum(verdict is Verdict.REFUTED for verdict in by_seed)
    return together if refuting in (0, len(by_seed)) else Verdict.UNDECIDED


def _effects(cases: Sequence[Case], smallest: float) -> tuple[Effect, ...]:
    cells: dict[tuple[str, bool], list[Case]] = {}
    for case in cases:
        cells.setdefault((case.where, case.fresh), []).append(case)
    return tuple(_effect(where, fresh, each, smallest) for (where, fresh), each in cells.items())


def _effect(where: str, fresh: bool, cases: Sequence[Case], smallest: float) -> Effect:
    by_seed: dict[int | None, list[float]] = {}
    for case in cases:
        by_seed.setdefault(case.seed, []).append(case.value)
    low, mean, high = interval([statistics.fmean(values) for values in by_seed.values()])
    return Effect(
        where=where,
        mean=mean,
        low=low,
        high=high,
        seeds=len(by_seed),
        met=all(case.met for case in cases),
        fresh=fresh,
        holds=True if low >= smallest else False if high < smallest else None,
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Low end, mean and high end of Student's 95 % interval of a mean; infinitely wide for one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return -math.inf, mean, math.inf
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean, mean + half


def _counterexample(cases: Sequence[Case]) -> Case | None:
    failed = [case for case in cases if not case.holds]
    return next((case for case in failed if case.met), failed[0] if failed else None)
