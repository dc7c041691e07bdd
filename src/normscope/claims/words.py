"""Tested claims in words: short figures, the table of a terminal, one claim in full, JSON."""

import dataclasses
import datetime
import json
import math
import platform
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import normscope
from normscope.claims.cache import environment, own_code
from normscope.claims.evidence import Figure
from normscope.claims.judge import Effect, Judgement, Verdict
from normscope.claims.kept import Kept, kept_long
from normscope.claims.result import ClaimResult
from normscope.claims.setup import Setup
from normscope.claims.sources import TEXTS, Source

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "normscope.claims/2"


class Sign(NamedTuple):
    """Look of a verdict: class of the style sheet, mark beside the colour, short name, Chinese, terminal."""

    name: str
    mark: str
    short: str
    chinese: str
    style: str


SIGNS = {
    Verdict.HOLDS: Sign("holds", "✓", "holds", "成立", "green"),
    Verdict.CONDITION: Sign("condition", "◐", "under our condition", "在我们的条件下成立", "yellow"),
    Verdict.REFUTED: Sign("refuted", "✗", "refuted", "不成立", "red"),
    Verdict.UNDECIDED: Sign("undecided", "?", "undecided", "无法判定", "magenta"),
    Verdict.NOT_MEASURED: Sign("unmeasured", "–", "not measured", "未测量", "dim"),
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
    low, high = number(figure.low), number(figure.high)
    spread = "" if low == high else f" ({low} … {high})"
    return f"{figure.what}: {number(figure.value)}{spread}"


def verdict_words(judgement: Judgement, strong: str = "") -> str:
    """The verdict, with `strong` around it, its condition or hypothesis, and what does not agree."""
    shaky = shaky_words(judgement)
    words = f"{strong}{judgement.verdict}{strong}{condition_words(judgement)}"
    return words + (f" ({shaky})" if shaky else "")


def condition_words(judgement: Judgement) -> str:
    """`: x < 1; met in 3 of 5 blocks`: the condition or hypothesis that a verdict rests on, and how often."""
    words, sentence, of = "", judgement.sentence, judgement.sentence.of
    if judgement.verdict is Verdict.CONDITION:
        words += f": {sentence.condition}"
        words += f"; met in {judgement.met} of {judgement.cases} {of}" if of else ""
    if judgement.outside and of:
        whole = judgement.cases + judgement.outside
        words += f"; its hypothesis, {sentence.hypothesis}, is met in {judgement.cases} of {whole} {of}"
    return words


def shaky_words(judgement: Judgement) -> str:
    """`seeds disagree: 3 hold, 2 refuted`; "" where all seeds give the same verdict."""
    if judgement.is_stable:
        return ""
    votes = Counter(str(verdict) for verdict in judgement.by_seed.values())
    return "seeds disagree: " + ", ".join(f"{number} × {verdict}" for verdict, number in votes.items())


def effect_words(effect: Effect, smallest: float) -> str:
    """`12 blocks: 0.31 (95 % 0.22 … 0.4, 5 seeds), counts from 0.1`."""
    spread = f"95 % {number(effect.low)} … {number(effect.high)}, {effect.seeds} seeds"
    fresh = ", unused before" if effect.fresh else ""
    return f"{effect.where}: {number(effect.mean)} ({spread}{fresh}), counts from {number(smallest)}"


def effects_words(judgement: Judgement) -> list[str]:
    """The interval of each cell; none for a sentence without a smallest effect."""
    smallest = judgement.sentence.smallest
    return [] if smallest is None else [effect_words(effect, smallest) for effect in judgement.effects]


def counter_words(judgement: Judgement) -> str:
    """The counter-example, "" where there is none."""
    case = judgement.counterexample
    return "" if case is None else f"{case.where}: {number(case.value)}"


def kept_words(kept: Kept) -> str:
    """The long result on one line: `refuted: share of steps saved 0.1 (0.05 … 0.2)`."""
    result = kept.result
    said, figure = result["verdict"], result["figure"]
    if said == Verdict.CONDITION and (condition := result["condition"]):
        met = f"met in {condition['met']} of {condition['cases']} {condition['of']}"
        said = f"{said}: {condition['says']}; {met}"
    if figure is not None:
        by_seed = {int(seed): float(value) for seed, value in figure["by_seed"].items()}
        said += f": {figure_words(Figure(figure['what'], by_seed))}"
    return said if kept.is_current else f"{said} (measured by an earlier version of the code)"


def machine() -> dict[str, str]:
    """Machine on which the figures were measured."""
    return environment() | {"processor": _processor()}


def _processor() -> str:
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.processor() or platform.machine()


def to_json(
    tested: Sequence[ClaimResult], setup: Setup, command: str, seconds: float, missing: Sequence[str] = ()
) -> str:
    """All of it, one object; `docs/claims.md` says what is what.

    Args:
        missing: the ids that an interrupted run did not come to.
    """
    given = {
        "schema": SCHEMA,
        "normscope": normscope.__version__,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "seeds": list(setup.seeds),
        "long": setup.long,
        "text": text_words(setup),
        "seconds": round(seconds, 1),
        "texts": [dataclasses.asdict(text) for text in TEXTS.values()],
        "interrupted_before": list(missing),
        "tally": {str(verdict): count for verdict, count in counts(tested).items()},
        "claims": [_entry(each) for each in tested],
    }
    return json.dumps(given, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _entry(tested: ClaimResult) -> dict[str, Any]:
    kept = kept_beside(tested)
    return tested.to_dict() | {"digest": own_code(tested.claim), "kept_long": kept and kept.to_dict()}


def text_words(setup: Setup) -> str:
    """Name of the text that trained claims train on."""
    return "the Python standard library's source" if setup.text is None else setup.text.name


def kept_beside(tested: ClaimResult) -> Kept | None:
    """The kept long result of a claim that was tested in its short form."""
    return None if tested.long else kept_long(tested.claim)


def table(tested: Sequence[ClaimResult]) -> "Table":
    """A row a claim, for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rows.add_column("id", no_wrap=True)
    rows.add_column("claim", ratio=5, overflow="fold")
    rows.add_column("verdict", ratio=3, overflow="fold")
    rows.add_column("figure", ratio=4, overflow="fold", min_width=12)  # the longest figure's columns
    for each in tested:
        judgement = each.judgement
        said = verdict_words(judgement) + (f": {each.reason}" if each.reason else "")
        style = SIGNS[judgement.verdict].style
        chinese = f"\n[dim]{escape(each.claim.says_zh)}[/dim]"
        rows.add_row(
            f"[bold]{each.claim.id}[/bold]",
            escape(each.claim.sentence.says) + chinese * bool(each.claim.says_zh),
            f"[{style}]{escape(said)}[/{style}]",
            escape(figure_words(each.evidence.figure)),
        )
    return rows


def counts(tested: Sequence[ClaimResult]) -> dict[Verdict, int]:
    """Number of claims with each verdict."""
    return {verdict: sum(each.judgement.verdict is verdict for each in tested) for verdict in Verdict}


def tally(tested: Sequence[ClaimResult]) -> str:
    """`60 claims: 31 hold, 12 hold under our condition, 16 are refuted, 1 is not measured`."""
    if not tested:
        return "no claim was tested"
    numbers = counts(tested)
    parts = ", ".join(
        f"{numbers[verdict]} {_verb(verdict, numbers[verdict])}" for verdict in Verdict if numbers[verdict]
    )
    broken = [each.claim.id for each in tested if each.error]
    note = f"; {', '.join(broken)} broke" if broken else ""
    return f"{len(tested)} claim{'s' if len(tested) != 1 else ''}: {parts}{note}"


def _verb(verdict: Verdict, number: int) -> str:
    words = str(verdict)
    if words.startswith("holds"):
        return words if number == 1 else words.replace("holds", "hold", 1)
    return f"{'is' if number == 1 else 'are'} {words}"


def in_full(tested: ClaimResult) -> list[str]:
    """One claim, line by line, for a terminal."""
    claim, cached = tested.claim, " (from the cache)" if tested.cached else ""
    head = [f"{claim.id}  {claim.sentence.says}", *[f"    {claim.says_zh}"] * bool(claim.says_zh), ""]
    lines = [f"{label:<14}{words}" for label, words in facts(tested)]
    return [*head, *lines, f"{'time':<14}{tested.seconds:.1f} s{cached}; {claim.file}"]


def facts(tested: ClaimResult, strong: str = "") -> Iterator[tuple[str, str]]:
    """A claim's entry by label: sources, criterion, verdict, figure, parts, notes.

    Args:
        tested: the claim.
        strong: put on both sides of a verdict: "**" in Markdown.
    """
    claim, evidence = tested.claim, tested.evidence
    yield "source", "; ".join(map(_source, claim.sources))
    yield "criterion", f"{claim.asks} ({claim.kind})"
    yield "verdict", _judged(tested.judgement, strong)
    if tested.reason:
        yield "reason", tested.reason
    if evidence.figure is not None:
        yield "figure", figure_words(evidence.figure)
    for words in effects_words(tested.judgement):
        yield "effect", words
    for part in tested.parts.values():
        effects = "; ".join(effects_words(part))
        words = f"{part.sentence.says} {_judged(part, strong)}"
        yield "also tested", words + (effects and f"; effect: {effects}")
    for note in evidence.notes:
        yield "note", note
    for words in evidence.unmeasured if evidence.cases else ():
        yield "not measured", words
    if kept := kept_beside(tested):
        yield "long form", f"{kept_words(kept)} ({kept.where})"


def _source(source: Source) -> str:
    return f"{source.text} {source.where}" + (f" “{source.words}”" if source.words else "")


def _judged(judgement: Judgement, strong: str) -> str:
    """The verdict, how many cases agree, and the counter-example."""
    verdict = verdict_words(judgement, strong)
    if judgement.verdict is Verdict.NOT_MEASURED:
        return verdict
    counter = counter_words(judgement)
    agree = f"{judgement.held} of {judgement.cases} cases agree"
    return f"{verdict}; {agree}" + (f"; counter-example: {counter}" if counter else "")
