"""docs/tutorials: every script runs, with its asserts, and its page is what it says and prints."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
NAMES = sorted(path.stem for path in TUTORIALS.glob("[0-9][0-9]_*.py"))
RENDER = runpy.run_path(str(TUTORIALS / "render.py"))
DIFFERENCE = runpy.run_path(str(Path(__file__).parent / "linalg" / "pages.py"))["difference"]
_TEXT = re.compile(r"```text\n(.*?)```", flags=re.DOTALL)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a script sets for its process: threads, denormals, pictures, folder."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setenv("MPLBACKEND", "Agg")
    plt.switch_backend("Agg")
    try:
        with matplotlib.rc_context():
            yield
    finally:
        plt.close("all")
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("clean")
def test_the_page_is_what_the_script_says_and_prints(name: str, tmp_path: Path) -> None:
    RENDER["main"](name, tmp_path)
    new = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    shown = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    (made, new), (written, shown) = (page.split("\n", 1) for page in (new, shown))
    assert _TEXT.sub("", new) == _TEXT.sub("", shown), f"run docs/tutorials/render.py {name}"
    if (
        made == written
    ):  # another Python's library is another text; the script's asserts have held all the same
        for one, other in zip(_TEXT.findall(new), _TEXT.findall(shown), strict=True):
            assert not DIFFERENCE(one, other)
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", shown):
        assert (tmp_path / picture).exists()
        assert 0 < (TUTORIALS / picture).stat().st_size < 60_000


def test_the_index_names_every_page() -> None:
    index = (TUTORIALS / "README.md").read_text(encoding="utf-8")
    assert set(NAMES) <= set(re.findall(r"\]\((\d\d_\w+)\.md\)", index))


def test_prose_is_told_from_code() -> None:
    script = "# # A title\n#\n# words\n\nx = 1\n# why\nprint(x)\n\n\nprint(2)\n\n# more\n"
    prose, code, more = RENDER["pieces"](script)
    assert not prose.is_code
    assert (code.text, code.line) == ("x = 1\n# why\nprint(x)\n\n\nprint(2)", 5)
    assert more.text == "# more"
    page = RENDER["page"](script, "some")
    assert "\n\n# A title\n\nwords\n\n```python\nx = 1\n" in page
    assert page.endswith("print(2)\n```\n\n```text\n1\n2\n```\n\nmore\n")
