"""Every JSON output names its schema and follows it, and a document that does not is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from normscope.cli import bench
from normscope.cli.main import run
from normscope.errors import UsageError
from normscope.monitor import Event, Raised, Row, RunStore
from normscope.probes import Measurement
from normscope.rules import Finding, Severity
from normscope.schemas import names, schema

SMALL = "nn:decoder,depth=1,width=16,heads=2"
QUICK = ["--steps", "1", "--budget", "fast", "--fail-on", "never", "--batch-size", "2", "--seq-len", "16"]
MAP = ["map", "--width", "16", "--heads", "2", "--depths", "1", "--schemes", "pre", "--steps", "3"]
CALLS = {
    "report": ["check", SMALL, *QUICK, "--format", "json"],
    "anatomy": ["anatomy", "nn:encoder-decoder,depth=1,width=16,heads=2", "--format", "json"],
    "schemes": ["schemes", "--format", "json"],
    "doctor": ["doctor", "--format", "json"],
    "train": ["train", SMALL, "--steps", "2", "--output", "run", "--format", "json"],
    "map": [*MAP, "--seeds", "1", "--store", "map.sqlite", "--output", "map.html", "--format", "json"],
    "plan": ["plan", "nn:decoder,depth=4,width=32,heads=2", "--memory", "2.8MB", "--format", "json"],
    "claims": ["claims", "A3", "--seeds", "1", "--format", "json"],
    "diff": ["diff", SMALL, SMALL, "--parts", "structure", "--format", "json"],
    "watch": ["watch", "run.db", "--format", "json"],
    "run": ["check", "run.db", "--format", "json", "--fail-on", "never"],
}
"""A command for each JSON output of the command line; losses.jsonl is a file, benchmarks take long."""
BENCH = {"schema": "normscope.bench/1", "bench": "quick", "rows": [{"what": "one", "ratio": 1.5}]}
IN_FILES = {"losses"}


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema(name))


def watched_run(path: Path) -> None:
    """A store with one of each: note, row, alarm, event, first wrong value."""
    evidence = (Measurement("loss", "", float("nan"), "nats"), Measurement("x", "", (1.0, 2.0)))
    finding = Finding("NS801", "loss-spike", Severity.ERROR, ("blocks.0",), "It rose.", evidence)
    with RunStore(path) as store:
        store.note("model", "decoder")
        store.declare("step", (("loss", ""),))
        events = [Event(1, 0, 5.0, kind, {"sentence": "In wo."}) for kind in ("first-wrong-value", "more")]
        store.add([Row(1, 0, 5.0, "step", np.array([np.inf]))], [Raised(1, 0, 5.0, finding)], events)


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """Output of each command, filled in by the first test that runs it."""
    return {}


@pytest.fixture
def document(
    name: str,
    documents: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Any:
    if name not in documents:
        monkeypatch.chdir(tmp_path)
        if name in ("watch", "run"):
            watched_run(tmp_path / "run.db")
        assert run(CALLS[name]) == 0
        documents[name] = json.loads(capfd.readouterr().out)
    return documents[name]


def test_every_schema_has_a_command_or_a_file() -> None:
    assert set(names()) == set(CALLS) | IN_FILES | {"bench"}


@pytest.mark.parametrize("name", names())
def test_a_schema_is_of_its_draft_and_says_what_it_is(name: str) -> None:
    found = schema(name)
    jsonschema.Draft202012Validator.check_schema(found)
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["$id"].startswith(f"normscope.{name}/")
    assert found["title"]
    assert found["description"]
    assert schema(found["$id"]) == found


@pytest.mark.parametrize("name", names())
def test_every_reference_of_a_schema_leads_into_it(name: str) -> None:
    """Validators resolve no reference of ours over the network."""
    definitions = {f"#/$defs/{key}" for key in schema(name).get("$defs", {})}
    assert references(schema(name)) == definitions


def references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(references, node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"]} if "$ref" in node else set()
    return own.union(*map(references, node.values()))


@pytest.mark.parametrize("name", CALLS)
def test_an_output_names_its_schema_and_follows_it(name: str, document: Any) -> None:
    head = document[0] if isinstance(document, list) else document
    assert head["schema"] == schema(name)["$id"]
    validator(name).validate(document)


@pytest.mark.parametrize("name", CALLS)
def test_a_document_that_lacks_a_key_or_has_another_is_refused(name: str, document: Any) -> None:
    head = document[0] if isinstance(document, list) else document
    required = schema(name).get("required") or schema(name)["items"]["required"]
    assert set(required) <= set(head)
    for changed in (
        head | {"another": 1},
        head | {"schema": "normscope.another/1"},
        *({k: v for k, v in head.items() if k != key} for key in required),
    ):
        assert not validator(name).is_valid([changed] if isinstance(document, list) else changed)


def test_a_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quick = SimpleNamespace(BENCHES=("quick",), bench=lambda name: BENCH["rows"])
    monkeypatch.setattr(bench, "_benches", lambda: quick)
    assert run(["bench", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == BENCH
    validator("bench").validate(BENCH)
    for wrong in (BENCH | {"rows": []}, BENCH | {"rows": [{"what": [1]}]}, BENCH | {"another": 1}):
        assert not validator("bench").is_valid(wrong)


def test_lines_of_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", SMALL, "--steps", "2", "--validate-every", "1", "--output", "run"]) == 0
    lines = [json.loads(line) for line in Path("run/losses.jsonl").read_text().splitlines()]
    assert {"loss", "validation"} <= set().union(*lines)
    for line in lines:
        validator("losses").validate(line)
    for wrong in (lines[0] | {"another": 1}, {"step": 0, "schema": lines[0]["schema"]}):
        assert not validator("losses").is_valid(wrong)


def test_a_line_of_losses_that_is_not_finite_is_null() -> None:
    from normscope.train.folder import _line

    line = json.loads(_line(3, {"loss": float("nan"), "lr": 1e-3, "gradient_norm": float("inf")}))
    assert (line["loss"], line["gradient_norm"]) == (None, None)
    validator("losses").validate(line)


def test_the_reading_is_the_same_in_a_report() -> None:
    """Two self-contained files: what they share is the same."""
    reading, report = schema("anatomy"), schema("report")
    for name, definition in reading["$defs"].items():
        assert definition == report["$defs"][name]
    inside = report["properties"]["anatomy"]["properties"]
    assert inside == {k: v for k, v in reading["properties"].items() if k not in ("schema", "model")}


@pytest.mark.parametrize("wrong", ["repotr", "normscope.report/9", "page"])
def test_a_schema_that_there_is_not_is_refused_in_one_line(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):
        schema(wrong)
    assert run(["schema", wrong]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_the_command_prints_a_schema_and_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["schema", "normscope.map/1"]) == 0
    assert json.loads(capsys.readouterr().out) == schema("map")
    assert run(["schema", "report", "--output", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == schema("report")
    assert run(["schema"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        [name, schema(name)["$id"]] for name in names()
    ]
