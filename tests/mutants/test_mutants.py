"""The lists of mutants fit the code: each text occurs where its entry says. `make mutants` runs them."""

from pathlib import Path

import pytest
from run import ROOT, Mutant, broken, mutants_of, rooms

MUTANTS = [mutant for room in rooms() for mutant in mutants_of(room)]


@pytest.mark.parametrize("room", rooms())
def test_every_mutant_changes_what_it_names(room: str) -> None:
    for mutant in mutants_of(room):
        path = ROOT / "src" / "normscope" / mutant.file
        source = path.read_text(encoding="utf-8")
        assert broken(mutant, source) != source
        assert mutant.survives or mutant.tests, f"{mutant.name} names no tests"
        for test in mutant.tests:
            file, _, name = test.partition("::")
            written = Path(ROOT, file).read_text(encoding="utf-8")
            assert f"def {name.partition('[')[0]}(" in written or not name, f"{mutant.name}: no {test}"


def test_a_text_that_is_not_there_is_an_error() -> None:
    mutant = Mutant(room="x", number=1, file="x.py", old="a", new="b", tests=("tests",))
    assert broken(mutant, "a + 1") == "b + 1"
    for source in ("c", "a + a"):
        with pytest.raises(ValueError, match="must occur once"):
            broken(mutant, source)


def test_code_that_cannot_be_parsed_is_an_error() -> None:
    mutant = Mutant(room="x", number=1, file="x.py", old="a", new="(b", tests=("tests",))
    with pytest.raises(ValueError, match="cannot be parsed"):
        broken(mutant, "a + 1")


def test_no_break_is_listed_twice() -> None:
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
