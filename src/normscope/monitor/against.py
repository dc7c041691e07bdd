"""Comparison of two runs: where they part, and the ratio of their figures by step and site."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.grids import Grids
from normscope.monitor.parting import (
    EARLIER,
    LASTING,
    SPREADS,
    Floats,
    Pair,
    common_spread,
    is_linear,
    least_of,
    median,
    part,
    scaled,
)
from normscope.monitor.store import Grid, RunReader
from normscope.report.report import strict
from normscope.rules import figure

NOT_COMPARED = (
    "seconds",
    "tokens",
    "skipped",
    "loss-scale",
    "attention/head-max-logit",
    "attention/head-entropy",
)
"""Quantities that say nothing of the model, or that change places between two runs, as heads do."""
_REST = 10.0
"""Least time between two computations of a parting, in times of what one takes."""
_STAGES = ("lr", "stream/", "branch/", "attention/", "loss", "gradient/")
"""Beginnings of the names of quantities in the order in which a step makes them; the others follow."""


@dataclass(frozen=True)
class Difference:
    """A series in which two runs differ.

    Attributes:
        quantity, site: the series; the site "" is the whole model.
        step: first step of the difference.
        run, good: values of the two runs there, not finite if one went wrong.
        ratio: run / good, the median of the rows that decided; for a linear quantity the difference. NaN
            where one of them is not finite.
        before: the same in the median of all earlier rows.
    """

    quantity: str
    site: str
    step: int
    run: float
    good: float
    ratio: float
    before: float

    @property
    def name(self) -> str:
        """ "stream/rms at blocks.3", or "loss"."""
        return f"{self.quantity} at {self.site}" if self.site else self.quantity

    def to_dict(self) -> dict[str, Any]:
        """The difference as JSON can hold it."""
        return strict(
            {
                name: getattr(self, name)
                for name in ("quantity", "site", "step", "run", "good", "ratio", "before")
            }
        )


@dataclass(frozen=True)
class Parting:
    """Step and series at which two runs part.

    Attributes:
        state: "parted", "together", or "undecided" where they have too few steps in common.
        common: number of steps that both have.
        equal_until: last common step before they differ by more than rounding; None if the first one does.
        where: the series that part at the first step and in its first stage (forward, loss, backward,
            update), by depth; empty unless parted.
        from_start: the series that differ in the first rows already.
        others: number of further series that part, then or later.
        sentence: all this in words.
    """

    state: str
    common: int
    equal_until: int | None
    where: tuple[Difference, ...]
    from_start: tuple[Difference, ...]
    others: int
    sentence: str

    @property
    def step(self) -> int | None:
        """The first step at which they differ; None unless parted."""
        return self.where[0].step if self.where else None

    def to_dict(self) -> dict[str, Any]:
        """The parting as JSON can hold it."""
        return {
            "state": self.state,
            "step": self.step,
            "common_steps": self.common,
            "equal_until": self.equal_until,
            "where": [each.to_dict() for each in self.where],
            "others": self.others,
            "from_start": [each.to_dict() for each in self.from_start],
            "sentence": self.sentence,
        }


@dataclass(frozen=True)
class Comparison:
    """A run beside another one.

    Attributes:
        path: store of the other run.
        last_step: last step of the other run; None before its first.
        loss: loss of the other run; None if it has none.
        heat: `ratio` of the quantity that the scene shows; None if the other run lacks it, or all its sites.
        is_linear: whether `heat` holds differences.
        parting: where they part.
    """

    path: Path
    last_step: int | None
    loss: Grid | None
    heat: Grid | None
    is_linear: bool
    parting: Parting

    @property
    def factors(self) -> Grid | None:
        """`heat` with factors in the place of their logarithms."""
        if self.heat is None or self.is_linear:
            return self.heat
        return replace(
            self.heat, values=np.where(self.heat.present, 2.0 ** np.minimum(self.heat.values, 1023), np.nan)
        )

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON can hold it, without its grids."""
        return {"store": str(self.path), "last_step": self.last_step, "parting": self.parting.to_dict()}


class Rival:
    """Reader of the run that another is compared with.

    Args:
        path: its store.
        whole: see `Grids`.
    """

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        self.path = path
        self._grids = Grids(whole=whole)
        self._parting: Parting | None = None
        self._key: Any = None
        self._rest = 0.0  # when the parting may be computed again, which takes time in a long run

    @property
    def version(self) -> Any:
        """Changes when rows that were read may no longer be in the store."""
        return self._grids.version

    def compared(self, reader: RunReader, grids: Grids, quantity: str, rank: int) -> Comparison:
        """The run of `reader` beside this one, on one rank.

        Raises:
            UsageError: this run's store cannot be read.
        """
        with RunReader(self.path) as mine, mine.one_moment():
            self._grids.look(mine)
            good = {name: self._grids.grid(mine, name, rank) for name in {"loss", quantity}}
            run = grids.grid(reader, quantity, rank)
            other = good[quantity]
            return Comparison(
                self.path,
                mine.last_step,
                good["loss"],
                None
                if run is None or other is None or not _shared(run, other)
                else ratio(run, other, quantity),
                is_linear(quantity),
                self._parted(reader, grids, mine, rank),
            )

    def _parted(self, reader: RunReader, grids: Grids, mine: RunReader, rank: int) -> Parting:
        whose = rank, grids.version, self._grids.version
        key = *whose, reader.last_step, mine.last_step
        is_due = self._key is None or self._key[:3] != whose or time.monotonic() >= self._rest
        if self._parting is None or (key != self._key and is_due):
            begun = time.monotonic()
            run, good = (
                {name: grid for name in each.columns(rank) if (grid := of.grid(each, name, rank)) is not None}
                for each, of in ((reader, grids), (mine, self._grids))
            )
            self._parting, self._key = compare(run, good, self.path.name), key
            now = time.monotonic()
            self._rest = now + _REST * (now - begun)
        return self._parting


def compare(run: Mapping[str, Grid], good: Mapping[str, Grid], name: str = "the other run") -> Parting:
    """Find the step and series at which a run parts from a good one, by the criterion of `parting`.

    Args:
        run: grids of the run by quantity.
        good: grids of the good run by quantity.
        name: name of the good run in the sentence.
    """
    both = [
        each for each in run if each in good and each not in NOT_COMPARED and _shared(run[each], good[each])
    ]
    skipped = _skipped(run) | _skipped(good)
    parted: list[Difference] = []
    from_start: list[Difference] = []
    common, num_judged = 0, 0
    steps: set[int] = set()
    unequal = math.inf
    depths = _depths(run)
    for quantity in both:
        sites = _shared(run[quantity], good[quantity])
        pair = _pair(run[quantity], good[quantity], sites, skipped)
        common = max(common, len(pair.steps))
        if not len(pair.steps):
            continue
        found = part(pair, quantity)
        num_judged += int(found.is_judged.sum())
        steps |= set(pair.steps.tolist())
        unequal = min(unequal, *pair.steps[found.unequal[found.unequal >= 0]], math.inf)
        start = median(found.ratios[:EARLIER])
        much = max(2 * least_of(quantity), SPREADS * common_spread(found.ratios[:EARLIER]))
        for k, site in enumerate(sites):
            series = quantity, site
            if found.row[k] >= 0:
                parted.append(_difference(series, pair, found.ratios, k, int(found.row[k])))
            elif found.is_judged[k] and abs(start[k]) > much:
                from_start.append(_difference(series, pair, found.ratios, k, 0))
    where = _first(parted, depths)
    from_start.sort(key=lambda each: _order(each, depths))
    state = "parted" if where else "together" if num_judged else "undecided"
    equal = max((step for step in steps if step < unequal), default=None)
    others = len(parted) - len(where)
    words = _sentence(state, where, others, from_start, common, bool(both), name)
    if equal is not None:
        words += " They are equal to rounding" + ("." if unequal == math.inf else f" until step {equal}.")
    return Parting(state, common, equal, tuple(where), tuple(from_start), others, words)


def ratio(run: Grid, good: Grid, quantity: str) -> Grid:
    """log₂ (run / good) at the common steps and sites; for a linear quantity the difference.

    A NaN that was measured is a value of one run that is not finite.
    """
    sites = _shared(run, good)
    pair = _pair(run, good, sites, set())
    values = scaled(pair.run, quantity) - scaled(pair.good, quantity)
    broken = ~(np.isfinite(pair.run) & np.isfinite(pair.good))
    present = pair.known & (broken | ~np.isnan(values))
    return Grid(pair.steps, tuple(sites), np.where(present, values, NOT_MEASURED), present)


def _shared(run: Grid, good: Grid) -> list[str]:
    """The sites that both grids have, in the order of the first."""
    return [site for site in run.sites if site in good.sites]


def _pair(run: Grid, good: Grid, sites: Sequence[str], skipped: set[int]) -> Pair:
    steps, of_run, of_good = np.intersect1d(run.steps, good.steps, assume_unique=True, return_indices=True)
    kept = ~np.isin(steps, list(skipped))
    steps, of_run, of_good = steps[kept], of_run[kept], of_good[kept]
    mine = np.array([run.sites.index(site) for site in sites], dtype=np.intp)
    theirs = np.array([good.sites.index(site) for site in sites], dtype=np.intp)
    return Pair(
        steps,
        run.values[np.ix_(of_run, mine)],
        good.values[np.ix_(of_good, theirs)],
        run.present[np.ix_(of_run, mine)] & good.present[np.ix_(of_good, theirs)],
        good.steps,
        np.where(good.present, good.values, np.nan)[:, theirs],
    )


def _skipped(grids: Mapping[str, Grid]) -> set[int]:
    """Steps without an update: what a GradScaler skips is no figure of the model."""
    grid = grids.get("skipped")
    return set() if grid is None else set(grid.steps[grid.values[:, 0] > 0].tolist())


def _difference(series: tuple[str, str], pair: Pair, ratios: Floats, k: int, row: int) -> Difference:
    rows = np.flatnonzero(pair.known[:, k])
    at = rows[rows >= row]
    decided, earlier = ratios[at[:LASTING], k : k + 1], ratios[: max(row, 1), k : k + 1]
    if row == 0:
        decided = earlier = ratios[rows[:EARLIER], k : k + 1]
    said = [float(median(each)[0]) if len(each) else math.nan for each in (decided, earlier)]
    if not is_linear(series[0]):
        said = [2.0 ** min(each, 1023.0) for each in said]
    here = float(pair.run[at[0], k]), float(pair.good[at[0], k])
    is_finite = math.isfinite(here[0]) and math.isfinite(here[1])
    return Difference(*series, int(pair.steps[at[0]]), *here, said[0] if is_finite else math.nan, said[1])


def _first(parted: list[Difference], depths: Mapping[str, float]) -> list[Difference]:
    """The differences of the first step and its first stage, in the order of causes."""
    ordered = sorted(parted, key=lambda each: (each.step, *_order(each, depths)))
    of_first = [
        (each.step, _stage(each.quantity)) == (ordered[0].step, _stage(ordered[0].quantity))
        for each in ordered
    ]
    return [each for each, is_first in zip(ordered, of_first, strict=True) if is_first]


def _order(each: Difference, depths: Mapping[str, float]) -> tuple[float, ...]:
    """Order of causes: within a step the forward by depth; of the backward, the largest first."""
    stage = _stage(each.quantity)
    if stage >= _STAGES.index("gradient/"):
        size = math.inf if math.isnan(each.ratio) else abs(math.log(each.ratio)) if each.ratio > 0 else 0.0
        return stage, not each.site, -size
    return stage, depths.get(each.site, _depth_of(each.site, depths))


def _stage(quantity: str) -> int:
    """Number of the stage of a step that makes the quantity; the forward is one."""
    number = next((i for i, name in enumerate(_STAGES) if quantity.startswith(name)), len(_STAGES))
    return 1 if 1 <= number <= 3 else number


def _depths(grids: Mapping[str, Grid]) -> dict[str, float]:
    """Place of each site of the streams."""
    streams = [grid.sites for name, grid in grids.items() if name.startswith("stream/")]
    deepest = max((len(sites) for sites in streams), default=0)
    longest = next((sites for sites in streams if len(sites) == deepest), ())
    return {site: float(number) for number, site in enumerate(longest)}


def _depth_of(site: str, depths: Mapping[str, float]) -> float:
    """Place of a site inside a block: before the stream that the block returns."""
    parts = site.split(".")
    inside = (depths.get(".".join(parts[:n])) for n in range(len(parts) - 1, 0, -1))
    return next((place - 0.5 for place in inside if place is not None), math.inf)


def _sentence(
    state: str,
    where: Sequence[Difference],
    others: int,
    from_start: Sequence[Difference],
    common: int,
    has_common: bool,
    name: str,
) -> str:
    words = []
    if state == "parted":
        words.append(f"They part at step {where[0].step}: {_said(where[0], name)}.")
        if more := len(where) - 1 + others:
            words.append(f"{more} other series part{'s' * (more == 1)} then or later.")
    elif state == "together":
        words.append(f"They do not part in {common} common steps.")
    elif not has_common or not common:
        what = "step" if has_common else "quantity"
        words.append(f"Undecided: they have no {what} in common.")
    else:
        least = EARLIER + LASTING
        words.append(f"Undecided: they have {common} rows in common, and at least {least} are needed.")
    if from_start:
        also = f", and {len(from_start) - 1} other series differ" if len(from_start) > 1 else ""
        words.append(f"From the first steps on, {_said(from_start[0], name, is_start=True)}{also}.")
    return " ".join(words)


def _said(each: Difference, name: str, is_start: bool = False) -> str:
    """A difference in words: "loss is 3.1 times that of good.db (1.02 times before)"."""
    if math.isnan(each.ratio):
        return f"{each.name} is {figure(each.run)}, and {figure(each.good)} in {name}"
    if is_linear(each.quantity):
        before = "" if is_start or math.isnan(each.before) else f" ({figure(each.before)} before)"
        side = "above" if each.ratio > 0 else "below"
        return f"{each.name} is {figure(abs(each.ratio))} {side} that of {name}{before}"
    before = "" if is_start or math.isnan(each.before) else f" ({figure(each.before)} times before)"
    return f"{each.name} is {figure(each.ratio)} times that of {name}{before}"
