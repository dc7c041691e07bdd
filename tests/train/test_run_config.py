"""RunConfig: reading and writing TOML, and one-line errors."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import UsageError
from normscope.train import OPTIMIZERS, PRECISIONS, SCHEDULES, RunConfig
from normscope.train.folder import default_folder
from normscope.train.run_config import read_table

MODEL = "nn:decoder,depth=1,width=16,heads=2"
positive = st.floats(min_value=1e-300, max_value=1e300)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def flats(draw: st.DrawFn) -> dict[str, object]:
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    return {
        "model": draw(words),
        "text": draw(st.none() | words),
        "batch_size": draw(st.integers(1, 10**6)),
        "validation": draw(st.floats(0, 1, exclude_max=True)),
        "optimizer": optimizer,
        "lr": draw(positive),
        "warmup": draw(st.integers(0, 10**9)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "precision": draw(st.sampled_from(PRECISIONS)),
        "clip": draw(st.none() | positive),
        "weight_decay": draw(st.none() | st.floats(0, 1e9)),
        "eps": draw(st.none() | positive) if optimizer.startswith("adam") else None,
    }


@given(flats())
def test_a_config_goes_through_toml_and_a_dict_and_comes_out_the_same(flat: dict) -> None:
    import tomllib

    config = RunConfig.from_dict(flat)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config
    assert all(config.to_dict()[key] == value for key, value in flat.items())


def test_a_file_with_dashes_or_underscores_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'model = "{MODEL}"\nbatch-size = 2\nseq_len = 8\nlr = 1\n', encoding="utf-8")
    config = RunConfig.from_dict(read_table(path))
    assert (config.batch_size, config.seq_len, config.trial.lr, config.trial.steps) == (2, 8, 1, 300)


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"learning-rate": 1e-3}, 'key "learning-rate"'),
        ({"batchsize": 4}, 'nearest name is "batch-size"'),
        ({"optimiser": "adam"}, 'nearest name is "optimizer"'),
        ({"batch-size": 2, "batch_size": 2}, "twice"),
        ({"model": None}, "model = None"),
        ({"model": ""}, "a MODEL"),
        ({"text": ""}, "text = ''"),
        ({"batch_size": 0}, "batch-size = 0"),
        ({"batch_size": True}, "whole number"),
        ({"validation": 1.0}, "share"),
        ({"validation": -0.1}, "share"),
        ({"device": 3}, "device = 3"),
        ({"lr": -1e-3}, "positive"),
        ({"lr": "1e-3"}, "positive"),
        ({"schedule": "cosin"}, 'nearest name is "cosine"'),
        ({"precision": "fp16"}, "float16"),
        ({"clip": 0.0}, "positive gradient norm"),
        ({"accumulation": 0}, "1 or more"),
        ({"weight_decay": -1}, "from 0"),
        ({"eps": 0.0}, "positive"),
        ({"eps": 1e-8, "optimizer": "sgd"}, "adam or adamw"),
        ({"seed": -1}, "from 0"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(flat: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        RunConfig.from_dict({"model": MODEL} | flat)
    assert "\n" not in str(error.value)


def test_keys_that_came_later_count_only_where_they_are_set() -> None:
    """Older stores of maps keep their cells."""
    plain = RunConfig.from_dict({"model": MODEL})
    later = {"validate_every": 5, "checkpoint_every": "7", "beta1": 0.8, "beta2": 0.9, "lr_end": 0.2}
    assert not plain.identity().keys() & (later.keys() | {"decay_steps"})
    assert plain.replace(**later).identity() == plain.identity() | later


def test_a_run_needs_a_model() -> None:
    with pytest.raises(UsageError, match="without a model"):
        RunConfig.from_dict({"lr": 1e-3})


@pytest.mark.parametrize("body", [b"lr = = 1", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(UsageError, match="a TOML file"):
        RunConfig.from_dict(read_table(path))
    path.write_bytes(body)
    with pytest.raises(UsageError, match="a TOML file") as error:
        RunConfig.from_dict(read_table(path))
    assert "\n" not in str(error.value)


def test_the_folder_is_that_of_the_config_but_for_its_steps() -> None:
    config = RunConfig.from_dict({"model": MODEL})
    assert default_folder(config) == default_folder(config.replace(steps=7))
    assert default_folder(config) != default_folder(config.replace(lr=1e-3))
    assert default_folder(config).parts[0] == "runs"
    assert "/" not in default_folder(config, "../up").name
