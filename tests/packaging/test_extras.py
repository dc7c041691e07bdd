"""Extras: without one its feature names it, and nothing else needs it."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import normscope
from normscope.cli.main import run

PACKAGE = Path(normscope.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"scikit_learn": "sklearn"}
"""Names of packages whose module has another name."""
FOR_DEVELOPERS = {"dev", "docs"}
GRID = ["map", "--width", "16", "--heads", "2", "--depths", "1", "--schemes", "pre", "--steps", "1"]
FEATURES = {
    "hf": ["check", "hf:gpt2,n_layer=1,n_embd=32,n_head=2", "--steps", "0"],
    "vision": ["check", "nn:vision,depth=1,width=16,heads=2", "--images", "digits", "--steps", "0"],
    "parquet": [*GRID, "--parquet", "map.parquet"],
    "ray": [*GRID, "--engine", "ray"],
    "quantise": ["check", "nn:decoder,depth=1,width=16,heads=2", "--quantise", "int8", "--steps", "0"],
}
"""A command for each extra, which needs it."""


def modules(requirements: list[str]) -> set[str]:
    """Names of the modules that requirements install; those of normscope's own extras are left out."""
    names = {re.split(r"[<>=!~\[; ]", one)[0].lower().replace("-", "_") for one in requirements}
    return {MODULES.get(name, name) for name in names - {"normscope"}}


EXTRAS = {name: modules(given) for name, given in PROJECT["optional-dependencies"].items()}
REQUIRED = modules(PROJECT["dependencies"])
COMES_WITH = {"jinja2": "markupsafe", "transformers": "tokenizers"}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Foreign modules that a file imports: as it is imported itself, and within functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) or (isinstance(function, ast.If) and guards(function.test))
        for node in ast.walk(function)
    }
    found: tuple[set[str], set[str]] = (set(), set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            continue
        found[node in inside].update(names - set(sys.stdlib_module_names) - {"normscope", "annotationlib"})
    return found


def guards(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


# A plugin of pytest is read by pytest alone, a client's callback by scripts that use the client, and kernels
# for Triton where it is installed.
ALONE = {"testing", "clients", "triton_forward.py", "triton_backward.py"}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if ALONE.isdisjoint(path.relative_to(PACKAGE).parts)]
OPTIONAL = set().union(*(EXTRAS[name] for name in FEATURES)) | {COMES_WITH["transformers"]}
EVERYWHERE = REQUIRED | {COMES_WITH["jinja2"]}
BY_NAME = {"ray", "torchao"}
"""Modules that are imported by a string."""


def test_every_extra_has_a_feature() -> None:
    assert set(EXTRAS) - FOR_DEVELOPERS == set(FEATURES)


def test_modules_import_only_what_every_installation_has() -> None:
    """An extra is imported where it is used, so that the rest works without it."""
    wrong = {path.name: names for path in FILES if (names := imports(path)[0] - EVERYWHERE)}
    assert not wrong


def test_functions_import_only_dependencies_and_extras() -> None:
    wrong = {path.name: names for path in FILES if (names := imports(path)[1] - EVERYWHERE - OPTIONAL)}
    assert not wrong


def test_only_scripts_import_the_callbacks_of_clients() -> None:
    assert [path for path in FILES if "monitor.clients." in path.read_text(encoding="utf-8")] == []


def test_every_dependency_is_used() -> None:
    used = set().union(*(names for path in FILES for names in imports(path)))
    assert used >= REQUIRED
    assert used | BY_NAME >= OPTIONAL


@pytest.mark.parametrize("extra", FEATURES)
def test_without_an_extra_the_error_names_it(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in EXTRAS[extra]]:
        monkeypatch.delitem(sys.modules, name)
    for name in EXTRAS[extra]:
        monkeypatch.setitem(sys.modules, name, None)
    assert run(FEATURES[extra]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"normscope[{extra}]" in err
    assert not list(tmp_path.iterdir()), "it says so before the work"
