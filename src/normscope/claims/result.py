"""`ClaimResult`: a claim that was tested, as it is kept and shown."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normscope.claims.claim import Claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.judge import Judgement, judge
from normscope.claims.plots import Line, Plot

ALL = "all"
"""Key of a figure that no seed drew, in JSON."""


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim, what was measured, and what follows.

    Attributes:
        claim: what was tested.
        evidence: what was measured.
        seconds: what that took.
        long: whether it was the long form.
        error: what went wrong, on one line; then there is no evidence.
        cached: whether it was measured earlier, by the same code in the same environment.
    """

    claim: Claim
    evidence: Evidence
    seconds: float
    long: bool = False
    error: str | None = None
    cached: bool = False

    @property
    def judgement(self) -> Judgement:
        """Judgement of the claim's own sentence."""
        return self._judged("")

    @property
    def parts(self) -> dict[str, Judgement]:
        """Judgement of each part, by the part's name."""
        return {name: self._judged(name) for name in self.claim.parts}

    @property
    def reason(self) -> str:
        """Reason why it is not measured, "" where it is."""
        if self.evidence.cases:
            return ""
        return self.error or "; ".join(self.evidence.unmeasured)

    def _judged(self, part: str) -> Judgement:
        sentence = self.claim.sentences[part]
        return judge(sentence, [case for case in self.evidence.cases if case.part == part], self.claim.kind)

    def to_dict(self) -> dict[str, Any]:
        """The result for `--format json`: sentence, verdict, figure, condition, plots, seconds."""
        claim, evidence = self.claim, self.evidence
        parts = [{"name": name, **_verdict(part)} for name, part in self.parts.items()]
        given = {
            "id": claim.id,
            "says_zh": claim.says_zh,
            "sources": [dataclasses.asdict(source) for source in claim.sources],
            "asks": claim.asks,
            "kind": str(claim.kind),
            **_verdict(self.judgement),
            "figure": evidence.figure and _figure(evidence.figure),
            "parts": parts,
            "plots": [dataclasses.asdict(plot) for plot in evidence.plots],
            "notes": list(evidence.notes),
            "unmeasured": list(evidence.unmeasured),
            "reason": self.reason or None,
            "code": claim.file,
            "long": self.long,
            "seconds": round(self.seconds, 3),
            "cached": self.cached,
        }
        return {key: _for_json(value) for key, value in given.items()}

    def to_cache(self) -> dict[str, Any]:
        """Record that `from_cache` reads; the claim itself comes from the code."""
        evidence = dataclasses.asdict(self.evidence)
        if self.evidence.figure is not None:
            evidence["figure"]["by_seed"] = _by_seed(self.evidence.figure)
        taken = {"seconds": self.seconds, "long": self.long, "error": self.error}
        return {"id": self.claim.id, "evidence": evidence, **taken}

    @classmethod
    def from_cache(cls, claim: Claim, values: Mapping[str, Any]) -> "ClaimResult":
        """The result that was kept, its plots in the claim's present words."""
        given = dict(values["evidence"])
        given["cases"] = [Case(**case) for case in given["cases"]]
        if (figure := given["figure"]) is not None:
            by_seed = {None if seed == ALL else int(seed): value for seed, value in figure["by_seed"].items()}
            given["figure"] = Figure(figure["what"], by_seed)
        given["plots"] = [
            Plot(**{**(words or plot), "lines": [Line(**line) for line in plot["lines"]]})
            for plot, words in zip(given["plots"], claim.plots or itertools.repeat(None), strict=False)
        ]
        taken = {name: values[name] for name in ("seconds", "long", "error")}
        return cls(claim=claim, evidence=Evidence(**given), **taken, cached=True)


def _verdict(judgement: Judgement) -> dict[str, Any]:
    sentence, counter = judgement.sentence, judgement.counterexample
    condition = {
        "says": sentence.condition,
        "met": judgement.met,
        "cases": judgement.cases,
        "of": sentence.of,
    }
    return {
        "says": sentence.says,
        "verdict": str(judgement.verdict),
        "hypothesis": sentence.hypothesis or None,
        "outside": judgement.outside,
        "condition": condition if sentence.condition else None,
        "smallest": sentence.smallest,
        "effects": [dataclasses.asdict(effect) for effect in judgement.effects],
        "cases": judgement.cases,
        "held": judgement.held,
        "counterexample": counter and {name: getattr(counter, name) for name in ("where", "seed", "value")},
        "stable": judgement.is_stable,
        "verdict_by_seed": {str(seed): str(verdict) for seed, verdict in judgement.by_seed.items()},
    }


def _figure(figure: Figure) -> dict[str, Any]:
    numbers = {name: getattr(figure, name) for name in ("value", "low", "high")}
    return {"what": figure.what, **numbers, "by_seed": _by_seed(figure)}


def _by_seed(figure: Figure) -> dict[str, float]:
    return {ALL if seed is None else str(seed): value for seed, value in figure.by_seed.items()}


def _for_json(value: Any) -> Any:
    """The same with words for what JSON has no number for: infinity and NaN."""
    if isinstance(value, dict):
        return {key: _for_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
