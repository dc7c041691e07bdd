"""Models on disk: a folder with a `model.safetensors` whose metadata hold the model's config."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from normscope import __version__
from normscope.atomic import disk_refusals, write_file
from normscope.errors import UsageError, describe
from normscope.nn.models import MODELS, Model, bare, config_of, name_of, options_of
from normscope.nn.tensors import put, tensors_of

FORMAT = "normscope.model/1"
WEIGHTS, KEY = "model.safetensors", "normscope"
OLD_CONFIG = "config.json"
"""Name of the config file in older folders, which are still read; today the config is in the metadata."""

_MOST_NAMES = 3
_DO = "give a folder that save_model wrote"


def save_model(model: Model, folder: str | Path) -> None:
    """Write `model` into `folder`, which is created if needed; a model in it is replaced.

    The file is written under another name and renamed, so an interrupted call leaves the old model intact.

    Raises:
        UsageError: the model is not one of `MODELS`, or the folder cannot be written.
    """
    model = bare(model)
    kind = name_of(model)
    options = {name: getattr(model.config, name) for name in options_of(kind)}
    config = {"format": FORMAT, "kind": kind, "config": options, "version": __version__}
    tensors = {path: tensor.detach().contiguous() for path, tensor in tensors_of(model).items()}
    folder = Path(folder)
    with disk_refusals(f'folder "{folder}"', "choose another"):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / WEIGHTS, lambda path: save_file(tensors, path, {KEY: json.dumps(config)}))


def load_model(folder: str | Path) -> Model:
    """Load a model that `save_model` wrote, on the CPU, in train mode; global generators are not changed.

    Raises:
        UsageError: the folder or file does not exist, the config is another tool's, or the weights do not
            fit it.
    """
    folder = Path(folder)
    kind, options = read_config(folder)
    with torch.random.fork_rng(devices=[]):
        model = MODELS[kind](config_of(kind, **options))
    put(model, _read_weights(folder / WEIGHTS, tensors_of(model)))
    return model


def read_config(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """Name and options of the model in `folder`; `build` checks the options."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise UsageError(f'folder "{folder}" without {WEIGHTS}', WEIGHTS, _DO)
    config = _metadata(path)
    if config is None:
        path = path.with_name(OLD_CONFIG)
        config = _old_config(path)
    if config.get("format") != FORMAT:
        do = f'for a model of Hugging Face write "hf:{folder}"' if "model_type" in config else _DO
        raise UsageError(f'"{path}" of another tool', f'"format": "{FORMAT}"', do)
    kind, options = config.get("kind"), config.get("config")
    if not isinstance(kind, str) or kind not in MODELS or not isinstance(options, dict):
        raise UsageError(f'"{path}" with kind={kind!r}', f"one of {', '.join(MODELS)}, with a config", _DO)
    return kind, options


def _metadata(path: Path) -> dict[str, Any] | None:
    """The config in the metadata of a file of weights; None if it has none."""
    try:
        with safe_open(path, "pt") as file:
            config = json.loads((file.metadata() or {}).get(KEY, "null"))
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f'"{path}" ({describe(error)})', "a safetensors file", "save it again") from error
    return config if isinstance(config, dict) else None


def _old_config(path: Path) -> dict[str, Any]:
    """The config of an older folder, from its own file."""
    if not path.is_file():
        raise UsageError(
            f'"{path.with_name(WEIGHTS)}" without a config in its metadata', "a model of normscope", _DO
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f'"{path}" ({describe(error)})', "JSON", _DO) from error
    return config if isinstance(config, dict) else {}


def _read_weights(path: Path, own: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f'"{path}" ({describe(error)})', "a safetensors file", "save it again") from error
    misfits = [f"{name} is missing" for name in own if name not in found]
    misfits += [f"{name} is not of this model" for name in found if name not in own]
    misfits += [
        f"{name} has shape {tuple(found[name].shape)} for {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if misfits:
        more = ["…"] if len(misfits) > _MOST_NAMES else []
        raise UsageError(
            f'"{path}" ({", ".join(misfits[:_MOST_NAMES] + more)})',
            "the weights of the model in its config",
            "check that they belong together, or save it again",
        )
    # Clones are independent of the file's mapping, and aligned like the tensors of a new model.
    return {name: tensor.clone().requires_grad_(own[name].requires_grad) for name, tensor in found.items()}
