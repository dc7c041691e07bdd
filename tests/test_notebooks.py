"""docs/notebooks: every notebook runs in a kernel, and shows what it showed when it was saved."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
LONGEST_S = 120  # a cell, on a machine that has much else to do
VERDICTS = re.compile(r"will fail|at risk|healthy|no trial")


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs, run in `folder`."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=LONGEST_S, record_timing=False, resources=place).execute()


def shown(notebook: nbformat.NotebookNode) -> list[tuple[list[str], list[str]]]:
    """Kinds of the outputs of each code cell, and the verdicts that they begin with."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [output.get("data", output) for output in cell.outputs]
            htmls = [output.get("text/html", output.get("text", "")) for output in outputs]
            texts = [re.sub(r"<[^>]*>", "", html) for html in htmls]
            kinds = [kind for output in outputs for kind in ("text/html", "text") if kind in output]
            cells.append((kinds, [found[0] for text in texts if (found := VERDICTS.match(text))]))
    return cells


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs_and_shows_what_is_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    saved = nbformat.read(FOLDER / name, as_version=4)
    assert shown(executed(FOLDER / name, tmp_path)) == shown(saved)


def test_the_first_check_shows_a_repair() -> None:
    kinds, verdicts = zip(*shown(nbformat.read(FOLDER / "first_check.ipynb", as_version=4)), strict=True)
    assert [verdict for each in verdicts for verdict in each] == ["will fail", "healthy", "will fail"]
    assert sum("text/html" in each for each in kinds) == 4, "anatomy, two reports, a map"


if __name__ == "__main__":  # save the outputs: python tests/test_notebooks.py
    for each in NOTEBOOKS:
        nbformat.write(executed(FOLDER / each, Path.cwd()), FOLDER / each)
