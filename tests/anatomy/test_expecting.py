"""Tests of `normscope anatomy --expect`, which detects a moved norm."""

from pathlib import Path

import pytest

from normscope.anatomy import departures, read_anatomy
from normscope.cli.main import run
from normscope.errors import UsageError
from normscope.nn import SCHEMES
from normscope.subjects import load

SMALL = "depth=2,width=16,heads=2"
MOVED = """
from normscope.nn import build as decoder


def build():
    return decoder("decoder", scheme="{scheme}", depth=2, width=16, heads=2)


def mixed():
    model = decoder("decoder", scheme="pre", depth=2, width=16, heads=2)
    model.blocks[1] = decoder("decoder", scheme="post", depth=2, width=16, heads=2).blocks[1]
    return model
"""


@pytest.mark.parametrize("scheme", ["pre", "post", "peri", "res-post", "deepnorm", "rezero"])
def test_a_scheme_is_what_it_is_expected_to_be(scheme: str) -> None:
    anatomy = read_anatomy(load(f"nn:decoder,scheme={scheme},{SMALL}"))
    assert departures(anatomy, scheme) == []
    assert departures(anatomy, SCHEMES[scheme].reads_as) == []
    other = "post" if "pre" in {branch.placement for branch in anatomy.branches} else "pre"
    assert len(departures(anatomy, other)) == len(anatomy.branches)


def test_each_branch_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MOVED.format(scheme="pre"), encoding="utf-8")
    spec = f"{tmp_path / 'model.py'}:mixed"
    assert run(["anatomy", spec, "--expect", "pre"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[-1] for line in lines] == ["post, expected pre"] * 2
    assert all("blocks.1." in line for line in lines)
    assert run(["anatomy", spec]) == 0


def test_what_was_not_read_is_no_success() -> None:
    anatomy = read_anatomy(load(f"nn:decoder,{SMALL}"))
    partly = type(anatomy)(anatomy.stacks, unread=("a router",))
    assert departures(partly, "pre") == ["not read: a router"]
    assert departures(type(anatomy)(()), "pre") == ["no branch was read, expected pre"]


def test_an_unknown_placement_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match='the nearest name is "pre"'):
        departures(read_anatomy(load(f"nn:decoder,{SMALL}")), "prenorm")
    assert run(["anatomy", f"nn:decoder,{SMALL}", "--expect", "sideways"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
