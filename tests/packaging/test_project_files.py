"""Files that a forge reads: issue templates, citation, security, release checklist."""

import re
from pathlib import Path

import pytest
import yaml

import normscope

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
FORMS = [path for path in TEMPLATES if path.name != "config.yml"]
INPUTS = {"textarea", "input", "dropdown", "checkboxes", "markdown"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_the_forge_asks_for(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    assert {part["type"] for part in form["body"]} <= INPUTS
    names = [part["id"] for part in form["body"]]
    assert len(names) == len(set(names))
    assert all(part["attributes"]["label"] for part in form["body"])
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_every_template_is_yaml() -> None:
    assert len(FORMS) >= 3
    assert all(isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict) for path in TEMPLATES)


@pytest.mark.parametrize("name", ["SECURITY.md", "RELEASING.md", "CITATION.cff"])
def test_no_address_or_person_is_made_up(name: str) -> None:
    words = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://|\S@\w+\.\w+", words)


def test_the_citation_names_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == normscope.__version__
    assert citation["license"] == "Apache-2.0"
    assert {"title", "message", "authors", "type"} <= set(citation)


def test_the_release_checklist_names_the_files_and_targets_that_there_are() -> None:
    words = (ROOT / "RELEASING.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"`make ([a-z]+)`", words)
    assert {"dist", "mutants", "claims"} <= set(targets)
    assert all(f"\n{target}:" in makefile for target in targets)
    for path in re.findall(r"\b(?:src/\S+\.py|[A-Z]+\.md|CITATION\.cff|pyproject\.toml)", words):
        assert (ROOT / path).is_file(), path
