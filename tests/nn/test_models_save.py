"""Models on disk: a saved model is loaded unchanged; other or broken files give a one-line error."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import normscope
from normscope.errors import UsageError
from normscope.nn import MODELS, build, load_model, save_model
from normscope.nn.drawn import is_trained

SMALL: dict[str, Any] = {"depth": 2, "width": 16, "heads": 2}
FEW = ("pre", "deepnorm", "sigma-reparam", "admin", "residual-dual", "mhc", "ngpt")


def _settled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def _logits(kind: str, model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    if kind == "vision":
        return model(torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32).to(dtype)).logits
    ids = torch.arange(10).view(2, 5)
    return model(ids, ids).logits


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scheme", FEW)
def test_a_model_comes_back(kind: str, scheme: str, tmp_path: Path) -> None:
    model = _settled(build(kind, scheme=scheme, dropout=0.1, final_norm=True, **SMALL))
    save_model(model, tmp_path / "a" / "b")
    before = torch.get_rng_state()
    back = load_model(tmp_path / "a" / "b")
    assert torch.equal(torch.get_rng_state(), before)
    assert type(back) is type(model)
    assert back.config == model.config
    assert back.training
    assert torch.equal(_logits(kind, back.eval()), _logits(kind, model))
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_what_is_tied_is_stored_once_and_stays_tied(kind: str, tmp_path: Path) -> None:
    model = build(kind, tie=True, **SMALL)
    save_model(model, tmp_path)
    assert (
        sum(tensor.shape == (256, 16) for tensor in load_file(tmp_path / "model.safetensors").values()) == 1
    )
    back = load_model(tmp_path)
    assert back.head.weight is back.embedding.tokens.weight
    assert torch.equal(back.head.weight, model.head.weight)
    assert back.head.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_precision_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build("decoder", **SMALL).to(dtype)
    model.final_norm.float()  # type: ignore[union-attr]
    save_model(model, tmp_path)
    back = load_model(tmp_path)
    for ours, theirs in zip(model.parameters(), back.parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_whether_it_was_trained_comes_back(tmp_path: Path) -> None:
    model = build("decoder", **SMALL)
    save_model(model, tmp_path)
    assert not is_trained(load_model(tmp_path))
    save_model(_settled(model), tmp_path)  # over the other one
    assert is_trained(load_model(tmp_path))


def test_a_compiled_model_is_saved_as_itself(tmp_path: Path) -> None:
    model = build("decoder", **SMALL)
    save_model(torch.compile(model, backend="eager"), tmp_path)
    assert torch.equal(load_model(tmp_path).head.weight, model.head.weight)


def test_a_save_that_is_cut_short_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = build("decoder", **SMALL), build("decoder", **SMALL)
    save_model(old, tmp_path)

    def half(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half of a file")
        raise OSError("No space left on device")

    monkeypatch.setattr("normscope.nn.save.save_file", half)
    with pytest.raises(UsageError, match="No space left"):
        save_model(new, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(load_model(tmp_path).head.weight, old.head.weight)


@pytest.mark.parametrize("call", [(os, "fsync"), (Path, "replace")], ids=["before", "at the rename"])
def test_a_save_that_is_killed_leaves_weights_and_config_of_one_model(
    call: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config distinguishes them even if all shapes are equal."""
    old, new = (build("decoder", scheme=scheme, **SMALL) for scheme in ("pre", "post"))
    save_model(old, tmp_path)
    real, made = getattr(*call), 0

    def killed(*args: Any) -> Any:
        nonlocal made
        made += 1
        real(*args) if made > 1 or call[1] == "replace" else None
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*call, killed)
        with pytest.raises(KeyboardInterrupt):
            save_model(new, tmp_path)
    back, expected = load_model(tmp_path), new if call[1] == "replace" else old
    assert back.config.scheme == expected.config.scheme
    assert torch.equal(back.head.weight, expected.head.weight)


def _in_the_old_format(folder: Path) -> None:
    """Rewrite the folder in the old format, with the config in a file of its own."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        config = file.metadata()["normscope"]
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    (folder / "config.json").write_text(config)


def test_a_folder_of_the_old_format_is_read_and_a_config_left_in_it_is_not(tmp_path: Path) -> None:
    old, new = build("decoder", scheme="post", **SMALL), build("decoder", scheme="pre", **SMALL)
    save_model(old, tmp_path)
    _in_the_old_format(tmp_path)
    assert load_model(tmp_path).config == old.config
    save_model(new, tmp_path)
    assert (tmp_path / "config.json").exists()
    assert load_model(tmp_path).config == new.config


def test_a_model_of_another_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"class Linear.*Decoder, Encoder"):
        save_model(nn.Linear(2, 2), tmp_path / "x")  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="a folder that can be written"):
        save_model(build("decoder", **SMALL), tmp_path / "x")


def _edited(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["normscope"])
    save_file(tensors, path, {"normscope": json.dumps({**config, **changes})})


def _old(folder: Path, config: bytes) -> None:
    _in_the_old_format(folder)
    (folder / "config.json").write_bytes(config)


def _weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, path, metadata)


def _options(**changes: Any) -> dict[str, Any]:
    return {"config": {"scheme": "pre", "depth": 2, "width": 16, "heads": 2, **changes}}


BROKEN = {
    "no folder": (lambda f: [p.unlink() for p in f.iterdir()], ("without model.safetensors", "save_model")),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("without model.safetensors",)),
    "weights alone": (
        lambda f: (_in_the_old_format(f), (f / "config.json").unlink()),
        ("without a config in its metadata",),
    ),
    "no JSON": (lambda f: _old(f, b"{"), ("config.json", "JSON")),
    "bytes": (lambda f: _old(f, b"\xff\xfe"), ("config.json", "JSON")),
    "a list": (lambda f: _old(f, b"[]"), ("of another tool", "normscope.model/1")),
    "of Hugging Face": (lambda f: _old(f, b'{"model_type": "gpt2"}'), ("of another tool", "hf:")),
    "another format": (lambda f: _edited(f, format="normscope.model/9"), ("normscope.model/1",)),
    "another kind": (lambda f: _edited(f, kind="decodr"), ("kind='decodr'", "decoder")),
    "a kind that is a list": (lambda f: _edited(f, kind=[]), ("kind=[]",)),
    "no config": (lambda f: _edited(f, config=None), ("with a config",)),
    "unknown option": (lambda f: _edited(f, **_options(widht=3)), ('"widht"', "width")),
    "unknown scheme": (lambda f: _edited(f, **_options(scheme="prae")), ('"prae"', '"pre"')),
    "other shapes": (
        lambda f: _edited(f, **_options(width=32)),
        ("shape (16, 16) for (32, 32)", "belong together"),
    ),
    "fewer blocks": (lambda f: _edited(f, **_options(depth=1)), ("blocks.1.", "is not of this model")),
    "more blocks": (lambda f: _edited(f, **_options(depth=3)), ("blocks.2.", "is missing", "…")),
    "a tensor less": (
        lambda f: _weights(f, lambda t: t.pop("head.weight")),
        ("head.weight is missing",),
    ),
    "half a file": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:999]),
        ("model.safetensors", "SafetensorError"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders(case: str, tmp_path: Path) -> None:
    save_model(build("decoder", **SMALL), tmp_path)
    breaks, words = BROKEN[case]
    breaks(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_model(tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        normscope.load(f"nn:{tmp_path}")


@pytest.mark.parametrize("kind", MODELS)
def test_a_spec_names_a_folder(kind: str, tmp_path: Path) -> None:
    model = _settled(build(kind, **SMALL))
    save_model(model, tmp_path)
    subject = normscope.load(f"nn:{tmp_path}", batch_size=2, seq_len=8)
    for ours, theirs in zip(model.parameters(), subject.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    built = normscope.load(f"nn:{kind},depth=2,width=16,heads=2", batch_size=2, seq_len=8)
    assert subject.input == built.input
    copy.deepcopy(subject.model)


def test_a_folder_with_a_short_context_gets_shorter_sequences(tmp_path: Path) -> None:
    save_model(build("decoder", context=40, **SMALL), tmp_path)
    subject = normscope.load(f"nn:{tmp_path}")
    assert subject.batch["ids"].shape == (4, 40)  # type: ignore[index, call-overload]
    assert "4 sequences of 40 tokens (the model cannot take 64)" in subject.input


def test_a_folder_takes_no_options(tmp_path: Path) -> None:
    save_model(build("decoder", **SMALL), tmp_path)
    with pytest.raises(UsageError, match=r'option "scheme".*no options'):
        normscope.load(f"nn:{tmp_path},scheme=post")


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"nn:no/such/folder.*decoder.*or a folder"):
        normscope.load("nn:no/such/folder")


def test_fake_tensors_leave_the_weights_on_the_disk(tmp_path: Path) -> None:
    save_model(build("decoder", **SMALL), tmp_path)
    subject = normscope.load(f"nn:{tmp_path}", fake=True)
    assert "its weights were not read" in " ".join(subject.notes)
