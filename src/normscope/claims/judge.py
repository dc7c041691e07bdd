"""`judge`: from cases to a verdict. The only place where verdicts come from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from normscope.claims.claim import Kind, Sentence
from normscope.claims.evidence import Case


class Verdict(StrEnum):
    """What became of a sentence."""

    HOLDS = "holds"
    CONDITION = "holds under a condition"
    REFUTED = "refuted"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict and what it rests on.

    Attributes:
        verdict: of all seeds together.
        by_seed: of each seed alone.
        cases, held: how many cases there are, and of how many the sentence is true.
        met: in how many its condition is met.
        condition: the sentence's, "" for none.
        counterexample: a case that meets the condition and that the sentence is not true of; where there is
            none, one that does not meet it.
    """

    verdict: Verdict
    by_seed: dict[int, Verdict]
    cases: int
    held: int
    met: int
    condition: str
    counterexample: Case | None

    @property
    def is_stable(self) -> bool:
        """Whether every seed alone gives the same verdict."""
        return all(verdict is self.verdict for verdict in self.by_seed.values())


def judge(sentence: Sentence, cases: Sequence[Case], kind: Kind = Kind.LAW) -> Judgement:
    """What `cases` say about `sentence`.

    A law is judged by all cases at once. A tendency is judged seed by seed, and has the verdict that most
    seeds give; where two verdicts are given by as many, it has the less favourable one.
    """
    by_seed = {
        seed: _verdict(sentence, [case for case in cases if case.seed == seed])
        for seed in sorted({case.seed for case in cases})
    }
    return Judgement(
        verdict=_verdict(sentence, cases) if kind is Kind.LAW or not by_seed else _most(by_seed),
        by_seed=by_seed,
        cases=len(cases),
        held=sum(case.holds for case in cases),
        met=sum(case.met for case in cases),
        condition=sentence.condition,
        counterexample=_counterexample(cases),
    )


def _verdict(sentence: Sentence, cases: Sequence[Case]) -> Verdict:
    if not cases:
        return Verdict.NOT_MEASURED
    if all(case.holds for case in cases):
        return Verdict.HOLDS
    met = [case for case in cases if case.met]
    if sentence.condition and met and all(case.holds for case in met):
        return Verdict.CONDITION
    return Verdict.REFUTED


def _most(by_seed: dict[int, Verdict]) -> Verdict:
    counts = Counter(by_seed.values())
    strictness = [Verdict.REFUTED, Verdict.CONDITION, Verdict.HOLDS, Verdict.NOT_MEASURED]
    return max(strictness, key=lambda verdict: counts[verdict])  # the first of equals


def _counterexample(cases: Sequence[Case]) -> Case | None:
    failed = [case for case in cases if not case.holds]
    return next((case for case in failed if case.met), failed[0] if failed else None)
