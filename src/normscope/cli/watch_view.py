"""Picture of a run in a terminal: state, loss, heat map of depth by step, alarms, first wrong value.

A column of the sparkline or the heat map covers one or more steps, and a row of the map one or more sites. It
shows the value that is farthest from the median of all; a value that is not finite comes before all others.
"""

import math
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from normscope.cli.map_progress import duration
from normscope.monitor.scene import COLOURS
from normscope.report.console import as_text, indented
from normscope.report.sites import shorten
from normscope.rules import figure

if TYPE_CHECKING:
    from normscope.monitor.row import Event, Raised
    from normscope.monitor.scene import Scene
    from normscope.monitor.store import Grid

BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", ".:-=+*#%"
"""Levels from low to high, and the same for a terminal that has ASCII only."""
NOT_FINITE = "!"
_BROKEN, _NONE = -1, -2
_STATES = {
    "running": "bold green",
    "silent": "bold yellow",
    "gone": "bold red",
    "failed": "bold red",
    "ended": "bold cyan",
}
_SEVERITIES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_MOST_ROWS, _LEAST_ROWS = 16, 4
_MOST_ALARMS, _MOST_EVENTS, _MOST_RANKS = 8, 3, 8
_OF_EARLIER = "  (before the run was resumed)"
_LABEL, _NARROW, _WIDE = 24, 12, 60


def picture(
    scene: "Scene", width: int, height: int | None = None, ascii_only: bool = False
) -> list[RenderableType]:
    """The picture, `width` columns wide and at most `height` lines high, where fewer can still tell it."""
    levels = PLAIN if ascii_only else BLOCKS
    above = list(_above(scene, width, levels))
    most, below = _MOST_ALARMS, list(_below(scene, _MOST_ALARMS))
    if height is None:
        return [*above, *_map(scene, width, _MOST_ROWS, levels), *below]
    while most > 1 and _lines([*above, *below], width) + _LEAST_ROWS + 2 > height:
        most //= 2
        below = list(_below(scene, most))
    rows = height - _lines([*above, *below], width) - 2
    return [*above, *_map(scene, width, max(_LEAST_ROWS, min(_MOST_ROWS, rows)), levels), *below]


def _lines(parts: list[RenderableType], width: int) -> int:
    return as_text(lambda _: parts, width).count("\n")


def _above(scene: "Scene", width: int, levels: str) -> Iterator[RenderableType]:
    """Parts above the heat map."""
    yield _head(scene)
    yield Text(_pace(scene))
    if apart := _apart(scene):
        yield Text(apart, style="bold yellow")
    if scene.wrong is not None:
        yield Text("")
        yield from _wrong(scene.wrong, len(scene.ranks) > 1, _is_of_earlier(scene, scene.wrong))
    if scene.against is not None:
        yield Text("")
        yield Text.assemble((f"against {scene.against.path.name}", "bold cyan"))
        yield indented(Text(scene.against.parting.sentence), 2)
    if scene.loss is not None:
        yield Text("")
        yield from spark(scene.loss, width, levels)
    if scene.against is not None and scene.against.loss is not None:
        yield from spark(scene.against.loss, width, levels, f"loss of {scene.against.path.name}")
    yield Text("")


def _map(scene: "Scene", width: int, height: int, levels: str) -> Iterator[RenderableType]:
    ratios = None if scene.against is None else scene.against.factors
    if scene.against is not None and ratios is not None and len(ratios.steps):
        what = "minus" if scene.against.is_linear else "ratio to"
        title = f"{scene.quantity}, {what} {scene.against.path.name}"
        yield from _heat(ratios, title, width, height, levels)
    elif scene.heat is not None:
        yield from _heat(scene.heat, scene.quantity, width, height, levels)
    elif not scene.is_over:
        yield Text("no row of all sites yet", style="dim")


def _below(scene: "Scene", most: int) -> Iterator[RenderableType]:
    """Parts below the heat map."""
    yield Text("")
    yield from _alarms(scene, most)
    for event in scene.events[-_MOST_EVENTS:]:
        where = _where(event.step, [event.rank] if len(scene.ranks) > 1 else [])
        yield Text(f"{where}  {event.kind}  {event.sentence}", style="dim")


def _head(scene: "Scene") -> Text:
    words = {
        "silent": f"silent for {duration(scene.silence)}",
        "gone": f"gone: {scene.reason}",
        "failed": f"failed: {scene.reason}",
    }
    name = scene.notes.get("model")
    model = f"  {name}" if isinstance(name, str) else ""
    return Text.assemble(
        (scene.path.name, "bold"),
        model,
        "  ",
        (words.get(scene.state, scene.state), _STATES[scene.state]),
        (f"  {len(scene.ranks)} ranks" if len(scene.ranks) > 1 and not scene.reason else "", "dim"),
    )


def _pace(scene: "Scene") -> str:
    """Step, loss, learning rate and speed, as far as they are known."""
    several = f"rank {scene.rank}  " if len(scene.ranks) > 1 else ""
    step, planned = scene.last_step_of(scene.rank), scene.notes.get("steps")
    if step is None:
        return f"{several}no step yet"
    parts = [f"{several}step {step}" + (f" of {planned}" if isinstance(planned, int) else "")]
    loss, entropy, rate = scene.figure("loss"), scene.notes.get("entropy"), scene.figure("lr")
    if loss is not None:
        parts.append(f"loss {_figure(loss)}")
        if isinstance(entropy, int | float) and math.isfinite(entropy):
            less = entropy - loss
            side = f", {_figure(abs(less))} {'below' if less > 0 else 'above'}" if math.isfinite(less) else ""
            parts[-1] += f" (entropy {_figure(entropy)}{side})"
    if rate is not None:
        parts.append(f"lr {_figure(rate)}")
    if scene.step_seconds is not None:
        parts.append(f"{_figure(scene.step_seconds)} s/step")
    if scene.tokens_per_second is not None:
        parts.append(f"{_figure(scene.tokens_per_second)} tokens/s")
    return "  ".join(parts)


def _apart(scene: "Scene") -> str:
    """Ranks that are gone or have written no row while others have, "" where there are none."""
    parts = []
    for each in scene.ranks if len(scene.ranks) > 1 else ():
        last = scene.last_step_of(each.rank)
        if each.is_gone:
            parts.append(f"rank {each.rank} is gone" + (f" after step {last}" if last else ""))
        elif last is None and scene.last_step is not None:
            parts.append(f"rank {each.rank} has written no row")
    more = len(parts) - _MOST_RANKS
    return "; ".join(parts[:_MOST_RANKS]) + (f"; {more} more" if more > 0 else "")


def _wrong(event: "Event", several: bool, is_of_earlier: bool) -> Iterator[RenderableType]:
    where = _where(event.step, [event.rank] if several else [])
    more = _OF_EARLIER if is_of_earlier else ""
    yield Text.assemble((f"first wrong value  {where}", "bold red"), (more, "dim"))
    yield indented(Text(event.sentence), 2)


def spark(loss: "Grid", width: int, levels: str, name: str = "loss") -> Iterator[Text]:
    """Sparkline of a loss with its extremes."""
    yield _title(name, loss, levels)
    yield _strip(_condensed(loss, 1, width, len(levels))[0], levels)


def _heat(heat: "Grid", quantity: str, width: int, height: int, levels: str) -> Iterator[Text]:
    """Heat map: a row per site, or per group of neighbours; steps from left to right."""
    groups = _groups(len(heat.sites), height)
    more = [f" (+{len(group) - 1})" if len(group) > 1 else "" for group in groups]
    names = [heat.sites[group[0]] + rest for group, rest in zip(groups, more, strict=True)]
    margin = min(_LABEL if width >= _WIDE else _NARROW, max(map(len, names)))
    yield _title(quantity, heat, levels)
    rows = _condensed(heat, height, width - margin - 1, len(levels))
    for name, row in zip(names, rows, strict=True):
        short = shorten(name, margin) if levels is BLOCKS else name[-margin:]
        yield Text.assemble((f"{short:>{margin}} ", "dim"), _strip(row, levels), no_wrap=True)


def _title(quantity: str, grid: "Grid", levels: str) -> Text:
    """Name of a quantity, with its steps, its extremes and the number of values that are not finite."""
    shown = grid.values[grid.present]
    finite = shown[np.isfinite(shown)]
    text = Text.assemble((quantity, "bold"), (f"  steps {grid.steps[0]} to {grid.steps[-1]}", "dim"))
    if len(finite):
        low, high = _figure(finite.min()), _figure(finite.max())
        text.append(f"  {levels[0]} {low} to {levels[-1]} {high}", "dim")
        text.append(" (log scale)" if (finite > 0).all() else "", "dim")
    if broken := len(shown) - len(finite):
        text.append(f"  {NOT_FINITE} not finite: {broken}", "bold red")
    return text


def _condensed(grid: "Grid", rows: int, columns: int, levels: int) -> NDArray[np.int64]:
    """Levels [≤ rows, ≤ columns]: 0 to levels - 1, `_BROKEN` for not finite, `_NONE` without a value."""
    usable = grid.present & np.isfinite(grid.values)
    values = np.where(usable, grid.values, np.nan)
    if (values[usable] > 0).all():
        values = np.log10(values)
    halves = values / 2  # the range of two large values can overflow
    low, high = (np.min(halves[usable]), np.max(halves[usable])) if usable.any() else (0.0, 0.0)
    pairs = zip(halves.T, usable.T, strict=True)
    usual = np.array([np.median(column[mask]) if mask.any() else 0.0 for column, mask in pairs])
    distance = np.where(usable, np.abs(halves - usual), -1.0)
    by_site = _groups(len(grid.sites), rows)
    by_step = np.array_split(np.arange(len(grid.steps)), min(columns, len(grid.steps)))
    found = np.full((len(by_site), len(by_step)), _NONE)
    for i, sites in enumerate(by_site):
        for j, steps in enumerate(by_step):
            block = np.ix_(steps, sites)
            if (grid.present[block] & ~usable[block]).any():
                found[i, j] = _BROKEN
            elif usable[block].any():
                value = halves[block].flat[np.argmax(distance[block])]
                share = (value - low) / (high - low) if high > low else 0.0
                found[i, j] = min(levels - 1, int(share * levels))
    return found


def _groups(count: int, most: int) -> list[NDArray[np.int64]]:
    """Indices 0 to count - 1 in at most `most` runs of equal length; the last may be shorter."""
    size = -(-count // most)
    return [np.arange(first, min(first + size, count)) for first in range(0, count, size)]


def _strip(row: NDArray[np.int64], levels: str) -> Text:
    text = Text(no_wrap=True)
    for level, run in groupby(row.tolist()):
        if level == _BROKEN:
            character, colour = NOT_FINITE, "bold red"
        else:
            character, colour = (" ", "") if level == _NONE else (levels[level], COLOURS[level])
        text.append(character * len(list(run)), colour)
    return text


def _alarms(scene: "Scene", most: int) -> Iterator[RenderableType]:
    """The last alarms, newest last; one that several ranks raised at the same step is shown once."""
    folded: dict[Any, list[Raised]] = {}
    for alarm in scene.alarms:
        folded.setdefault((alarm.attempt, alarm.step, alarm.finding.code), []).append(alarm)
    last = list(folded.values())[-most:]
    if not last:
        yield Text("no alarms", style="dim")
        return
    earlier = len(folded) - len(last)
    yield Text.assemble(("alarms", "bold"), (f"  {earlier} earlier" if earlier else "", "dim"))
    for alarms in last:
        yield _alarm(alarms, len(scene.ranks) > 1, _is_of_earlier(scene, alarms[0]))


def _alarm(alarms: "list[Raised]", several: bool, is_of_earlier: bool) -> RenderableType:
    finding = alarms[0].finding
    severity = str(finding.severity)
    return indented(
        Text.assemble(
            _where(alarms[0].step, [alarm.rank for alarm in alarms] if several else []) + "  ",
            (severity, _SEVERITIES[severity]),
            (f"  {finding.code} {finding.name}  ", "bold"),
            finding.message,
            (_OF_EARLIER if is_of_earlier else "", "dim"),
        ),
        2,
    )


def _is_of_earlier(scene: "Scene", record: "Raised | Event") -> bool:
    """True if the run was resumed since."""
    return any(each.rank == record.rank and record.attempt < each.attempt for each in scene.ranks)


def _where(step: int, ranks: list[int]) -> str:
    unique = sorted(set(ranks))
    if not unique:
        return f"step {step}"
    listed = ", ".join(map(str, unique[:_MOST_RANKS])) + (", ..." if len(unique) > _MOST_RANKS else "")
    return f"step {step}, rank{'s' if len(unique) > 1 else ''} {listed}"


def _figure(value: Any) -> str:
    return figure(float(value))
