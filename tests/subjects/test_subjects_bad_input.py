"""Unusable input gives a one-line error: what was given, what was expected and what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope.errors import UsageError
from normscope.subjects import load, make_subject

FACTORIES = """
import torch
from torch import nn

not_a_function = 3

def model(width=8):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))

def raises():
    raise KeyError("no such\\nlayer")

def exits():
    raise SystemExit(3)

def nothing():
    return None

def number():
    return 42

def a_class():
    return nn.Linear

def four():
    return model(), 1, 2, 3

def wrong_batch():
    return model(), 3

def no_batches():
    return model(), iter(())

def iterator_of_none():
    return model(), iter([None])

def wrong_loss():
    return model(), torch.zeros(2, 3, dtype=torch.long), "cross entropy"

def loss_raises():
    return model(), torch.zeros(2, 3, dtype=torch.long), lambda output, batch: output.missing

def loss_of_every_token():
    return model(), torch.zeros(2, 3, dtype=torch.long), lambda output, batch: output

def batch_does_not_fit():
    return nn.Linear(8, 8), torch.zeros(2, 5)

def needs_argument(depth):
    return model()

class NeedsConfig(nn.Module):
    def __init__(self, config):
        super().__init__()

def without_parameters():
    return nn.ReLU()
"""

REMOTE = json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}})

UNKNOWN_SCHEME = (
    'scheme "per": expected one of the 47 that `normscope schemes` lists; the nearest name is "peri".'
)

Case = tuple[str, Callable[[Path], str], tuple[str, ...]]

CASES: list[Case] = [
    ("no prefix", lambda p: "gpt2", ('MODEL "gpt2"', "hf:gpt2")),
    ("empty", lambda p: "", ('MODEL ""', "nn:decoder")),
    ("no name", lambda p: "hf:", ('"hf:"', "a name after hf:")),
    ("unknown prefix", lambda p: "hff:gpt2", ('"hff:gpt2"', "hf:MODEL_TYPE")),
    ("no factory", lambda p: f"{p}/factories.py", ("factories.py:FACTORY", "`normscope init /")),
    ("a folder", lambda p: str(p), ("let `normscope init /", "write a factory for the model in that")),
    ("unknown type", lambda p: "hf:gtp2", ('"gtp2"', 'the nearest name is "gpt2"')),
    ("unlike any type", lambda p: "hf:zzzzzzzzzzz", ("zzzzzzzzzzz", "a model type of transformers")),
    ("name of the Hub", lambda p: "hf:openai-community/gpt2", ("openai-community/gpt2", "never downloaded")),
    ("typo in an option", lambda p: "hf:gpt2,n_layers=2", ('"n_layers"', 'the nearest name is "n_layer"')),
    (
        "option of the other type",
        lambda p: "hf:bert,n_layer=2",
        ('"n_layer"', "BertConfig", 'name is "num_hidden_layers"'),
    ),
    ("a name in its code", lambda p: "hf:llama,layers=2", ('"layers"', 'name is "num_hidden_layers"')),
    ("their name for ours", lambda p: "nn:decoder,hidden_size=8", ('nearest name is "width"',)),
    ("option without value", lambda p: "hf:gpt2,n_layer", ('"n_layer"', "key=value")),
    ("option twice", lambda p: "hf:gpt2,n_layer=1,n_layer=2", ('"n_layer"', "each option once")),
    ("value of a wrong type", lambda p: 'hf:gpt2,n_layer="two"', ("n_layer", "GPT2Config")),
    ("heads that do not divide", lambda p: "hf:gpt2,n_layer=1,n_embd=10,n_head=3", ("GPT2Config", "change")),
    ("no such file", lambda p: f"hf:{p}/absent.json", ("absent.json", "not found")),
    ("no such folder", lambda p: f"hf:{p}/absent/", ("absent", "not found")),
    ("folder without config", lambda p: f"hf:{p}", ("no config.json", "a config.json in it")),
    ("not JSON", lambda p: _written(p, "config.json", "{"), ("JSONDecodeError", "a config.json")),
    ("a JSON list", lambda p: _written(p, "config.json", "[]"), ("list", "a JSON object")),
    ("no model type", lambda p: _written(p, "config.json", "{}"), ("no model_type", "a config.json")),
    (
        "remote code",
        lambda p: _written(p, "config.json", REMOTE),
        ("auto_map", "remote code is never run", "factory"),
    ),
    ("pickled weights", lambda p: _pickled(p), ("pickled weights", "model.safetensors")),
    ("unknown model of ours", lambda p: "nn:decodr", ("nn:decodr", 'the nearest name is "decoder"')),
    ("patches of ours", lambda p: "nn:vision,patch=5", ("patch=5", "divide the image")),
    ("option of another model of ours", lambda p: "nn:vision,vocab=9", ('"vocab"', "nn:vision")),
    ("unknown scheme", lambda p: "nn:decoder,scheme=per", (UNKNOWN_SCHEME,)),
    ("unknown option of ours", lambda p: "nn:decoder,dept=2", ('"dept"', 'the nearest name is "depth"')),
    ("heads of ours", lambda p: "nn:decoder,width=10,heads=3", ("heads=3", "divide")),
    ("depth zero", lambda p: "nn:decoder,depth=0", ("depth 0", "from 1")),
    ("depth as text", lambda p: "nn:decoder,depth=two", ("depth 'two'", "whole number")),
    ("unknown weights", lambda p: "nn:decoder,init=xavir", ("init 'xavir'", '"xavier"')),
    ("no such Python file", lambda p: f"{p}/absent.py:model", ("absent.py", "not found")),
    ("no such module", lambda p: "no_such_package.models:make", ("no_such_package", "no module")),
    ("no such factory", lambda p: f"{_factories(p)}:modle", ('"modle"', 'the nearest name is "model"')),
    ("not a function", lambda p: f"{_factories(p)}:not_a_function", ("int", "a function")),
    (
        "raises",
        lambda p: f"{_factories(p)}:raises",
        ("KeyError: 'no such", "add --traceback to see where it failed"),
    ),
    ("exits", lambda p: f"{_factories(p)}:exits", ("SystemExit", "add --traceback to see where it failed")),
    ("syntax error", lambda p: f"{_written(p, 'bad.py', 'def (')[3:]}:make", ("SyntaxError", "imported")),
    ("missing import", lambda p: f"{_written(p, 'bad2.py', 'import absent_x')[3:]}:make", ("absent_x",)),
    (
        "returns None",
        lambda p: f"{_factories(p)}:nothing",
        ("returned NoneType", "a module, (module, batch)"),
    ),
    ("returns a number", lambda p: f"{_factories(p)}:number", ("returned int", "a module, (module, batch)")),
    ("returns a class", lambda p: f"{_factories(p)}:a_class", ("the class Linear", "call the class")),
    ("returns four", lambda p: f"{_factories(p)}:four", ("(Sequential, int, int, int)", "a module")),
    ("batch is a number", lambda p: f"{_factories(p)}:wrong_batch", ("batch of type int", "a tensor")),
    ("no batches", lambda p: f"{_factories(p)}:no_batches", ("empty", "at least one batch")),
    ("batches of None", lambda p: f"{_factories(p)}:iterator_of_none", ("NoneType", "a tensor")),
    (
        "loss is text",
        lambda p: f"{_factories(p)}:wrong_loss",
        ("loss_fn of type str", "loss_fn(output, batch)"),
    ),
    ("loss raises", lambda p: f"{_factories(p)}:loss_raises", ("AttributeError", "a scalar tensor")),
    (
        "loss is no scalar",
        lambda p: f"{_factories(p)}:loss_of_every_token",
        ("(2, 3, 256)", "a scalar tensor"),
    ),
    (
        "batch does not fit",
        lambda p: f"{_factories(p)}:batch_does_not_fit",
        ("RuntimeError", "float32 (2, 5)"),
    ),
    ("factory with arguments", lambda p: f"{_factories(p)}:needs_argument", ("depth", "key=value, or let")),
    (
        "class with arguments",
        lambda p: f"{_factories(p)}:NeedsConfig",
        ("'config'", "factories.py --class NeedsConfig` write a factory"),
    ),
    (
        "no factory of that name",
        lambda p: f"{_factories(p)}:zzz",
        ("check its name, or let `normscope init",),
    ),
    (
        "typo for the factory",
        lambda p: f"{_factories(p)}:model,widht=4",
        ("widht", 'nearest name is "width"'),
    ),
    ("nothing to see", lambda p: f"{_factories(p)}:without_parameters", ("ReLU", "(module, batch)")),
    ("too large", lambda p: "nn:decoder,depth=24,width=65536", ("parameters", "GiB", "make it smaller")),
    ("too large of theirs", lambda p: "hf:llama,hidden_size=65536", ("parameters", "GiB", "anatomy")),
]


def _written(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return f"hf:{folder / name}"


def _pickled(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "pytorch_model.bin").write_bytes(b"x")
    return f"hf:{folder}"


def _factories(folder: Path) -> Path:
    path = folder / "factories.py"
    path.write_text(FACTORIES)
    return path


def assert_one_line(error: UsageError, *words: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert message.startswith(" ".join(error.given.split()))
    assert "expected" in message
    assert message.endswith(f"{' '.join(error.do.split())}.")
    assert len(message) < 1000
    for word in words:
        assert word in message


@pytest.mark.parametrize(("name", "spec", "words"), CASES, ids=[case[0] for case in CASES])
def test_a_model_that_cannot_be_used(
    name: str, spec: Callable[[Path], str], words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        load(spec(tmp_path))
    assert_one_line(caught.value, *words)


def test_a_raising_factory_keeps_its_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(f"{_factories(tmp_path)}:raises")
    assert isinstance(caught.value.__cause__, KeyError)
    frames = []
    traceback = caught.value.__cause__.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "raises" in frames


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("(empty)",)),
        (b" \n\t ", ("(empty)",)),
        (b"\x7fELF\x00\x01", ("(binary)", "UTF-8")),
        (b"\xff\xfe\xfa caf\xe9", ("(binary)", "UTF-8")),
        (b"too short", ("9 tokens", "at least one sequence of 65 tokens", "--seq-len")),
    ],
)
def test_a_text_that_cannot_be_used(content: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load("nn:decoder,depth=1,width=8,heads=1", text=tmp_path / "text")
    assert_one_line(caught.value, *words)


@pytest.mark.parametrize(
    ("path", "word"), [("absent.txt", "not found"), (".", "0 files"), ("/dev/null", "not a file")]
)
def test_a_text_that_is_not_there(path: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load("nn:decoder,depth=1,width=8,heads=1", text=tmp_path / path)
    assert_one_line(caught.value, word)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, ("batch size 0", "from 1")),
        ({"seq_len": -1}, ("sequence length -1", "from 1")),
        ({"seed": -1}, ("seed -1", "from 0")),
        ({"device": "gpu"}, ('device "gpu"', "leave --device out")),
        ({"device": "cuda:77"}, ('device "cuda:77"',)),
        ({"batch_size": 10**9, "seq_len": 10**6}, ("of ids", "lower --batch-size")),
        ({"batch_size": 50_000}, ("one forward writes", "lower --batch-size")),
    ],
)
def test_settings_that_cannot_be_used(settings: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        load("nn:decoder,depth=1,width=512", **settings)
    assert_one_line(caught.value, *words)


def test_make_subject_wants_a_module() -> None:
    with pytest.raises(UsageError) as caught:
        make_subject(torch.nn.Linear)  # type: ignore[arg-type]
    assert_one_line(caught.value, "the class Linear", "a torch.nn.Module")


def test_memory_that_is_refused_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(
        "from torch import nn\nimport torch\n"
        "class Hungry(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.embed = nn.Embedding(256, 4)\n"
        "    def forward(self, ids):\n        return self.embed(ids) + torch.zeros(2**60)\n"
        "def make():\n    return Hungry()\n"
        "def hungry_factory():\n    return nn.Linear(2**40, 2**10)\n"
    )
    for factory in ("make", "hungry_factory"):
        with pytest.raises(UsageError) as caught:
            load(f"{tmp_path}/hungry.py:{factory}")
        assert_one_line(caught.value, "out of memory", "lower --batch-size")


class Positioned(nn.Module):
    """Embeddings of 100 ids and 16 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(100, 8), nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tok(ids) + self.pos(torch.arange(ids.shape[1]))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (
            torch.tensor([[1, 255, 3]]),
            'id 255 for the embedding "tok", which has 100 rows|0 to 99|smaller ids',
        ),
        (
            torch.tensor([[1, -100, 3]]),
            'id -100 for the embedding "tok", which has 100 rows|ids from 0 to 99',
        ),
        (torch.full((1, 20), 3), 'id 19 for the embedding "pos", which has 16 rows|15;|shorter sequences'),
    ],
)
def test_a_row_that_an_embedding_lacks_is_named(ids: torch.Tensor, words: str) -> None:
    for batch in (ids, iter([{"ids": ids}])):
        with pytest.raises(UsageError) as caught:
            make_subject(Positioned(), batch)
        assert_one_line(caught.value, *words.split("|"))
        assert "IndexError" not in str(caught.value)


def test_no_option_is_advised_that_own_batches_do_not_use() -> None:
    class Raises(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return [ids][ids.ndim]

    with pytest.raises(UsageError, match=r"IndexError: list index .*; change the batch or the forward\.$"):
        make_subject(Raises(), torch.ones(2, 3))
