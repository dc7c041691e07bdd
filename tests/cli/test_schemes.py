"""`normscope schemes`: the catalogue in three formats, all made from the table."""

import dataclasses
import json
from pathlib import Path

import pytest

from normscope.cli.main import run
from normscope.nn import SCHEMES, Inside, Slot, Where
from normscope.nn.catalogue import INSIDE_IN_WORDS, catalogue, row_of
from normscope.nn.joins import Scaled
from normscope.nn.placement import norms_at
from normscope.nn.scheme import Initialisation, Scheme
from normscope.nn.weights import WEIGHTS
from normscope.report import page_of_schemes, text_schemes

PAGE = Path(__file__).parents[2] / "docs" / "schemes.md"
KEYS = {"name", "formula", "slots", "join", "initialisation", "final_norm", "source"}


def test_the_page_is_in_step_with_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_of_schemes(catalogue()), (
        "run: normscope schemes --format markdown > docs/schemes.md"
    )


def test_json_is_a_list_of_every_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schemes", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(SCHEMES)
    for row in rows:
        assert row.keys() >= KEYS
        assert isinstance(row["slots"], list)
        assert set(row["slots"]) <= set(Slot)
        assert isinstance(row["final_norm"], bool)
        last = SCHEMES[row["name"]].placement_at(Where(12, 12, "feed-forward", 1))
        assert row["final_norm"] == (Slot.FINAL in last)
        assert all(row[key] for key in ("formula", "join", "initialisation", "source"))


@pytest.mark.parametrize("name", SCHEMES)
def test_each_scheme_can_be_shown_in_full(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schemes", name]) == 0
    shown = "".join(capsys.readouterr().out.split())
    for part in (name, SCHEMES[name].formula, SCHEMES[name].source):
        assert "".join(part.split()) in shown


def test_the_table_fits_and_shows_every_name() -> None:
    text = text_schemes(catalogue(), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for name in SCHEMES:
        assert f"\n{name} " in text


def test_output_goes_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schemes", "post", "pre", "-o", str(tmp_path / "table.txt")]) == 0
    assert "x + F(N(x))" in (tmp_path / "table.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""


def test_an_unknown_scheme_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schemes", "depnorm"]) == 2
    assert 'nearest name is "deepnorm"' in capsys.readouterr().err


def _by_depth(where: Where) -> float:
    return where.num_blocks**-0.5


def test_rules_are_said_in_words() -> None:
    """A made-up scheme whose norms and factors depend on everything."""

    def placement(where: Where):  # type: ignore[no-untyped-def]
        if where.kind == "attention":
            return norms_at(Slot.STREAM if where.block <= where.num_blocks // 4 else Slot.BRANCH_IN)
        return norms_at(Slot.BRANCH_IN, Slot.FINAL)

    gains = {"o": _by_depth, "down": _by_depth, "q": lambda where: 0.0, "v": lambda where: 1 / where.block}
    made_up = Scheme(
        "made-up",
        "…",
        placement,
        "nowhere",
        join=Scaled(branch_scale=_by_depth),
        initialisation=Initialisation("xavier", gains, norms={Slot.STREAM: 0.5}),  # type: ignore[arg-type]
        inside=Inside(qk_norm="head", v_norm=True),
        entry_scale=_by_depth,
    )
    row = row_of(made_up)
    assert row.slots == ["branch_in", "stream", "final"]
    assert row.placement == (
        "branch_in (attention blocks 4–12 of 12; feed-forward), stream (attention blocks 1–3 of 12), final"
    )
    assert row.join == "scaled"
    assert row.initialisation == (
        "Xavier-normal; o, down × 0.289 at L = 12; q × 0; v × 1 to 0.0833 over 12 blocks; γ of stream = 0.5"
    )
    assert row.besides == "input of a branch × 0.289 at L = 12"
    assert row.inside == "QK-norm: head; norm on v"
    assert row.final_norm


def test_there_are_words_for_every_field() -> None:
    assert INSIDE_IN_WORDS.keys() == {field.name for field in dataclasses.fields(Inside)}
    assert all(way.words for way in WEIGHTS.values())
