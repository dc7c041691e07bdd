"""Failing runs of other data than bytes, fixed before any remedy was tried on them.

They are runs of the ladders in `benchmarks/regimes/cases.py` whose outcome is kept in `regimes/truth.jsonl`.
The rule that chose them:

1. Tokens (vocabularies up to 4096; a larger one costs too much), pairs, images and series. The ladders that
   are seen or held out there are so here; those that are fresh or last there are fresh here.
2. For each ladder, the smallest learning rate above the largest one that trains in all three replicas, at
   which all three fail; and the rate two steps of `RATES` above it, or the largest of `RATES` if that is
   nearer. A user has such a run after a guess that is a little too large, or far too large.
3. A ladder that trains in all replicas at no rate of `RATES` gives 1e-3 and 5e-3, the rates that people try
   first. Some of them can only be rescued by a change of the model.
4. Runs whose rate is too small are left out. They do not fail: the forecast calls them slow, and tries no
   remedy, because `check --forecast` names the larger rate to use.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.regimes.case import RATES, Case
from benchmarks.regimes.cases import CASES

USUAL = (1e-3, 5e-3)
"""Learning rates of the runs of a ladder that trains at no rate."""
ABOVE = 2
"""Steps of `RATES` between the two runs of a ladder."""


@dataclass(frozen=True)
class FailingRun:
    """A ladder at a learning rate at which all replicas fail.

    Attributes:
        ladder: regime and name of the case, as in `regimes/truth.jsonl`.
    """

    ladder: str
    lr: float

    @property
    def case(self) -> Case:
        """The model, its data and its optimiser."""
        return next(case for case in CASES if self.ladder == f"{case.regime}: {case.name}")

    @property
    def regime(self) -> str:
        """Name of the kind of data."""
        return self.ladder.partition(": ")[0]

    @property
    def words(self) -> str:
        """The run on one line."""
        return f"{self.ladder}, {self.lr:g}"


SEEN = [
    FailingRun("tokens: post 8 32 v512 tied", 1e-3),
    FailingRun("tokens: post 8 32 v512 tied", 5e-3),
    FailingRun("tokens: deepnorm 10 32 v2048 tied", 1e-2),
    FailingRun("tokens: deepnorm 10 32 v2048 tied", 2e-2),
    FailingRun("tokens: plain post 6 48 v512", 1e-2),
    FailingRun("tokens: plain post 6 48 v512", 2e-2),
    FailingRun("pairs: post 4 32 bytes", 5e-3),
    FailingRun("pairs: post 4 32 bytes", 2e-2),
    FailingRun("pairs: deepnorm 6 32 bytes", 1e-2),
    FailingRun("pairs: deepnorm 6 32 bytes", 2e-2),
    FailingRun("pairs: bart 3 48 v512", 5e-3),
    FailingRun("pairs: bart 3 48 v512", 2e-2),
    FailingRun("vision: post 8 32", 5e-3),
    FailingRun("vision: post 8 32", 2e-2),
    FailingRun("vision: deepnorm 12 32", 1e-2),
    FailingRun("vision: deepnorm 12 32", 2e-2),
    FailingRun("series: plain post 6 32", 2e-2),
    FailingRun("series: post 12 32", 5e-3),
    FailingRun("series: post 12 32", 2e-2),
]
"""Runs on which the ranking is set."""

HELD_OUT = [
    FailingRun("tokens: post 7 48 v1024", 2e-3),
    FailingRun("tokens: post 7 48 v1024", 1e-2),
    FailingRun("tokens: keel 6 48 v4096 tied", 2e-2),
    FailingRun("tokens: plain post 9 32 v1024 tied", 5e-3),
    FailingRun("tokens: plain post 9 32 v1024 tied", 2e-2),
    FailingRun("tokens: deepnorm 14 32 v1024", 2e-2),
    FailingRun("tokens: mix-ln 8 32 v4096", 2e-2),
    FailingRun("tokens: opt post 6 48 v1024", 5e-3),
    FailingRun("tokens: opt post 6 48 v1024", 2e-2),
    FailingRun("pairs: post 6 32 v1024", 2e-3),
    FailingRun("pairs: post 6 32 v1024", 1e-2),
    FailingRun("pairs: admin 5 32 bytes", 1e-2),
    FailingRun("pairs: admin 5 32 bytes", 2e-2),
    FailingRun("pairs: marian 5 32 bytes", 1e-3),
    FailingRun("pairs: marian 5 32 bytes", 5e-3),
    FailingRun("pairs: pegasus 4 48 bytes", 1e-3),
    FailingRun("pairs: pegasus 4 48 bytes", 5e-3),
    FailingRun("vision: post 12 48", 2e-3),
    FailingRun("vision: post 12 48", 1e-2),
    FailingRun("vision: vit-msn 6 32", 5e-3),
    FailingRun("vision: vit-msn 6 32", 2e-2),
    FailingRun("vision: peri 9 32", 1e-3),
    FailingRun("vision: peri 9 32", 5e-3),
    FailingRun("vision: post 5 32", 5e-3),
    FailingRun("vision: post 5 32", 2e-2),
    FailingRun("vision: vit 10 48", 2e-3),
    FailingRun("vision: vit 10 48", 1e-2),
    FailingRun("series: plain post 10 48", 5e-3),
    FailingRun("series: plain post 10 48", 2e-2),
    FailingRun("series: post 7 48", 5e-3),
    FailingRun("series: post 7 48", 2e-2),
]
"""Runs on which remedies are ranked once, when the ranking is set."""

FRESH = [
    FailingRun("tokens: post 6 64 v2048", 2e-3),
    FailingRun("tokens: post 6 64 v2048", 1e-2),
    FailingRun("tokens: plain post 5 48 v4096 tied", 5e-3),
    FailingRun("tokens: plain post 5 48 v4096 tied", 2e-2),
    FailingRun("pairs: post 5 48 v512", 1e-3),
    FailingRun("pairs: post 5 48 v512", 5e-3),
    FailingRun("pairs: bart 4 32 bytes", 5e-3),
    FailingRun("pairs: bart 4 32 bytes", 2e-2),
    FailingRun("pairs: marian 4 48 v512", 1e-3),
    FailingRun("pairs: marian 4 48 v512", 5e-3),
    FailingRun("pairs: pegasus 3 32 v1024", 1e-3),
    FailingRun("pairs: pegasus 3 32 v1024", 5e-3),
    FailingRun("pairs: scaled marian 4 32 bytes", 5e-3),
    FailingRun("pairs: scaled marian 4 32 bytes", 2e-2),
    FailingRun("vision: pre 10 48", 2e-3),
    FailingRun("vision: pre 10 48", 1e-2),
    FailingRun("vision: post 7 48", 2e-3),
    FailingRun("vision: post 7 48", 1e-2),
    FailingRun("vision: deepnorm 8 48", 1e-2),
    FailingRun("vision: deepnorm 8 48", 2e-2),
    FailingRun("vision: sub-ln 5 32", 2e-2),
    FailingRun("vision: vit 4 32", 1e-2),
    FailingRun("series: deepnorm 6 48", 2e-2),
    FailingRun("pairs: deepnorm 4 48 v512", 1e-2),
    FailingRun("pairs: deepnorm 4 48 v512", 2e-2),
    FailingRun("pairs: bart 3 32 v512", 5e-3),
    FailingRun("pairs: bart 3 32 v512", 2e-2),
    FailingRun("vision: mix-ln 6 32", 1e-2),
    FailingRun("vision: mix-ln 6 32", 2e-2),
    FailingRun("vision: post 10 32", 2e-3),
    FailingRun("vision: post 10 32", 1e-2),
    FailingRun("vision: vit 7 48", 2e-3),
    FailingRun("vision: vit 7 48", 1e-2),
    FailingRun("vision: res-post 7 32", 2e-3),
    FailingRun("vision: res-post 7 32", 1e-2),
    FailingRun("vision: keel 6 48", 1e-2),
    FailingRun("vision: keel 6 48", 2e-2),
    FailingRun("vision: pre 4 32", 5e-3),
    FailingRun("vision: pre 4 32", 2e-2),
    FailingRun("series: plain post 5 32", 2e-2),
]
"""Runs that were fixed before whole runs decided between remedies, of the later ladders."""

REGIMES = ("tokens", "pairs", "vision", "series")
LARGEST_VOCABULARY = 4096


def by_the_rule(truth: Iterable[Mapping[str, Any]], part: str) -> Iterator[FailingRun]:
    """The runs of a part that the rule above chooses from the runs that were trained."""
    trained: dict[str, dict[float, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for run in truth:
        trained[run["case"]][run["lr"]].append(run["trains"])
    for case in CASES:
        ladder = f"{case.regime}: {case.name}"
        if case.regime in REGIMES and case.part == part and ladder in trained and not _costs_much(case):
            yield from (FailingRun(ladder, rate) for rate in _rates(trained[ladder]))


def _costs_much(case: Case) -> bool:
    sizes = [int(word[1:]) for word in case.name.split() if word.startswith("v") and word[1:].isdigit()]
    return any(size > LARGEST_VOCABULARY for size in sizes)


def _rates(trained: Mapping[float, Sequence[bool]]) -> list[float]:
    """Learning rates of the runs of one ladder."""
    fail = [rate for rate in RATES if not any(trained[rate])]
    train = [rate for rate in RATES if all(trained[rate])]
    if not train:
        return [rate for rate in USUAL if rate in fail]
    above = [rate for rate in fail if rate > max(train)]
    if not above:
        return []
    further = RATES[min(RATES.index(above[0]) + ABOVE, len(RATES) - 1)]
    return sorted({above[0], further} & set(above))
