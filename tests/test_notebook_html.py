"""`_repr_html_`: compact, self-contained, escaped, and without styles that reach the notebook's own page."""

import base64
import dataclasses
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import normscope
from normscope.anatomy import Anatomy
from normscope.compare.words import clean
from normscope.maps import Record, Store
from normscope.notebook import fragment, tag
from normscope.report import Report

for room in ("compare", "report", "maps"):  # their made-up comparisons, reports and maps
    sys.path.insert(0, str(Path(__file__).parent / room))
from handmade import everything, hostile, many, not_all, one, same  # noqa: E402
from handmade_reports import report, stack  # noqa: E402
from small_maps import made_up, small_grid  # noqa: E402

HOSTILE = "<script>alert(1)</script>\"'&</style><img src=x onerror=alert(2)>"
EMPTY = {"img", "br"}


class Reader(HTMLParser):
    """The elements, their attributes and the text of a fragment, with every element closed in its turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._open += [] if tag in EMPTY else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def made(kind: str, name: str, folder: Path) -> object:
    """One of the things that notebooks show, with `name` wherever a user's text stands."""
    if kind == "report":
        return report(40, name)
    if kind == "anatomy":
        return Anatomy((stack(3, name=name),), unread=(name,))
    if kind == "diff":
        differences = [dataclasses.replace(each, name=name) for each in one().differences]
        return dataclasses.replace(one(), a=name, notes=(name,), differences=tuple(differences))
    return map_of(folder, name)


def map_of(folder: Path, name: str = "a text", records: list[Record] | None = None) -> Store:
    cells = small_grid(depths=[1, 2]).cells
    store = Store(folder / "map.sqlite")
    settings = {
        "model": name, "optimizer": "adamw", "steps": 26, "device": "cpu", "data": f"{name}, 0123456789abcdef"
    }  # fmt: skip
    store.enrol([cells], settings)
    return store


@pytest.mark.parametrize("kind", ["report", "anatomy", "diff", "map"])
def test_a_cell_is_escaped_and_keeps_to_itself(kind: str, tmp_path: Path) -> None:
    shown = made(kind, HOSTILE, tmp_path)
    html = shown._repr_html_()  # type: ignore[attr-defined]
    read = Reader(html)
    assert set(read.tags) <= {"div", "span", "b", "code", "table", "thead", "tbody", "tr", "th", "td", "img"}
    assert {name for name, _ in read.attributes} <= {"style", "src", "alt"}
    assert all(v.startswith("data:image/png;base64,") for name, v in read.attributes if name == "src")
    assert HOSTILE in read.text
    styles = " ".join(value for name, value in read.attributes if name == "style")
    assert not re.search(r"url\(|position|(?<!-)color:(?!inherit|#fff)", styles), "the theme has the say"
    assert len(html) < (200_000 if kind == "map" else 30_000)


def test_a_report_shows_verdict_findings_and_blocks() -> None:
    shown = report(40)
    text = Reader(shown._repr_html_()).text
    assert text.startswith(shown.verdict + " hf:gpt2")
    for finding in shown.findings:
        assert f"{finding.code} {finding.name}" in text
        assert finding.message[1:] in text
    assert "layers.0pre" in text
    assert "28 more" in text, "a deep stack is folded"
    assert "1.23" in text


def test_a_report_without_findings_says_why_it_is_healthy() -> None:
    shown = report(4, findings=())
    assert "is 1e-09 after 20 steps." in Reader(shown._repr_html_()).text


def test_an_anatomy_folds_equal_neighbours() -> None:
    mixed = Anatomy((stack(3), stack(2, "post", final=False, name="decoder")), unread=("a loop",))
    text = Reader(mixed._repr_html_()).text
    assert "layers.0…layers.2 (3)attentionprelayernormx + F" in text
    assert "decoder: 2 blocks, no final norm" in text
    assert "unread a loop" in text
    assert "no residual stream was read" in Reader(Anatomy(())._repr_html_()).text


def test_a_comparison_shows_its_verdict_and_its_differences() -> None:
    text = Reader(one()._repr_html_()).text
    assert text.startswith("Not the same function hf:")
    for each in one().differences:
        assert each.name in text
        assert each.message.rstrip(".") in text or str(each.a) in text
    assert "block 0 (transformer.h.0.attn in A, model.layers.0.self_attn in B), because the norms add" in text
    row = "blocks 0–31e-051e-06The norms add ε = 1e-05 to the variance in A and 1e-06 in B."
    assert f"structure: 1 differencedifferenceplaceABnorm-eps{row}" in text
    assert f"function: 1 differencedifferenceplaceABnorm-epsconfirmed{row}" in text
    assert text.endswith("verdict: not compared: it takes a check of both models: --check runs them.")


def test_a_comparison_says_what_was_not_compared_and_its_notes() -> None:
    text = Reader(everything()._repr_html_()).text
    assert text.endswith(
        "start: compared partly: 2 of 74 parameters have no partner."
        "A: sequences are shortened to 32 tokens, the context of the model."
    )
    assert "tied-headthe whole modelthe embedding'sits ownnormblocks" in text, "no sentence twice"
    assert Reader(not_all()._repr_html_()).text.startswith("No difference was found a.json · b.json")
    assert Reader(same()._repr_html_()).text.startswith("The same model")


def test_a_comparison_lists_the_first_differences_of_a_part() -> None:
    read = Reader(many()._repr_html_())
    assert "200 differences, the first 12" in read.text
    numbers = [len(many().of(each.part)) for each in many().parts]
    assert read.tags.count("tr") == sum(1 + min(12, number) for number in numbers if number)


def test_every_text_of_a_comparison_is_escaped() -> None:
    read = Reader(hostile()._repr_html_())
    assert "script" not in read.tags
    shown = clean(hostile())
    for text in (shown.a, shown.notes[0], shown.differences[0].message):
        assert text[:20] in read.text


def test_a_prompt_shows_a_line() -> None:
    assert re.fullmatch(r"<Report of hf:gpt2: [a-z ]+; NS\d{3} .*>", repr(report(40)))
    assert repr(report(4, findings=())) == "<Report of hf:gpt2: healthy>"
    assert repr(Anatomy((stack(3),), unread=("x",))) == (
        "<Anatomy: layers: 3 blocks, final norm: layernorm at norm; 1 unread>"
    )
    assert repr(Anatomy(())) == "<Anatomy: no residual stream>"


def test_a_map_has_its_picture(tmp_path: Path) -> None:
    cells = small_grid(depths=[1, 2]).cells
    with map_of(tmp_path) as store:
        assert "No cell is done yet." in Reader(store._repr_html_()).text
        from normscope.maps.page import sheet_of

        sheet = sheet_of(store)
        records = [made_up(cell) for cell in cells]
        object.__setattr__(sheet, "records", records)
        read = Reader(sheet._repr_html_())
        picture = next(value for name, value in read.attributes if name == "src")
        assert base64.b64decode(picture.partition(",")[2]).startswith(b"\x89PNG")
        assert "post013e-3" in read.text, "scheme, warm-up, depth, largest rate"
    assert "is closed" in Reader(store._repr_html_()).text
    with Store(tmp_path / "empty.sqlite") as store:
        assert "(empty)" in Reader(store._repr_html_()).text


def test_a_path_of_lone_surrogates_is_spelled_out() -> None:
    assert fragment("a\udcff").encode("utf-8")
    assert tag("td", tag("b", "1 < 2"), "&", title='"') == '<td title="&quot;"><b>1 &lt; 2</b>&amp;</td>'


def test_real_ones_are_shown() -> None:
    model = normscope.nn.build("decoder", scheme="post", depth=2, width=16)
    shown = normscope.check(model, steps=2, batch_size=2, seq_len=16, budget="fast")
    assert isinstance(shown, Report)
    assert "NS101" not in shown.verdict
    assert shown.verdict in Reader(shown._repr_html_()).text
    assert "post" in Reader(shown.anatomy._repr_html_()).text
