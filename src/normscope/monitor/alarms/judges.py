"""Judges: all alarms over a stream of rows."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from normscope.monitor.alarms import decline
from normscope.monitor.alarms.attention import EntropyCollapse
from normscope.monitor.alarms.columns import Floats, Look, is_measured
from normscope.monitor.alarms.forgets import Forgets
from normscope.monitor.alarms.growth import Growth
from normscope.monitor.alarms.precision import Freeze, Headroom
from normscope.monitor.alarms.ranks import Ranks
from normscope.monitor.alarms.rescued import Rescued
from normscope.monitor.alarms.rise import Rise
from normscope.monitor.alarms.spikes import KINDS, Spikes
from normscope.monitor.alarms.tokens import Collapse, Stuck
from normscope.monitor.alarms.wrong import Skipped, Wrong
from normscope.monitor.row import GARBAGE, Layout
from normscope.rules import Finding


class _Judge(Protocol):
    def feed(self, look: Look) -> Iterator[Finding]: ...


class _Bench:
    """The judges of one layout on one rank."""

    def __init__(self, layout: Layout, notes: Mapping[str, Any]) -> None:
        self.layout = layout
        quantities = {quantity for quantity, _ in layout}
        self.rates = np.array([i for i, (name, _) in enumerate(layout) if name == "lr"], dtype=np.intp)
        self.judges: list[_Judge] = [Wrong(layout)]
        self.judges += [Spikes(kind, layout) for kind in KINDS if kind.quantities & quantities]
        rest: list[Any] = [
            Skipped(layout),
            Rescued(layout),
            Growth(layout),
            EntropyCollapse(layout),
            Collapse(layout, notes),
            Stuck(layout, notes),
            decline.branches(layout),
            decline.gains(layout),
            Rise(layout),
            Forgets(layout),
            Headroom(layout, notes),
            Freeze(layout, notes),
        ]
        self.judges += [judge for judge in rest if len(judge.columns)]


class Judges:
    """Alarms over the rows of a run, as they come.

    A row costs O(columns), amortised. Rows of several ranks may be fed in any order within a step; with one
    rank there is nothing to compare.

    Args:
        notes: facts about the run that some alarms need: "entropy" (unigram entropy of the targets in nats),
            "tokens" (False where the model is not fed token ids), "dtype" ("float16", of the autocast if
            there is one), "weights" (their own dtype), "ranks" (their number), "sharded" (True where a rank
            holds a part of the weights only).
    """

    def __init__(self, notes: Mapping[str, Any] | None = None) -> None:
        self._notes = notes if notes is not None else {}
        self._benches: dict[tuple[int, Layout], _Bench] = {}
        self._ranks: dict[Layout, Ranks] = {}
        self._latest: dict[tuple[int, int], _Bench] = {}
        self._rates: dict[int, float] = {}
        self._paths: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    def feed(self, step: int, layout: Layout, values: ArrayLike, *, rank: int = 0) -> list[Finding]:
        """Judge one row; the alarms that it raises, values that are not finite first.

        Args:
            step: optimizer step. A step before the last one begins anew: the run went back.
            layout: (quantity, site) of each value.
            values: [columns]; `NOT_MEASURED` where the step has none, any other NaN is a value.

        Raises:
            ValueError: the row does not fit the layout.
        """
        row = np.asarray(values, dtype=np.float64)
        if row.shape != (len(layout),):
            raise ValueError(f"{len(layout)} columns in the layout, but values of shape {row.shape}")
        if step < self._steps.get(rank, step):
            self._forget(rank)
        bench = self._bench(rank, layout)
        look = self._look(step, rank, row, bench)
        found = [finding for judge in bench.judges for finding in judge.feed(look)]
        if len(self._steps) > 1:
            if layout not in self._ranks:
                self._ranks[layout] = Ranks(layout, self._notes)
            found += self._ranks[layout].feed(look)
        return found

    def _look(self, step: int, rank: int, row: Floats, bench: _Bench) -> Look:
        measured = is_measured(row)
        usable = measured & np.isfinite(row)
        usable[usable] = np.abs(row[usable]) <= GARBAGE
        rates = row[bench.rates][usable[bench.rates]]
        if len(rates):
            self._rates[rank] = float(rates.max())
        steps = step - self._steps.get(rank, step - 1)
        path = self._paths[rank] = self._paths.get(rank, 0.0) + steps * self._rates.get(rank, 1.0)
        self._steps[rank] = step
        among = f" on rank {rank}" if len(self._steps) > 1 else ""
        return Look(step, rank, row, usable, measured, self._rates.get(rank), path, among)

    def _bench(self, rank: int, layout: Layout) -> _Bench:
        """The bench of a layout; hashing a long one at every row is avoided where it is the same object."""
        latest = self._latest.get((rank, len(layout)))
        if latest is not None and latest.layout is layout:
            return latest
        if (rank, layout) not in self._benches:
            self._benches[rank, layout] = _Bench(layout, self._notes)
        bench = self._latest[rank, len(layout)] = self._benches[rank, layout]
        bench.layout = layout
        return bench

    def _forget(self, rank: int) -> None:
        del self._steps[rank], self._paths[rank]
        self._rates.pop(rank, None)
        self._ranks.clear()
        self._benches = {key: bench for key, bench in self._benches.items() if key[0] != rank}
        self._latest = {key: bench for key, bench in self._latest.items() if key[0] != rank}
