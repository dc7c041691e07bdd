"""`Tested`: a claim that was put to the test, as it is kept and shown."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normscope.claims.claim import Claim
from normscope.claims.evidence import Case, Evidence, Figure, Line, Plot
from normscope.claims.judge import Judgement, judge


@dataclass(frozen=True, kw_only=True)
class Tested:
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
        """Of the claim's own sentence."""
        return self._judged("")

    @property
    def parts(self) -> dict[str, Judgement]:
        """Of its parts, by their sentences' names."""
        return {name: self._judged(name) for name in self.claim.parts}

    @property
    def reason(self) -> str:
        """Why it is not measured, "" where it is."""
        if self.evidence.cases:
            return ""
        return self.error or "; ".join(self.evidence.unmeasured)

    def _judged(self, part: str) -> Judgement:
        sentence = self.claim.parts[part] if part else self.claim.sentence
        return judge(sentence, [case for case in self.evidence.cases if case.part == part], self.claim.kind)

    def to_dict(self) -> dict[str, Any]:
        """For `--format json`: what is said, the verdict, the figure, the condition, the seconds."""
        claim, judgement, figure = self.claim, self.judgement, self.evidence.figure
        return {
            "id": claim.id,
            "says": claim.sentence.says,
            "sources": [dataclasses.asdict(source) for source in claim.sources],
            "hypothesis": claim.hypothesis,
            "kind": str(claim.kind),
            **_verdict(judgement, self.evidence.of),
            "figure": None if figure is None else _figure(figure),
            "parts": [
                {
                    "name": name,
                    "says": claim.parts[name].says,
                    **_verdict(part, self.evidence.population(name)),
                }
                for name, part in self.parts.items()
            ],
            "plots": [_plot(plot) for plot in self.evidence.plots],
            "notes": list(self.evidence.notes),
            "unmeasured": list(self.evidence.unmeasured),
            "reason": self.reason or None,
            "code": claim.file,
            "long": self.long,
            "seconds": round(self.seconds, 3),
            "cached": self.cached,
        }

    def to_cache(self) -> dict[str, Any]:
        """What `from_cache` reads; the claim itself comes from the code."""
        return {
            "id": self.claim.id,
            "evidence": dataclasses.asdict(self.evidence),
            "seconds": self.seconds,
            "long": self.long,
            "error": self.error,
        }

    @classmethod
    def from_cache(cls, claim: Claim, values: Mapping[str, Any]) -> "Tested":
        """The same as was kept."""
        given = values["evidence"]
        figure = given["figure"]
        plots = [plot | {"lines": [Line(**line) for line in plot["lines"]]} for plot in given["plots"]]
        evidence = Evidence(
            **given
            | {
                "cases": [Case(**case) for case in given["cases"]],
                "figure": None
                if figure is None
                else Figure(figure["what"], {int(seed): v for seed, v in figure["by_seed"].items()}),
                "plots": [Plot(**plot) for plot in plots],
            }
        )
        return cls(
            claim=claim,
            evidence=evidence,
            seconds=values["seconds"],
            long=values["long"],
            error=values["error"],
            cached=True,
        )


def _verdict(judgement: Judgement, of: str) -> dict[str, Any]:
    counter = judgement.counterexample
    return {
        "verdict": str(judgement.verdict),
        "condition": None
        if not judgement.condition
        else {"says": judgement.condition, "met": judgement.met, "cases": judgement.cases, "of": of},
        "cases": judgement.cases,
        "held": judgement.held,
        "counterexample": None
        if counter is None
        else {"where": counter.where, "seed": counter.seed, "value": _number(counter.value)},
        "stable": judgement.is_stable,
        "verdict_by_seed": {str(seed): str(verdict) for seed, verdict in judgement.by_seed.items()},
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "what": figure.what,
        "value": _number(figure.value),
        "low": _number(figure.low),
        "high": _number(figure.high),
        "by_seed": {str(seed): _number(value) for seed, value in figure.by_seed.items()},
    }


def _plot(plot: Plot) -> dict[str, Any]:
    return {
        "title": plot.title,
        "x": plot.x,
        "y": plot.y,
        "log": plot.log,
        "levels": {name: _number(level) for name, level in plot.levels.items()},
        "lines": [
            {
                "name": line.name,
                "marks": line.marks,
                **{
                    name: [_number(float(value)) for value in getattr(line, name)]
                    for name in ("x", "y", "low", "high")
                },
            }
            for line in plot.lines
        ],
    }


def _number(value: float) -> float | str:
    """JSON has no infinity, and no NaN."""
    return value if math.isfinite(value) else str(value)
