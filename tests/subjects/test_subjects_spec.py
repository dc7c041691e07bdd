"""The MODEL grammar."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.subjects.spec import parse

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-1e6, 1e6) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
keys = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)


@given(st.dictionaries(keys, json_values, max_size=4))
def test_json_values_come_back(options: dict[str, object]) -> None:
    text = "hf:gpt2" + "".join(f",{key}={json.dumps(value)}" for key, value in options.items())
    assert parse(text).options == options


@pytest.mark.parametrize(
    ("text", "kind", "name", "factory", "options"),
    [
        ("hf:gpt2", "hf", "gpt2", "", {}),
        ("hf:gpt2,activation_function=relu,n_layer=2", "hf", "gpt2", "",
         {"activation_function": "relu", "n_layer": 2}),
        ("hf:x,types=[1,2],deep={\"a\":[3,{\"b\":4}]},t=\"a,b\"", "hf", "x", "",
         {"types": [1, 2], "deep": {"a": [3, {"b": 4}]}, "t": "a,b"}),
        ("hf:x,tie=False,other=None,third=True", "hf", "x", "", {"tie": False, "other": None, "third": True}),
        ("hf:../a folder/config.json,n_layer=1", "hf", "../a folder/config.json", "", {"n_layer": 1}),
        ("nn:decoder , depth = 3", "nn", "decoder", "", {"depth": 3}),
        ("a/b.py:make", "python", "a/b.py", "make", {}),
        ("C:/a/b.py:make,x=1", "python", "C:/a/b.py", "make", {"x": 1}),
        ("package.module:make", "python", "package.module", "make", {}),
    ],
)  # fmt: skip
def test_specs(text: str, kind: str, name: str, factory: str, options: dict[str, object]) -> None:
    spec = parse(text)
    assert (spec.kind, spec.name, spec.factory, spec.options, spec.text) == (
        kind,
        name,
        factory,
        options,
        text,
    )
