"""Parts of the documentation site that `make docs` does not check itself."""

import re
import runpy
from pathlib import Path

import pytest

from benchmarks.benches import BENCHES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINE = runpy.run_path(str(DOCS / "command_line.py"))
BENCHMARKS = ROOT / "benchmarks" / "README.md"
LINKING = [*ROOT.glob("*.md"), ROOT / "llms.txt"]
NOT_OURS = {
    "--address",
    "--compile",
    "--its",
    "--own",
    "--head",
    "--normscope-budget",
    "--nproc-per-node",
    "--python-version",
    "--variant",
}
"""Options of ray, pytest, torchrun, mypy, of scripts, and of `benchmarks.hf.healthy`, that pages show."""
OPTION = r"(?<![\w-])--[a-z][a-z0-9-]+"
OF_A_BENCHMARK = r"(?:-m |from )benchmarks\.(\w+(?:\.\w+)*)([^`\n#]*)"
"""Module of a benchmark that is called by hand, and what follows it in the command."""


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.name)
def test_links_of_the_pages_outside_docs_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#]*)#?([^)]*)\)", text):
        assert (ROOT / target).exists(), target
        assert not anchor or anchor in anchors(ROOT / target if target else path), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def of_module(module: str) -> Path | None:
    """The file of a benchmark that is called by hand; None without one."""
    place = ROOT / "benchmarks" / module.replace(".", "/")
    return next((each for each in (place.with_suffix(".py"), place / "__main__.py") if each.exists()), None)


@pytest.mark.parametrize(
    "path", [*LINKING, BENCHMARKS, *sorted(DOCS.rglob("*.md"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_pages_call_benchmarks_with_their_own_options(path: Path) -> None:
    for module, rest in re.findall(OF_A_BENCHMARK, path.read_text(encoding="utf-8")):
        file = of_module(module)
        assert file is not None, module
        known = set(re.findall(rf'"({OPTION})"', file.read_text(encoding="utf-8")))
        assert set(re.findall(OPTION, rest)) <= known, f"{module}{rest}"


def test_pages_name_only_options_and_benchmarks_that_exist() -> None:
    commands = LINE["commands"]().values()
    options = {
        word for each in commands for option in each.params for word in option.opts + option.secondary_opts
    }
    options |= NOT_OURS | {"--help", "--version", "--install-completion", "--show-completion"}
    for path in [*LINKING, BENCHMARKS, *DOCS.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        ours = re.sub(OF_A_BENCHMARK, "", text)
        assert set(re.findall(OPTION, ours)) - options == set(), path
        assert set(re.findall(r"normscope bench ([\w-]+)", text)) - set(BENCHES) == set(), path


def test_the_page_of_the_benchmarks_names_every_file_and_folder() -> None:
    held = {
        f"`{path.name}/`" if path.is_dir() else f"`{path.name}`"
        for path in BENCHMARKS.parent.iterdir()
        if not path.name.startswith("__") and path != BENCHMARKS
    }
    text = BENCHMARKS.read_text(encoding="utf-8")
    assert {name for name in held if name not in text} == set()
    assert {name for name in BENCHES if f"normscope bench {name}`" not in text} == set()


def test_the_command_line_is_whole() -> None:
    page = LINE["command_line"]()
    for name, command in LINE["commands"]().items():
        (section,) = re.findall(rf"^## normscope {name}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
        for option in (each for each in command.params if each.param_type_name == "option"):
            assert all(f"`{word}`" in section for word in (*option.opts, *option.secondary_opts))
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert len(rows) == len(command.params)
        assert all(row.count(" | ") in (1, 2) for row in rows)
    assert "[bold]" not in page


def test_a_shared_entry_of_a_docstring_is_written_out() -> None:
    pytest.importorskip("griffe")
    ungrouped = runpy.run_path(str(DOCS / "grouped_arguments.py"))["ungrouped"]
    text = "Args:\n    a, b: words\n        and more\n    c: a, b: no entry\n\nLater, too: nothing"
    assert ungrouped(text) == text.replace("    a, b: words\n        and more\n", "{}").format(
        "    a: words\n        and more\n    b: words\n        and more\n"
    )


def pages() -> set[str]:
    """English pages within docs/, but for those of single findings, which docs/findings.md lists."""
    english = [path for path in DOCS.rglob("*.md") if not path.name.endswith(".zh.md")]
    return {str(path.relative_to(DOCS)) for path in english if path.parent != DOCS / "findings"}


def test_the_navigation_has_every_page() -> None:
    (nav,) = re.findall(
        r"^nav:\n(.*)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert pages() - set(re.findall(r"^ +- (?:.+: )?(\S+\.md)$", nav, re.MULTILINE)) == set()


def test_llms_names_every_page() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    rows = re.findall(r"^- \[.+?\]\(([^)]+)\): \S.*$", text, flags=re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert {f"docs/{page}" for page in pages()} - set(rows) == set()
