"""A plan as text."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from normscope.planning.result import WITHOUT_DEVICE, Plan, Row
from normscope.planning.sizes import in_words

NOT_INCLUDED = (
    "Not included: memory of the framework (a CUDA context takes some hundred MB), of compiled code, and "
    "fragmentation."
)


_LESS = "On a GPU, dropout and attention with dropout save less"
ON_CPU = f"This peak is a CPU's. {_LESS}: there, add --device cuda."
INSTEAD_OF_DEVICE = f"This peak is a CPU's, because the device cannot hold the weights. {_LESS}."
_UNBROKEN = "\N{NO-BREAK SPACE}"


def text(plan: Plan, width: int | None = None) -> str:
    """The plan in words, with tables; in lines of at most `width` columns, if one is given."""
    return "\n".join(_lines(plan, width)) + "\n"


def _lines(plan: Plan, width: int | None) -> Iterator[str]:
    for paragraph in _head(plan):
        yield from _wrapped(paragraph, width)
    yield ""
    yield from _peaks(plan, width)
    yield ""
    yield from _saved(plan.rows, width)
    for paragraph in _foot(plan):
        yield from _wrapped(paragraph, width)


def _head(plan: Plan) -> Iterator[str]:
    """The peak, and beside it what it holds for."""
    yield f"{plan.model}, {plan.optimizer}, {plan.precision}: {plan.input}"
    yield f"Peak of a training step: {in_words(plan.before.peak)}, in the {_moment(plan.before.moment)}"
    if plan.memory is not None:
        yield _verdict(plan)
    if plan.device == "cpu":
        yield INSTEAD_OF_DEVICE if WITHOUT_DEVICE in plan.notes else ON_CPU
    yield NOT_INCLUDED


def _foot(plan: Plan) -> Iterator[str]:
    if plan.recompute:
        yield ""
        yield f"Recompute {len(plan.recompute)} modules: {', '.join(shortened(plan.recompute))}"
        yield "In a script: normscope.recompute(model, paths); the JSON lists the paths."
    notes = [note for note in plan.notes if note != WITHOUT_DEVICE]  # that one is in the head
    if notes:
        yield ""
    yield from (f"Note: {note}" for note in notes)


def _wrapped(paragraph: str, width: int | None) -> list[str]:
    if width is None or not paragraph:
        return [paragraph]
    whole = re.sub(r"(\d) (?=([KMGT]i)?B\b)", rf"\1{_UNBROKEN}", paragraph)  # a figure and its unit
    lines = textwrap.wrap(whole, width, break_on_hyphens=False)
    return [line.replace(_UNBROKEN, " ") for line in lines]


def _moment(moment: str) -> str:
    return moment if moment == "optimizer step" else f"{moment} pass"


def _verdict(plan: Plan) -> str:
    assert plan.memory is not None, "called with a limit"
    limit = in_words(plan.memory)
    if not plan.recompute:
        return f"It fits into {limit} as it is."
    return (
        f"With recomputation: {in_words(plan.peak)}, which fits into {limit}; it adds {plan.added_flops:.1%} "
        f"floating-point operations to forward and backward pass, about {plan.added_time:.0%} of their time"
    )


def _peaks(plan: Plan, width: int | None) -> Iterator[str]:
    columns = [plan.before, plan.after] if plan.recompute else [plan.before]
    titles = ["as it is", "planned"][: len(columns)]
    yield from _table(
        ["at the peak", *titles],
        [
            [held.value, *(in_words(each.at_peak.get(held, 0)) for each in columns)]
            for held in dict.fromkeys(held for each in columns for held in each.at_peak)
        ],
        width,
    )


def _saved(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """One line for parts whose paths differ in numbers alone."""
    alike: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        alike.setdefault((re.sub(r"\d+", "*", row.path), row.kind), []).append(row)
    lines = [
        [
            path,
            kind,
            in_words(sum(row.saved for row in found)),
            "" if kind == "outside" else f"{sum(row.recomputed for row in found)} of {len(found)}",
        ]
        for (path, kind), found in alike.items()
    ]
    yield from _table(["saved for the backward pass", "kind", "bytes", "recomputed"], lines, width)


def _table(head: list[str], lines: list[list[str]], width: int | None) -> Iterator[str]:
    """A table, or where `width` is too small for it a list: a figure is never broken over two lines."""
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    if width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        yield from _list(head, lines, width)
        return
    numbers = [column for column in range(1, len(head)) if any("iB" in line[column] for line in lines)]
    for line in [head, *lines]:
        cells = [
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _list(head: list[str], lines: list[list[str]], width: int) -> Iterator[str]:
    """The cells of each row under its first."""
    yield f"{head[0]}:"
    for first, *others in lines:
        yield from _wrapped(first, width)
        items = [f"{name} {cell}" for name, cell in zip(head[1:], others, strict=True) if cell]
        joined = " · ".join(item.replace(" ", _UNBROKEN) for item in items)
        wrapped = textwrap.wrap(joined, width, initial_indent="  ", subsequent_indent="  ")
        yield from (line.replace(_UNBROKEN, " ") for line in wrapped)


def shortened(paths: Iterable[str]) -> list[str]:
    """Paths whose first numbers follow each other as one: "h.0–3.mlp"."""
    ranges: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        found = re.search(r"(?<=\.)\d+(?=\.|$)", path)
        if found is None:
            ranges[path, ""] = []
        else:
            ranges.setdefault((path[: found.start()], path[found.end() :]), []).append(int(found[0]))
    return [f"{before}{run}{after}" for (before, after), numbers in ranges.items() for run in _runs(numbers)]


def _runs(numbers: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs] or [""]
