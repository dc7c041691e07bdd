"""Report of the quantisation probe: the most harmful places, outlier channels, the other placement."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from normscope.probes import Measurements
from normscope.probes.quantisation import FORMATS, GRANULARITIES, PARTS
from normscope.report.console import NOTHING
from normscope.report.figure_table import FigureTable
from normscope.report.sites import compress, shorten
from normscope.rules import figure

MOST_RANKS = 3
"""Places of each ranking that are shown."""
HEAD = ("rounded alone", "place", "SQNR, dB", "output", "loss")
ABOUT = "Each place is rounded alone, the most harmful first; nothing else is rounded."


@dataclass(frozen=True)
class RankedPlace:
    """One line of the table: a rounding, a place of the first ranks, and its figures where measured."""

    rounding: str
    part: str
    site: str
    sqnr: float | None
    change: float | None
    loss: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The line in words; the change of the output in percent."""
        change = NOTHING if self.change is None else f"{figure(100 * self.change, 3)} %"
        sqnr = NOTHING if self.sqnr is None else f"{self.sqnr:.1f}"
        loss = NOTHING if self.loss is None else f"{'+' * (self.loss >= 0)}{figure(self.loss, 2)}"
        return self.rounding, f"{self.part} {self.site}", sqnr, change, loss


def first_ranked(measurements: Measurements, most: int = MOST_RANKS) -> Iterator[RankedPlace]:
    """The first places of each ranking; none where the probe did not run."""
    for format in FORMATS:
        for granularity in GRANULARITIES:
            yield from _first(measurements, f"{format}-{granularity}", most)


def _first(measurements: Measurements, name: str, most: int) -> Iterator[RankedPlace]:
    by_rank: dict[int, tuple[str, str]] = {}  # a tensor that has two names keeps the first
    for part in PARTS:
        for site, rank in measurements.of(f"quantisation/{part}-{name}-rank").items():
            by_rank.setdefault(int(rank), (part, site))
    for rank in sorted(by_rank)[:most]:
        part, site = by_rank[rank]
        found = [
            measurements.of(f"quantisation/{part}-{name}-{stat}").get(site)
            for stat in ("sqnr", "harm", "loss-change")
        ]
        yield RankedPlace(name.replace("-", " per "), part, site, *found)


def rounding_table(measurements: Measurements, width: int) -> FigureTable | None:
    """The first places of each ranking as a table; None where the probe did not run or ranked nothing."""
    rows = [row.cells for row in first_ranked(measurements)]
    if not rows:
        return None
    room = width - 50 if width >= 66 else width  # too narrow for columns: a place has a line
    table = FigureTable(*HEAD, figures=HEAD[2:])
    shown = ""
    for rounding, place, *figures in rows:
        table.add_row(Text("" if rounding == shown else rounding), Text(shorten(place, room)), *figures)
        shown = rounding
    return table


def rounding_in_words(measurements: Measurements) -> Iterator[tuple[str, str]]:
    """Outlier channels and the other placement, label and words; nothing where the probe did not run."""
    names = {row.quantity for row in measurements}
    if "quantisation/all" in names or not any(name.startswith("quantisation/") for name in names):
        return
    yield "outlier", outliers_in_words(measurements)
    for format in FORMATS:
        if words := placement_in_words(measurements, f"{format}-tensor"):
            yield format, words


def outliers_in_words(measurements: Measurements) -> str:
    """Outlier channels of the stream and of norms: "stream channels 5, 17 in blocks.2…blocks.5"."""
    by_channels: dict[tuple[str, tuple[float, ...]], list[str]] = {}
    for part in ("stream", "norm"):
        for row in measurements:
            if (
                row.quantity == f"quantisation/{part}-outlier-channels"
                and isinstance(row.value, tuple)
                and row.value
            ):
                by_channels.setdefault((part, row.value), []).append(row.site)
    ratio = max(measurements.of("quantisation/stream-outlier-ratio").values(), default=None)
    largest = "" if ratio is None else f"; largest ratio in the stream {figure(ratio, 3)}"
    if not by_channels:
        return f"no channel reaches 6 × the median channel{largest}"
    said = [
        f"{part} channels {_channels(channels)} in {compress(sites)}"
        for (part, channels), sites in list(by_channels.items())[:4]
    ]
    more = f" and {len(by_channels) - 4} more" if len(by_channels) > 4 else ""
    return f"at least 6 × the median channel: {'; '.join(said)}{more}{largest}"


def _channels(channels: tuple[float, ...]) -> str:
    shown = ", ".join(f"{channel:.0f}" for channel in channels[:8])
    return shown + (f" and {len(channels) - 8} more" if len(channels) > 8 else "")


def placement_in_words(measurements: Measurements, name: str) -> str:
    """The whole stream in a format, as it is and with the norms moved; "" where that was not measured.

    Without a counterpart, what the norms gain stands instead.
    """
    here = measurements.of(f"quantisation/stream-{name}-together").get("")
    if here is None:
        return ""
    words = f"the whole stream, {name.replace('-', ' per ')}: the output changes by {figure(100 * here, 3)} %"
    row = measurements.find(f"quantisation/counterpart-stream-{name}-together")
    if row is not None and isinstance(row.value, float):
        made = row.how.removeprefix("exact; ")
        return f"{words}; {figure(100 * row.value, 3)} % in {made}"
    gains = list(measurements.of(f"quantisation/norm-{name}-gain").values())
    if not gains:
        return words
    spread = f"{min(gains):+.1f} … {max(gains):+.1f}"
    words += f"; the SQNR of a norm's output is {statistics.median(gains):+.1f} dB against its input's"
    return f"{words} (median; {spread}), an estimate of what storing normed values would change"
