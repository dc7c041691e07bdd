"""A report as Markdown: short, with what a reviewer needs, and text of a model that stays text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from handmade_reports import report, stack
from markdown_it import MarkdownIt

import normscope
from normscope.anatomy import Anatomy
from normscope.cli.main import run
from normscope.forecast import LadderForecast
from normscope.report.markdown import LONGEST, MOST_FINDINGS, code, text
from normscope.rules import Finding, Severity
from normscope.rules.remedies import REMEDIES, Attempt, Rescue

MOST_LINES = 60
HOSTILE = (
    "a|b",
    "**bold** _em_ ~~gone~~",
    "[link](https://example.invalid)",
    "![image](https://example.invalid/x.png)",
    "<script>alert(1)</script><img src=x onerror=y>",
    "`code` ``more`` `",
    "line\n\n# Heading\n- item\n/approve\n```sh\nrm\n```",
    "$x^2$ &lt;b&gt; \\| \\",
    "<!-- --> --> </details>",
    "---|---\n|||",
)
LINKED = (
    "@maintainer",
    "team @org/team",
    "fixes #12",
    "!7",
    "https://example.invalid",
    "www.example.invalid",
)
SMALL = ["nn:decoder,depth=1,width=16,heads=2", "--batch-size", "2", "--seq-len", "16", "--budget", "fast"]


class Page(HTMLParser):
    """Tags and text of a rendered page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data

    @property
    def plain(self) -> str:
        """The words without the invisible spaces that keep addresses from being linked."""
        return self.words.replace("\u200b", "")


def rendered(markdown: str) -> Page:
    return Page(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown))


def finding(words: str, severity: Severity = Severity.ERROR, number: int = 1) -> Finding:
    return Finding(f"NS{100 + number}", "a-name", severity, (words,), words, remedy=words)


def test_it_holds_what_a_reviewer_needs() -> None:
    shown = report().to_markdown("normscope check hf:gpt2 --lr 0.001")
    assert shown.startswith("### normscope: will fail\n")
    for words in (
        *("`hf:gpt2`", "**error** `NS202 tokens-collapse` at `layers.3…layers.8`", "Gone: 1e-9.", "→ Do."),
        *("**note** `NS504 eps-small`", "12 blocks, pre (layernorm)", "adam at 0.001, 20 steps → collapses"),
        *("4 × 64 byte ids; a single batch is repeated", "seed 0, cpu, torch 2.13.0", "normscope explain"),
        "```console\n$ normscope check hf:gpt2 --lr 0.001\n```",
    ):
        assert words in shown, words


def test_without_findings_command_or_trial() -> None:
    shown = replace(report(findings=()), forecast=None).to_markdown()
    assert "### normscope: healthy" in shown
    assert "No findings." in shown
    assert "No trial decided" in shown
    assert "```" not in shown
    assert "explain" not in shown


def test_the_longest_report_has_60_lines_at_most() -> None:
    grave = tuple(finding(f"layers.{n}", number=n) for n in range(30))
    stacks = tuple(stack(40, name=f"stack{n}") for n in range(9))
    tried = report().forecast
    attempts = [Attempt((name,), tried, "", 1.0) for name in REMEDIES]
    skipped = [Attempt((name,), None, "no", 0.0) for name in REMEDIES]
    long = replace(
        report(findings=grave),
        anatomy=Anatomy(stacks, unread=("one", "two")),
        ladder=LadderForecast((tried,) * 9, None, "does not help", None),
        remedies=Rescue((*attempts, *skipped), reason="it took too long"),
    )
    lines = long.to_markdown("normscope check " + "x" * 5000).splitlines()
    assert len(lines) <= MOST_LINES
    assert f"- and {30 - MOST_FINDINGS} more" in lines
    assert "and 5 more" in "\n".join(lines)


@pytest.mark.parametrize("words", HOSTILE)
def test_text_of_a_model_stays_text(words: str) -> None:
    """The page has the tags of a tame report, and shows the words as they were."""
    plain = " ".join(words.split())

    def shown(given: str) -> Page:
        made = replace(
            report(model=given, findings=(finding(given),)),
            input=given,
            notes=(given,),
            anatomy=Anatomy((stack(2, name=given),), unread=(given,)),
            versions={"torch": given},
        )
        return rendered(made.to_markdown(f"normscope check {given}"))

    hostile, tame = shown(words), shown("tame")
    assert hostile.tags == tame.tags
    assert hostile.plain.count(plain) == tame.plain.count("tame")


@pytest.mark.parametrize("words", HOSTILE)
def test_both_escapes_give_the_words_back(words: str) -> None:
    plain = " ".join(words.split())
    assert rendered(text(words)).plain.strip() == plain
    assert rendered(code(words)).words.strip() == plain
    assert rendered(f"| a | b |\n|---|---|\n| {text(words)} | |").tags.count("td") == 2


@pytest.mark.parametrize("words", LINKED)
def test_nobody_is_mentioned_and_nothing_linked(words: str) -> None:
    """GitHub and GitLab look for these in the text of the rendered page."""
    found = rendered(text(words)).words
    assert not re.search(r"@\w|#\d|!\d|://|www\.", found)
    assert found.replace("\u200b", "").strip() == words


def test_words_of_the_field_are_left_as_they_are() -> None:
    assert text("σ_max 61.7, norm_first=True, (8L)^-¼") == "σ_max 61.7, norm_first=True, (8L)^-¼"


def test_long_texts_are_cut() -> None:
    assert len(rendered(text("x" * 9999)).words.strip()) == LONGEST
    assert code("") == ""


def test_the_command_line_prints_it_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.normscope]\nseed = 3\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    call = ["check", *SMALL, "--steps", "0", "--format", "markdown", "--fail-on", "never"]
    assert run(call) == 0
    out, err = capsys.readouterr()
    assert out.startswith("### normscope: no trial\n")
    assert err == ""
    words = "--batch-size 2 --seq-len 16"
    assert re.search(rf"^\$ normscope check {SMALL[0]} --steps 0 --budget fast {words} --seed 3$", out, re.M)
    assert run([*call, "--output", "report.md", "--lr", "1e-3"]) == 0
    assert "--lr 0.001" in Path("report.md").read_text(encoding="utf-8")
    call[call.index("markdown")] = "html"
    assert run([*call, "--output", "report.html"]) == 0
    page = re.sub("</?(span|wbr)[^>]*>", "", Path("report.html").read_text(encoding="utf-8"))
    assert f"<pre>normscope check {SMALL[0]} --steps 0 --budget fast {words} --seed 3</pre>" in page


def test_python_gives_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    made = normscope.check(normscope.load(SMALL[0], batch_size=2, seq_len=16), steps=0, budget="fast")
    assert made.to_markdown().startswith("### normscope: no trial\n")
