"""Table of a map: cells by scheme, warm-up, depth and learning rate, and the largest rate that trains."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from normscope.maps.record import Record
from normscope.train import last_loss


@dataclass(frozen=True)
class Point:
    """One depth and learning rate of a panel, with all its seeds.

    Attributes:
        depth: number of blocks; None for models other than nn:.
        lr: learning rate.
        records: records of its seeds; empty if the store has no such cell.
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
        """Number of seeds that train."""
        return sum(record.result.verdict == "trains" for record in self.done if record.result)

    @property
    def verdict(self) -> str:
        """ "trains" (every seed), "mixed" (some seeds do), "fails", "crashed" or "missing"."""
        if not self.done:
            crashed = self.records and all(record.state == "crashed" for record in self.records)
            return "crashed" if crashed else "missing"
        if not self.trained:
            return "fails"
        return "trains" if self.trained == len(self.records) else "mixed"

    @cached_property
    def excess(self) -> float:
        """Final loss minus unigram entropy in nats, mean over seeds; inf if one diverged."""
        found = [excess(record) for record in self.done]
        return sum(found) / len(found) if found else math.nan


def excess(record: Record) -> float:
    """Mean of the last losses minus the unigram entropy, in nats; inf if it is not finite."""
    assert record.result is not None
    loss = last_loss(record.result.losses)
    return loss - record.result.unigram_entropy if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class Panel:
    """One scheme, initialisation and warm-up.

    Attributes:
        points: for each depth, a point for each learning rate of the map; both in ascending order.
    """

    scheme: str
    init: str | None
    warmup: int
    points: tuple[tuple[Point, ...], ...]

    @property
    def title(self) -> str:
        """The scheme, with the initialisation if it is not the scheme's own."""
        return self.scheme if self.init is None else f"{self.scheme}, {self.init}"

    @property
    def subtitle(self) -> str:
        """The warm-up as text."""
        return f"warm-up {self.warmup}" if self.warmup else "no warm-up"


def edge(row: Iterable[Point]) -> float | None:
    """The largest learning rate that trains with every seed; None if there is none."""
    rates = [point.lr for point in row if point.verdict == "trains"]
    return max(rates, default=None)


@dataclass(frozen=True)
class Table:
    """A whole map.

    Attributes:
        panels: panels by scheme, initialisation and warm-up, in the order of the cells.
        rates, depths: all values in the map, in ascending order.
        seeds: all seeds in the map.
    """

    panels: tuple[Panel, ...]
    rates: tuple[float, ...]
    depths: tuple[int | None, ...]
    seeds: tuple[int, ...]

    @property
    def points(self) -> list[Point]:
        """All points of all panels."""
        return [point for panel in self.panels for row in panel.points for point in row]

    @property
    def unigram_entropy(self) -> float | None:
        """Unigram entropy of the text; None before the first result."""
        found = (record.result for point in self.points for record in point.done)
        return next((result.unigram_entropy for result in found if result), None)

    @property
    def stops_that_were_wrong(self) -> tuple[int, int]:
        """Among cells that continued after they were certain to fail: how many train, and their number."""
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
