"""Tested claims in words: figures short, the table of a terminal, one claim in full, JSON."""

import datetime
import json
import math
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import normscope
from normscope.claims.cache import environment, own_code
from normscope.claims.evidence import Figure
from normscope.claims.judge import Judgement, Verdict
from normscope.claims.kept import Kept, kept_long
from normscope.claims.look import Look
from normscope.claims.sources import TEXTS
from normscope.claims.tested import Tested

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "normscope.claims/1"
STYLES = {
    Verdict.HOLDS: "green",
    Verdict.CONDITION: "yellow",
    Verdict.REFUTED: "red",
    Verdict.NOT_MEASURED: "dim",
}


def number(value: float) -> str:
    """Three digits: 0.0123, 4.56e-08, 1230."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def figure_words(figure: Figure | None) -> str:
    """`largest error: 3e-16 (2e-16 … 5e-16)`."""
    if figure is None:
        return ""
    spread = (
        ""
        if number(figure.low) == number(figure.high)
        else f" ({number(figure.low)} … {number(figure.high)})"
    )
    return f"{figure.what}: {number(figure.value)}{spread}"


def verdict_words(judgement: Judgement, of: str = "cases") -> str:
    """The verdict, with its condition and how often that is met, and what does not agree."""
    words = str(judgement.verdict)
    if judgement.verdict is Verdict.CONDITION:
        words = f"holds if {judgement.condition}: met in {judgement.met} of {judgement.cases} {of}"
    return words + (f" ({shaky})" if (shaky := shaky_words(judgement)) else "")


def shaky_words(judgement: Judgement) -> str:
    """`on 3 of 5 seeds`: how many alone give the same verdict; "" where all do."""
    if judgement.is_stable:
        return ""
    agree = sum(verdict is judgement.verdict for verdict in judgement.by_seed.values())
    return f"on {agree} of {len(judgement.by_seed)} seeds"


def counter_words(judgement: Judgement) -> str:
    """The case that it is not true of, "" where there is none."""
    case = judgement.counterexample
    return "" if case is None else f"{case.where}: {number(case.value)}"


def kept_words(kept: Kept) -> str:
    """The long result on one line: `refuted: share of steps saved 0.1 (0.05 … 0.2)`."""
    result = kept.result
    said, figure = result["verdict"], result["figure"]
    if said == Verdict.CONDITION and (condition := result["condition"]):
        said = (
            f"holds if {condition['says']}: met in {condition['met']} of {condition['cases']} "
            f"{condition['of']}"
        )
    if figure is not None:
        by_seed = {int(seed): float(value) for seed, value in figure["by_seed"].items()}
        said += f": {figure_words(Figure(figure['what'], by_seed))}"
    return said if kept.is_current else f"{said} (measured by an earlier version of the code)"


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return environment() | {"processor": _processor()}


def _processor() -> str:
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.processor() or platform.machine()


def document(
    tested: Sequence[Tested], look: Look, command: str, seconds: float, missing: Sequence[str] = ()
) -> dict[str, Any]:
    """All of it, for JSON; `docs/claims.md` says what is what."""
    return {
        "schema": SCHEMA,
        "normscope": normscope.__version__,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "seeds": list(look.seeds),
        "long": look.long,
        "text": text_words(look),
        "seconds": round(seconds, 1),
        "texts": [{"id": text.id, "title": text.title, "english": text.english} for text in TEXTS.values()],
        "interrupted_before": list(missing),
        "tally": {str(verdict): count for verdict, count in counts(tested).items()},
        "claims": [
            each.to_dict() | {"digest": own_code(each.claim), "kept_long": _kept(each)} for each in tested
        ],
    }


def text_words(look: Look) -> str:
    """What trained claims train on."""
    return "the Python standard library's source" if look.text is None else look.text.name


def _kept(tested: Tested) -> dict[str, Any] | None:
    kept = None if tested.long else kept_long(tested.claim)
    return None if kept is None else kept.to_dict()


def to_json(
    tested: Sequence[Tested], look: Look, command: str, seconds: float, missing: Sequence[str] = ()
) -> str:
    """`document`, one object; `missing` are the ids that an interrupted run did not come to."""
    given = document(tested, look, command, seconds, missing)
    return json.dumps(given, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def table(tested: Sequence[Tested]) -> "Table":
    """A row a claim, for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rows.add_column("id", no_wrap=True)
    rows.add_column("claim", ratio=5)
    rows.add_column("verdict", ratio=3)
    rows.add_column("figure", ratio=4)
    for each in tested:
        judgement = each.judgement
        said = verdict_words(judgement, each.evidence.of) + (f": {each.reason}" if each.reason else "")
        style = STYLES[judgement.verdict]
        rows.add_row(
            f"[bold]{each.claim.id}[/bold]",
            escape(each.claim.sentence.says),
            f"[{style}]{escape(said)}[/{style}]",
            escape(figure_words(each.evidence.figure)),
        )
    return rows


def counts(tested: Sequence[Tested]) -> dict[Verdict, int]:
    """How many claims have each verdict."""
    return {verdict: sum(each.judgement.verdict is verdict for each in tested) for verdict in Verdict}


def tally(tested: Sequence[Tested]) -> str:
    """`60 claims: 31 hold, 12 hold under a condition, 16 are refuted, 1 is not measured`."""
    if not tested:
        return "no claim was tested"
    numbers = counts(tested)
    parts = ", ".join(
        f"{numbers[verdict]} {_verb(verdict, numbers[verdict])}" for verdict in Verdict if numbers[verdict]
    )
    shaky = sum(not each.judgement.is_stable for each in tested)
    note = f"; {shaky} not the same on every seed" if shaky else ""
    if broken := [each.claim.id for each in tested if each.error]:
        note += f"; {', '.join(broken)} broke"
    return f"{len(tested)} claim{'s' if len(tested) != 1 else ''}: {parts}{note}"


def _verb(verdict: Verdict, number: int) -> str:
    one = number == 1
    return {
        Verdict.HOLDS: "holds" if one else "hold",
        Verdict.CONDITION: f"{'holds' if one else 'hold'} under a condition",
        Verdict.REFUTED: f"{'is' if one else 'are'} refuted",
        Verdict.NOT_MEASURED: f"{'is' if one else 'are'} not measured",
    }[verdict]


def in_full(tested: Tested) -> list[str]:
    """One claim, line by line."""
    claim, evidence, judgement = tested.claim, tested.evidence, tested.judgement
    lines = [f"{claim.id}  {claim.sentence.says}", ""]
    for source in claim.sources:
        quoted = f"  “{source.words}”" if source.words else ""
        lines.append(f"said in   {source.text} {source.where}{quoted}")
    lines += [f"asked     {claim.hypothesis}", f"verdict   {verdict_words(judgement, evidence.of)}"]
    if tested.reason:
        lines.append(f"why       {tested.reason}")
    if counter := counter_words(judgement):
        lines.append(f"counter   {counter}")
    if evidence.figure is not None:
        lines.append(f"figure    {figure_words(evidence.figure)}")
    lines.append(f"cases     {judgement.held} of {judgement.cases} agree")
    for name, part in tested.parts.items():
        lines += [
            "",
            f"besides   {claim.parts[name].says}",
            f"          {verdict_words(part, evidence.population(name))}",
        ]
        if counter := counter_words(part):
            lines.append(f"          {counter}")
    lines += [""] * bool(evidence.notes) + [f"note      {note}" for note in evidence.notes]
    lines += [f"missing   {words}" for words in evidence.unmeasured if evidence.cases]
    if not tested.long and (kept := kept_long(claim)):
        lines += ["", f"--long    {kept_words(kept)}", f"          {kept.where}"]
    lines += [
        "",
        f"took      {tested.seconds:.1f} s{' (kept from before)' if tested.cached else ''}; {claim.file}",
    ]
    return lines
