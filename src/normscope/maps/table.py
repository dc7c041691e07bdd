"""Table of a map: cells by scheme, warm-up, depth and learning rate, over seeds; the edge of each depth."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from normscope.maps.record import Record
from normscope.train import last_loss


@dataclass(frozen=True)
class Point:
    """One depth and rate of a panel, with all its seeds.

    Attributes:
        depth: blocks, None for a model whose depth is not ours to say.
        lr: the rate.
        records: records of its seeds; none where the store has no such cell.
    """

    depth: int | None
    lr: float
    records: tuple[Record, ...] = ()

    @cached_property
    def done(self) -> tuple[Record, ...]:
        """Records with a result."""
        return tuple(record for record in self.records if record.result is not None)

    @property
    def trained(self) -> int:
        """Seeds that train."""
        return sum(record.result.verdict == "trains" for record in self.done if record.result)

    @property
    def verdict(self) -> str:
        """trains (every seed), mixed (some do, the others do not or not yet), fails, crashed, or missing."""
        if not self.done:
            crashed = self.records and all(record.state == "crashed" for record in self.records)
            return "crashed" if crashed else "missing"
        if not self.trained:
            return "fails"
        return "trains" if self.trained == len(self.records) else "mixed"

    @cached_property
    def excess(self) -> float:
        """Loss at the end less the unigram entropy, in nats, mean over seeds; inf where one diverged."""
        found = [excess(record) for record in self.done]
        return sum(found) / len(found) if found else math.nan


def excess(record: Record) -> float:
    """Mean of the last losses less the unigram entropy, inf where that is not finite."""
    assert record.result is not None
    loss = last_loss(record.result.losses)
    return loss - record.result.unigram_entropy if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class Panel:
    """One scheme, initialisation and warm-up.

    Attributes:
        points: for each depth, ascending, those of all the map's rates, ascending.
    """

    scheme: str
    init: str | None
    warmup: int
    points: tuple[tuple[Point, ...], ...]

    @property
    def title(self) -> str:
        """The scheme, and its initialisation where that is not its own."""
        return self.scheme if self.init is None else f"{self.scheme}, {self.init}"

    @property
    def subtitle(self) -> str:
        """The warm-up in words."""
        return f"warm-up {self.warmup}" if self.warmup else "no warm-up"


def edge(row: Iterable[Point]) -> float | None:
    """The largest rate that trains with every seed, None where none does."""
    rates = [point.lr for point in row if point.verdict == "trains"]
    return max(rates, default=None)


@dataclass(frozen=True)
class Table:
    """A whole map.

    Attributes:
        panels: panels by scheme, initialisation and warm-up, in the order in which the cells came.
        rates, depths: values of any panel, ascending.
        seeds: seeds of any cell.
    """

    panels: tuple[Panel, ...]
    rates: tuple[float, ...]
    depths: tuple[int | None, ...]
    seeds: tuple[int, ...]

    @property
    def points(self) -> list[Point]:
        """All of them."""
        return [point for panel in self.panels for row in panel.points for point in row]

    @property
    def unigram_entropy(self) -> float | None:
        """Unigram entropy of the text; None before the first result."""
        found = (record.result for point in self.points for record in point.done)
        return next((result.unigram_entropy for result in found if result), None)

    @property
    def stops_that_were_wrong(self) -> tuple[int, int]:
        """Counts of the cells that went on after they were certain to fail: those that train, and all."""
        went_on = [
            record.result
            for point in self.points
            for record in point.done
            if record.result and record.result.certain is not None and not record.result.stopped
            if math.isfinite(record.result.losses[-1])
        ]
        return sum(result.verdict == "trains" for result in went_on), len(went_on)


def tabulate(records: Sequence[Record]) -> Table:
    """The table of a store's records."""
    rates = sorted({record.cell.lr for record in records})
    depths = sorted({record.cell.depth for record in records}, key=lambda depth: depth or 0)
    by_place: dict[tuple, list[Record]] = {}
    for record in records:
        cell = record.cell
        by_place.setdefault((cell.scheme, cell.init, cell.warmup, cell.depth, cell.lr), []).append(record)
    names = dict.fromkeys((r.cell.scheme, r.cell.init, r.cell.warmup) for r in records)
    panels = [
        Panel(
            *name,
            tuple(
                tuple(Point(depth, lr, tuple(by_place.get((*name, depth, lr), ()))) for lr in rates)
                for depth in depths
            ),
        )
        for name in sorted(names, key=lambda name: (name[2], list(names).index(name)))
    ]
    seeds = sorted({record.cell.seed for record in records})
    return Table(tuple(panels), tuple(rates), tuple(depths), tuple(seeds))
