"""Tests that exports of `normscope.linalg` are documented, and that examples and pages run as shown."""

import dataclasses
import doctest
import inspect
import re
import sys
from enum import Enum
from functools import cache
from math import log

import numpy as np
import pages
import pytest
import torch

from normscope import linalg
from normscope.linalg.maps import BaseMap

EXPORTS = {name: getattr(linalg, name) for name in linalg.__all__}
FUNCTIONS = {name: each for name, each in EXPORTS.items() if inspect.isfunction(each)}
CLASSES = {name: each for name, each in EXPORTS.items() if inspect.isclass(each)}
RECORDS = {name: each for name, each in CLASSES.items() if dataclasses.is_dataclass(each)}
MAPS = {name: each for name, each in CLASSES.items() if issubclass(each, BaseMap)}
WORKING = FUNCTIONS | MAPS | {"TokenProjector": linalg.TokenProjector}
"""Exports that compute; they need a cost and an example. The rest are records, enums, protocols, aliases."""


def doc(each: object) -> str:
    return inspect.getdoc(each) or ""


@pytest.mark.parametrize("name", WORKING)
def test_what_works_tells_its_cost_and_shows_an_example(name: str) -> None:
    text = doc(EXPORTS[name])
    assert re.search(r"\b[Cc]osts? |\bCost[,:]", text), f"{name}: its cost in products, or that there is none"
    assert "Examples:" in text
    assert ">>>" in text


@pytest.mark.parametrize("name", WORKING)
def test_every_argument_is_explained(name: str) -> None:
    text = doc(EXPORTS[name])
    missing = [
        parameter
        for parameter in inspect.signature(EXPORTS[name]).parameters
        if not re.search(rf"(^|[ ,]){parameter}\b[^\n]*:|\b{parameter}\b.* \(", text, flags=re.MULTILINE)
        and not re.search(r"Takes .*\(", text)
    ]
    assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("name", WORKING)
def test_a_source_is_given_with_the_function_or_its_module(name: str) -> None:
    module = sys.modules[EXPORTS[name].__module__]
    if module.__name__.endswith((".dense", ".maps", ".subspaces")):
        return  # plain linear algebra
    assert re.search(r"\bSources?:|\(\w[\w &]+ \d{4}", doc(EXPORTS[name]) + doc(module)), module.__name__


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_a_result_is_explained(name: str) -> None:
    text = doc(RECORDS[name])
    assert "Attributes:" in text
    fields = [field.name for field in dataclasses.fields(RECORDS[name])]
    missing = [field for field in fields if not re.search(rf"(^|[ ,]){field}\b[^\n]*:", text, re.MULTILINE)]
    assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS])
def test_everything_says_what_it_is(name: str) -> None:
    text = doc(EXPORTS[name])
    assert text
    assert not text.startswith(f"{name}(")  # what dataclasses write by themselves
    if issubclass(type(EXPORTS[name]), type(Enum)):
        assert text != doc(Enum)


@pytest.mark.parametrize("name", EXPORTS)
def test_examples_run(name: str) -> None:
    """Docstrings of an export and of its methods; warnings are errors here too."""
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(verbose=False)
    if name not in CLASSES and name not in FUNCTIONS:
        return
    found = finder.find(EXPORTS[name], name, globs={"torch": torch, "np": np, "log": log} | EXPORTS)
    assert name not in WORKING or any(test.examples for test in found)
    for test in found:
        assert runner.run(test).failed == 0


def test_the_surface_is_sorted_and_whole() -> None:
    names = linalg.__all__
    assert len(set(names)) == len(names)
    assert sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n)) == names


PAGES = ["linalg.md", "tutorial-theorems.md"]
ran = cache(pages.run)


@pytest.mark.parametrize("page", PAGES)
def test_pages_print_what_they_show(page: str) -> None:
    pytest.importorskip("transformers")
    shown = 0
    for piece in ran(page):
        assert not pages.difference(piece.printed, piece.shown), pages.difference(piece.printed, piece.shown)
        shown += bool(piece.shown)
    assert shown >= 4


@pytest.mark.parametrize("page", PAGES)
def test_links_of_pages_lead_somewhere(page: str) -> None:
    text = (pages.DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (pages.DOCS / target).exists(), target


def test_names_in_the_guide_exist() -> None:
    text = (pages.DOCS / "linalg.md").read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    words = {word for line in tables for word in re.findall(r"`([a-z_0-9A-Z]+)`", line)}
    assert len(words) >= 12
    assert words <= set(linalg.__all__)


def test_the_comparison_of_pages_sees_a_difference() -> None:
    assert not pages.difference("σ = 1.00, ε 3e-16\n", "σ = 1.01, ε 9e-15")
    assert pages.difference("σ = 1.00", "σ = 1.20")
    assert pages.difference("a\nb", "a")
    assert pages.difference("converged 1", "not converged 1")
    assert pages.difference("1e-16", "0.5")
