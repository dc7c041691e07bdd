"""Tested claims as Markdown: docs/claims.md, and the rows of the README."""

import datetime
from collections.abc import Iterator, Sequence
from importlib.resources import files

from normscope.claims.judge import Verdict
from normscope.claims.kept import machine_words
from normscope.claims.page import sections
from normscope.claims.result import ClaimResult
from normscope.claims.setup import Setup
from normscope.claims.words import counts, facts, figure_words, machine, strong_verdict, tally, text_words

SURPRISING = ("A3", "A16", "B4", "B12", "B13", "B17", "C7", "C15", "C25", "C26")
"""The rows of the README's table."""
IN_CHINESE = {
    Verdict.HOLDS: "成立",
    Verdict.CONDITION: "在我们的条件下成立",
    Verdict.REFUTED: "不成立",
    Verdict.UNDECIDED: "无法判定",
    Verdict.NOT_MEASURED: "未测量",
}


def page_of_claims(tested: Sequence[ClaimResult], setup: Setup, command: str, seconds: float) -> str:
    """docs/claims.md: how claims are judged, a table a text, then a section a claim."""
    date = datetime.date.today().isoformat()
    seeds = ", ".join(map(str, setup.seeds))
    parts = [
        _template("head.md"),
        f"**{tally(tested)}.** Measured {date} on {machine_words(machine())}, seeds {seeds}, by `{command}`; "
        f"trained on {text_words(setup)}; {_seconds(tested, seconds)}.\n",
        *_tables(tested),
        "## What was measured\n",
        *(_entry(each) for each in tested),
        _template("json.md"),
    ]
    return "\n".join(parts)


def page_in_chinese(tested: Sequence[ClaimResult], setup: Setup, command: str, seconds: float) -> str:
    """docs/claims.zh-CN.md: the sources' own sentences, where they stand, the verdicts and the figures."""
    numbers = "，".join(f"{IN_CHINESE[name]} {number}" for name, number in counts(tested).items() if number)
    parts = [
        _template("head.zh-CN.md"),
        f"**{len(tested)} 条论断：{numbers}。** {datetime.date.today().isoformat()} 测于 "
        f"{machine_words(machine())}；随机种子 {', '.join(map(str, setup.seeds))}；"
        f"命令 `{command}`；{_seconds(tested, seconds)}。\n",
    ]
    head = "| | 原文 | 出处 | 结论 | 数值（英文说明） |\n|---|---|---|---|---|"
    for section in sections(tested):
        if section.here:
            rows = [head, *(_row_in_chinese(each) for each in section.here)]
            parts.append(f"## {section.text.id}：{section.text.title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row_in_chinese(tested: ClaimResult) -> str:
    judgement = tested.judgement
    verdict = f"**{IN_CHINESE[judgement.verdict]}**"
    if judgement.verdict is Verdict.CONDITION:
        verdict += f"（{judgement.condition}）"
    elif judgement.hypothesis:
        verdict += f"（原文前提：{judgement.hypothesis}）"
    cells = [tested.claim.says_zh, _where(tested), verdict, figure_words(tested.evidence.figure)]
    return f"| [{tested.claim.id}](claims.md#{_section(tested)}) | {' | '.join(map(_line, cells))} |"


def rows_of_claims(tested: Sequence[ClaimResult]) -> str:
    """A table of `tested`, as the README has it."""
    rows = [_row(each, "docs/claims.md") for each in tested]
    return "\n".join(["| | what is said | verdict | figure |", "|---|---|---|---|", *rows]) + "\n"


def _template(name: str) -> str:
    return (files("normscope.claims") / "templates" / name).read_text(encoding="utf-8")


def first_text(tested: ClaimResult) -> str:
    """The number of the text under which a claim stands."""
    return tested.claim.sources[0].text


def _seconds(tested: Sequence[ClaimResult], seconds: float) -> str:
    spent = sum(each.seconds for each in tested)
    return f"{spent:.0f} s of measuring, {seconds:.0f} s in this run"


def _tables(tested: Sequence[ClaimResult]) -> Iterator[str]:
    for section in sections(tested):
        text, here, also = section.text, section.here, section.also
        yield f"## {text.id}: {text.title}\n\n{text.english[0].upper()}{text.english[1:]}.\n"
        if here:
            rows = "\n".join(_row(each, where=_where(each)) for each in here)
            yield f"| | what is said | where | verdict | figure |\n|---|---|---|---|---|\n{rows}\n"
        if also:
            links = ", ".join(f"[{each.claim.id}](#{_section(each)})" for each in also)
            yield f"Said here too: {links}.\n"


def _row(tested: ClaimResult, file: str = "", where: str | None = None) -> str:
    figure = figure_words(tested.evidence.figure)
    said = " <br> ".join(filter(None, [tested.claim.sentence.says, tested.claim.says_zh]))
    cells = [said, where, strong_verdict(tested.judgement, tested.evidence.of, "**"), figure]
    shown = " | ".join(_line(cell) for cell in cells if cell is not None)
    return f"| [{tested.claim.id}]({file}#{_section(tested)}) | {shown} |"


def _where(tested: ClaimResult) -> str:
    places = [source.where for source in tested.claim.sources if source.text == first_text(tested)]
    return ", ".join(dict.fromkeys(places))


def _section(tested: ClaimResult) -> str:
    return tested.claim.id.lower()


def _entry(tested: ClaimResult) -> str:
    claim = tested.claim
    said = _line(claim.sentence.says) + f"\n\n> {_line(claim.says_zh)}" * bool(claim.says_zh)
    lines = [
        f"- **{label}**: {_line(words)}"
        for label, words in facts(tested, "**")
        if not (tested.error and label == "note")  # its traceback
    ]
    lines.append(f"- **code**: `{claim.file}`, {tested.seconds:.1f} s")
    return f"### {claim.id}\n\n{said}\n\n" + "\n".join(lines) + "\n"


def _line(words: str) -> str:
    """On one line, with nothing in it that ends a cell or begins a tag."""
    return " ".join(words.split()).replace("<", "&lt;").replace("&lt;br>", "<br>").replace("|", "\\|")
