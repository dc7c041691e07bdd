"""Unusable data, or data that do not fit the model, give a one-line error with advice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normscope.cli.main import run
from normscope.errors import UsageError
from normscope.subjects import load

DECODER = "nn:decoder,depth=1,width=16,heads=2"
BOTH = "nn:encoder-decoder,depth=1,width=16,heads=2"
GPT2 = "hf:gpt2,n_layer=1,n_embd=16,n_head=2"
VIT = "hf:vit,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,image_size=32"
FACTORY = "normscope.demo.examples:post_ln"
PAIR = {"source": "a", "target": "b"}
DIGITS = {"images": "digits"}

Case = tuple[str, str, dict[str, Any], tuple[str, ...]]
CASES: list[Case] = [
    ("source alone", BOTH, {"source": "a"}, ("--source", "alone", "give --target too")),
    ("target alone", BOTH, {"target": "a"}, ("--target", "alone", "give --source too")),
    ("pairs and a text", BOTH, {**PAIR, "text": "a"}, ("--text together with --source and --target",)),
    ("pairs and images", BOTH, {**PAIR, **DIGITS}, ("together with --images", "one of them")),
    ("pairs for a decoder", DECODER, PAIR, ("encoder-decoder", "nn:encoder-decoder")),
    ("pairs for a causal model of theirs", GPT2, PAIR, ("GPT2LMHeadModel", "hf:t5")),
    ("pairs for a factory", FACTORY, PAIR, ("--source and --target", "(module, batches, loss_fn)")),
    ("images for a decoder", DECODER, DIGITS, ("a model of images", "nn:vision")),
    ("images for a causal model of theirs", GPT2, DIGITS, ("a model of images", "hf:vit")),
    ("images for a factory", FACTORY, DIGITS, ("--images", "(module, batches, loss_fn)")),
    ("unknown images", "nn:vision", {"images": "cats"}, ('"cats"', "digits")),
    ("too few classes", "nn:vision,classes=9", DIGITS, ("9 classes", "add classes=10")),
    ("too few classes of theirs", VIT, DIGITS, ("2 classes", "add num_labels=10")),
    (
        "other numbers of lines",
        BOTH,
        {"source": "a", "target": "long"},
        ("2 lines in", "3 in", "the same number of lines in both"),
    ),
    ("a folder of lines", BOTH, {"source": "a", "target": "texts"}, ('--target "', "one file of lines")),
    ("a name too long", DECODER, {"text": 300 * "a"}, ("File name too long",)),
    (
        "a share too small",
        DECODER,
        {"text": "b", "validation": 0.1},
        ("without its validation part, 9 tokens", "another share"),
    ),
    ("no target", BOTH, {"source": "a", "target": "absent"}, ("absent", "not found")),
    ("empty target", BOTH, {"source": "a", "target": "empty"}, ("(empty)",)),
    ("blank lines", BOTH, {"source": "a", "target": "crossed"}, ("no line with words on both sides",)),
    ("binary source", BOTH, {"source": "binary", "target": "b"}, ("(binary)",)),
    ("no pair for validation", BOTH, {**PAIR, "validation": 0.4}, ("none left", "larger share")),
    ("no image for validation", "nn:vision", {**DIGITS, "validation": 1e-4}, ("none left", "larger share")),
    ("empty folder", DECODER, {"text": "folder"}, ("0 files", "(empty)")),
    ("blank folder", DECODER, {"text": "blank"}, ("1 file", "(empty)")),
]


@pytest.fixture
def files(tmp_path: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    for name, content in {
        "a": b"one\n\n",
        "b": b"eins\nzwei\n",
        "long": b"1\n2\n3\n",
        "empty": b"",
        "crossed": b" \nzwei\n",
        "binary": b"\0\n\1\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text").write_text("ein\nzwei\n")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "text").write_text(" \n")
    paths = ("source", "target", "text")
    return lambda options: {k: tmp_path / v if k in paths else v for k, v in options.items()}


@pytest.mark.parametrize(("name", "spec", "options", "words"), CASES, ids=[case[0] for case in CASES])
def test_one_line(
    name: str,
    spec: str,
    options: dict[str, Any],
    words: tuple[str, ...],
    files: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    if spec.startswith("hf:"):
        pytest.importorskip("transformers")
    if "images" in options:
        pytest.importorskip("sklearn")
    with pytest.raises(UsageError) as caught:
        load(spec, **files(options))
    message = str(caught.value)
    assert "\n" not in message
    assert "expected" in message
    for word in words:
        assert word in message


def test_on_the_command_line(
    files: Callable[[dict[str, Any]], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", BOTH, "--source", str(files({"source": "a"})["source"])]) == 2
    assert capsys.readouterr().err.startswith("normscope: --source")
    assert run(["check", DECODER, "--images", "digits"]) == 2
    assert "nn:vision" in capsys.readouterr().err
