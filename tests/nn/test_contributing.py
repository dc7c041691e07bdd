"""The scheme in CONTRIBUTING: its two code blocks run, and it obeys the laws for all schemes."""

import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

import laws
import pytest
import references
import test_laws_formula

import normscope
from normscope.nn import SCHEMES, Scheme, build, schemes
from normscope.nn.catalogue import catalogue

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```python title=(\S*nn/\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
SOURCE, REFERENCE = "src/normscope/nn/schemes/running_mean.py", "tests/nn/references.py"
NAME = "running-mean"


def _run(title: str, names: dict[str, object]) -> dict[str, object]:
    """Run the code block of that title with `names`."""
    exec(compile(textwrap.dedent(BLOCKS[title]), title, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both blocks run, and the line added to the table, as the page says."""
    assert f"Add `running_mean.RUNNING_MEAN` to `_TABLE` in `{Path(SOURCE).parent}/__init__.py`" in PAGE
    module = types.ModuleType("running_mean")
    monkeypatch.setitem(sys.modules, "running_mean", module)
    scheme = _run(SOURCE, vars(module))["RUNNING_MEAN"]
    assert isinstance(scheme, Scheme)
    monkeypatch.setattr(schemes, "SCHEMES", {**SCHEMES, scheme.name: scheme})
    _run(REFERENCE, dict(vars(references)))
    yield
    del references.REFERENCES[NAME]


def test_the_page_has_both_blocks_and_no_other() -> None:
    assert set(BLOCKS) == {SOURCE, REFERENCE}
    assert NAME not in SCHEMES


def test_it_is_its_formula() -> None:
    test_laws_formula.test_a_scheme_is_its_formula(NAME)


def test_the_causal_mask_never_leaks() -> None:
    for at in range(5):
        laws.never_leaks(NAME, 5, at)


def test_the_other_laws() -> None:
    laws.padding_changes_nothing(NAME, "encoder", left=False)
    laws.gradients_are_right(NAME)
    laws.survives_its_state_dict(NAME)
    laws.compiles_whole(NAME, "aot_eager")
    assert laws.rank(NAME) == 12


def test_the_anatomy_reads_it() -> None:
    anatomy = normscope.read_anatomy(build("decoder", scheme=NAME, depth=2, width=16, heads=2))
    branches = [branch for block in anatomy.blocks for branch in block.branches]
    assert [branch.placement for branch in branches] == ["pre"] * 4
    assert [branch.stream_scale for branch in branches] == pytest.approx([1 / 2, 2 / 3, 3 / 4, 4 / 5])
    assert [branch.branch_scale for branch in branches] == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert anatomy.final_norm
    assert anatomy.unread == ()


def test_it_stands_in_the_table() -> None:
    (row,) = catalogue([NAME])
    assert row.slots == ["branch_in", "final"]
    assert (row.join, row.final_norm, row.reads_as) == ("scaled", True, "pre")
