"""`normscope.diff`: the whole comparison of two models, part by part."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from normscope.anatomy import Anatomy
from normscope.compare.align import align
from normscope.compare.differences import compare_structures, made_up_for, settled_by
from normscope.compare.draws import start_of
from normscope.compare.function import compare as compare_functions
from normscope.compare.given import MapError
from normscope.compare.outcome import Outcome
from normscope.compare.recipe import compare as compare_recipes
from normscope.compare.recipe import recipe_of, recipe_of_report
from normscope.compare.runs import compare_recipes as compare_recipes_of_runs
from normscope.compare.runs import only_blocks, parting, structure_of_run
from normscope.compare.side import NotGivenError, Settings, Side
from normscope.compare.sides import Given, opened
from normscope.compare.sources import with_residual_source
from normscope.compare.start import compare as compare_starts
from normscope.compare.structure import structure_of, structure_of_report
from normscope.compare.types import Compared, Diff, Pair, Part, Place
from normscope.compare.verdict import compare as compare_verdicts
from normscope.errors import UsageError, describe, suggest
from normscope.interrupts import ending_in_order, only_once
from normscope.pipeline import versions
from normscope.report.report import SCHEMA
from normscope.subjects import Subject
from normscope.subjects.memory import available_bytes, gigabytes, is_out_of_memory
from normscope.timing import timed

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`, called at the start of each stage."""
SEEDS = 4
"""Seeds at which fresh weights are drawn."""
COPIES = 3
"""Copies of its weights that a side has in the function part, at most."""
CHECKS = 3
"""Seeds at which both models are checked, where both can be built again."""
NOTHING = Pair(Place("model", ""), Place("model", ""))
"""Structures that were not read."""


class DiffInterrupted(KeyboardInterrupt):
    """Ctrl-C during a comparison; `diff` holds what was compared so far."""

    def __init__(self, diff: Diff) -> None:
        super().__init__("interrupted")
        self.diff = diff


@dataclass
class Comparison:
    """One comparison and its results so far; `result()` may be called at any time.

    Attributes:
        a, b: the two sides.
        parts: the parts to compare, in order.
        given: B's name → A's name of weights that are mapped by hand.
        rtol: largest relative difference that counts as equal; None measures the rounding.
        check, options: whether models are checked for the verdict part, and options of `normscope.check`.
        seed: the first seed of checks.
        reraise: whether an error of a part is raised.
        rows: the aligned structures.
        unread: reasons why they could not be had.
        outcomes: results of the parts so far.
        notes: further facts that a reader must know.
        cost: seconds by stage.
    """

    a: Side
    b: Side
    parts: tuple[Part, ...]
    given: Mapping[str, str]
    rtol: float | None
    check: bool
    options: Mapping[str, Any]
    seed: int
    reraise: bool
    rows: Pair = NOTHING
    unread: tuple[str, ...] = ()
    outcomes: dict[Part, Outcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)

    def result(self) -> Diff:
        """The comparison so far; a part that was not reached is "not compared"."""
        late = "the comparison was interrupted before this part"
        outcomes = [self.outcomes.get(part, Outcome(Compared(part, "not", (late,)))) for part in self.parts]
        both = [note for note in self.a.notes if note in self.b.notes]
        notes = [f"A and B: {note}" for note in both]
        sides = (("A", self.a), ("B", self.b))
        notes += [f"{name}: {note}" for name, side in sides for note in side.notes if note not in both]
        return Diff(
            a=self.a.spec,
            b=self.b.spec,
            rows=self.rows,
            parts=tuple(each.compared for each in outcomes),
            differences=tuple(found for each in outcomes for found in each.differences),
            weights=next((each.weights for each in outcomes if each.weights is not None), None),
            notes=(*notes, *self.notes, *(note for each in outcomes for note in each.notes)),
            cost=self.cost | {"total": round(sum(self.cost.values()), 4)},
            versions=versions(),
        )


def diff(
    a: Given,
    b: Given,
    *,
    parts: str | Iterable[str] | None = None,
    map: Mapping[str, str] | str | Path | None = None,
    check: bool | Mapping[str, Any] = False,
    rtol: float | None = None,
    batch: Any = None,
    seed: int = 0,
    batch_size: int = 4,
    seq_len: int = 64,
    text: Path | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    progress: Progress | None = None,
    reraise: bool = False,
) -> Diff:
    """Compare two models: structure, start, recipe, function and verdict. Both are left as they were.

    Args:
        a, b: each a MODEL as for `load`, `git:REV:path.py:factory`, a saved report (report.json, run.db), a
            file with the command of a training script, a module, a `Subject`, a `Run`, a `Report`, or a
            function that builds a module.
        parts: the parts to compare, such as "structure,function"; None compares all that the two allow, and
            the verdicts only if both are reports or `check` is set.
        map: for weights that cannot be mapped otherwise, B's name → A's name, or a JSON or TOML file of them.
        check: whether to check both models, for the verdict part; a mapping gives options of
            `normscope.check`.
        rtol: largest relative difference of two tensors that counts as equal; None measures the rounding.
        batch: the batch of both sides, for modules; None makes one.
        seed: seed of weights and batches.
        batch_size, seq_len, text: sequences per batch, tokens per sequence, and text of a made input.
        device, dtype: device, and type of floating-point tensors ("bfloat16"), of models that are loaded.
        progress: called as `progress(stage, done, total)`.
        reraise: raise the error of a part instead of reporting the part as not compared.

    Raises:
        UsageError: a side or an argument cannot be used.
        DiffInterrupted: Ctrl-C; its `.diff` holds what was compared so far.
    """
    wanted = parts_of(parts)
    if rtol is not None and not 0 < rtol < 1:
        raise UsageError(f"rtol {rtol!r}", "a number between 0 and 1", "1e-9 compares closely, 1e-3 loosely")
    given = _map_of(map)
    options = dict(check) if isinstance(check, Mapping) else {}
    is_checked = bool(check) or check == {} or (parts is not None and Part.VERDICT in wanted)
    settings = Settings(seed, batch_size, seq_len, text, device, dtype, options, find_loss=is_checked)
    told = progress or (lambda stage, done, total: None)
    before = time.perf_counter()
    told("loading", 0, len(wanted) + 2)
    with ending_in_order(), only_once(), opened(a, b, settings, batch) as (side_a, side_b):
        is_checked = is_checked or (side_a.is_saved and side_b.is_saved)
        run = Comparison(side_a, side_b, wanted, given, rtol, is_checked, options, seed, reraise)
        run.cost["loading"] = round(time.perf_counter() - before, 4)
        try:
            _compare(run, told)
        except KeyboardInterrupt as stop:
            run.notes.append("interrupted: what was compared so far is shown")
            raise DiffInterrupted(run.result()) from stop
        return run.result()


def parts_of(given: str | Iterable[str] | None, option: str = "parts") -> tuple[Part, ...]:
    """The parts that are named, in the order in which they are compared; None is all.

    Raises:
        UsageError: a name is none of a part.
    """
    if given is None:
        return tuple(Part)
    names = [name.strip() for name in (given.split(",") if isinstance(given, str) else given)]
    known = [str(part) for part in Part]
    for name in names:
        if name not in known:
            raise UsageError(
                f'{option} "{name}"',
                ", ".join(known) + ", with commas between",
                suggest(name, known, "choose"),
            )
    return tuple(part for part in Part if part in names)


def _map_of(given: Mapping[str, str] | str | Path | None) -> Mapping[str, str]:
    if given is None or isinstance(given, Mapping):
        return given or {}
    from normscope.compare.given import read_map

    return read_map(Path(given))


def _compare(run: Comparison, progress: Progress) -> None:
    """Compare the parts that are wanted."""
    total = len(run.parts) + 2
    progress("reading", 1, total)
    with timed(run.cost, "reading"):
        _align(run)
    for done, part in enumerate(run.parts, start=2):
        progress(str(part), done, total)
        with timed(run.cost, str(part)):
            run.outcomes[part] = _outcome(run, part)
    _weigh(run)
    progress("done", total, total)


def _weigh(run: Comparison) -> None:
    """Drop the differences of the structure that the function part settles, or the weights make up for."""
    structure, function = run.outcomes.get(Part.STRUCTURE), run.outcomes.get(Part.FUNCTION)
    if structure is None or function is None or function.compared.how != "whole":
        return
    kept = structure.differences
    notes: tuple[str, ...] = ()
    if function.are_given and (function.settled or not function.differences):
        kept, notes = made_up_for(kept, {each.name for each in function.differences})
    kept, settled = settled_by(function, kept, run.rows)
    notes += settled
    said = structure.compared.said if kept or structure.compared.said else "the same structure"
    compared = dataclasses.replace(structure.compared, said=said)
    run.outcomes[Part.STRUCTURE] = dataclasses.replace(
        structure, compared=compared, differences=kept, notes=(*structure.notes, *notes)
    )


def _outcome(run: Comparison, part: Part) -> Outcome:
    """One part; where a side cannot give what it needs, or it fails, it is "not compared" with the reason."""
    try:
        return _PARTS[part](run)
    except _NotError as reason:
        return Outcome(Compared(part, "not", reason.args))
    except NotGivenError as reason:
        return Outcome(Compared(part, "not", (f"one of the two {reason}",)))
    except UsageError as error:
        if run.reraise or isinstance(error, MapError):
            raise
        return Outcome(Compared(part, "not", (str(error),)))
    except Exception as error:  # one part that fails must not lose the others
        if run.reraise or is_out_of_memory(error):
            raise
        return Outcome(Compared(part, "not", (f"it failed with {describe(error)}",)))


class _NotError(Exception):
    """The part is not compared; the arguments are the reasons."""


def _of_both(run: Comparison, get: Callable[[Side], Any]) -> tuple[Any, Any]:
    """`get` of both sides; raises `_NotError` with the reason of each side that cannot give it."""
    values: list[Any] = []
    reasons: dict[str, str] = {}
    for name, side in (("A", run.a), ("B", run.b)):
        try:
            values.append(get(side))
        except NotGivenError as reason:
            reasons[name] = str(reason)
    if len(reasons) == 2 and reasons["A"] == reasons["B"]:
        raise _NotError(f"each of the two {reasons['A']}")
    if reasons:
        raise _NotError(*(f"{name} {reason}" for name, reason in reasons.items()))
    return values[0], values[1]


def _align(run: Comparison) -> None:
    """Read both models, each once, and align their structures."""

    def place(side: Side) -> Place:
        if not side.is_saved:
            found: Place = side.read(structure_of)
            return found
        report = side.report()
        if "held" in report:
            of_run = structure_of_run(report["held"])
            if of_run is None:
                raise NotGivenError("is a run that stored no residual stream")
            return of_run
        if "anatomy" not in report:
            raise NotGivenError("is the report of a run, without a structure")
        return structure_of_report(report)

    try:
        a, b = _of_both(run, place)
        run.rows = align(only_blocks(a), only_blocks(b)) if _runs(run) else align(a, b)
    except _NotError as reason:
        run.unread = reason.args


def _structure(run: Comparison) -> Outcome:
    if run.unread:
        raise _NotError(*run.unread)
    found = compare_structures(run.rows)
    read = [(name, place) for name, place in (("A", run.rows.a), ("B", run.rows.b)) if place is not None]
    if not found and not any(place.parts for _, place in read):
        raise _NotError("no residual stream was read in A and B")
    saved = [name for name, side in (("A", run.a), ("B", run.b)) if side.is_saved]
    kind = "the store of a run has only the blocks" if _runs(run) else "a report has few facts"
    why = [f"{' and '.join(saved)}: {kind} of its model's structure"] if saved else []
    why += [f"{name}: {line}" for name, place in read for line in place.facts.get("unread") or ()]
    said = "" if found else "the same structure"
    return Outcome(Compared(Part.STRUCTURE, "partly" if why else "whole", tuple(why), said), found)


def _start(run: Comparison) -> Outcome:
    a, b = _of_both(run, lambda side: side.start(start_of, tuple(range(SEEDS))))
    return compare_starts(a, b, run.rows)


def _recipe(run: Comparison) -> Outcome:
    def get(side: Side) -> Any:
        found = recipe_of_report(side.report()) if side.is_saved else side.read(recipe_of)
        if found is None:
            raise NotGivenError("has no recipe; a factory that returns a normscope.Run has one")
        return found

    runs = _runs(run)
    if not all(each["rates"] for each in runs):
        raise _NotError("a run has stored no learning rate")
    if len(runs) == 2:
        return compare_recipes_of_runs(*runs)
    if runs:
        raise _NotError("one is a run, of whose recipe only the learning rate is stored")
    a, b = _of_both(run, get)
    return compare_recipes(a, b, run.rows)


def _runs(run: Comparison) -> list[Mapping[str, Any]]:
    """The data of the sides that are stores of runs."""
    saved = [side.report() for side in (run.a, run.b) if side.is_saved]
    return [report["held"] for report in saved if "held" in report]


def _function(run: Comparison) -> Outcome:
    sizes = _of_both(run, lambda side: side.run(_num_weights))
    needed, room = 8 * COPIES * sum(sizes), available_bytes(torch.device("cpu"))
    if room is not None and needed > room:
        raise _NotError(f"it needs {gigabytes(needed)} for copies in float64, and {gigabytes(room)} are free")
    found = compare_functions(run.a, run.b, run.rows, run.given, run.rtol)
    return with_residual_source(found, compare_structures(run.rows))


def _num_weights(subject: Subject, anatomy: Anatomy) -> int:
    """Number of parameters of a side."""
    return sum(parameter.numel() for parameter in subject.model.parameters())


def _verdict(run: Comparison) -> Outcome:
    if not run.check:
        raise _NotError("it takes a check of both models: --check runs them")
    saved = [side.report() for side in (run.a, run.b) if side.is_saved]
    if len(saved) == 1 and saved[0].get("schema") != SCHEMA:
        raise _NotError("one is a run, the other one a model, and a check of the model has other figures")
    options = (_as_checked(saved[0]) if len(saved) == 1 else {}) | dict(run.options)
    seeds = tuple(range(run.seed, run.seed + (1 if saved else CHECKS)))
    a, b = _of_both(run, lambda side: side.reports(options, seeds))
    outcome = compare_verdicts(a, b)
    if len(runs := _runs(run)) < 2:
        return outcome
    if not all(each["rates"] or each["streams"] for each in runs):
        raise _NotError("a run has no step yet")
    return dataclasses.replace(outcome, differences=(*outcome.differences, *parting(*runs)))


def _as_checked(report: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the check that a report comes from, as far as it says them."""
    trial = report.get("forecast") or {"steps": 0}
    found = {"steps": trial.get("steps"), "budget": report["budget"].get("name")}
    return {name: value for name, value in found.items() if value is not None}


_PARTS: dict[Part, Callable[[Comparison], Outcome]] = {
    Part.STRUCTURE: _structure,
    Part.START: _start,
    Part.RECIPE: _recipe,
    Part.FUNCTION: _function,
    Part.VERDICT: _verdict,
}
