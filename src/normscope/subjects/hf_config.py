"""Configurations of `hf:` names, without network access or remote code."""

import contextlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.errors import UsageError, describe, suggest
from normscope.subjects.spec import Spec

_FOR_ALL = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "num_labels"})
"""Options that every model accepts, whether its configuration declares them or not."""


@dataclass(frozen=True)
class Configured:
    """A configuration of transformers, the folder with its weights (or None), and notes."""

    config: Any
    folder: Path | None
    notes: tuple[str, ...]


def configured(spec: Spec) -> Configured:
    """Configuration of `spec`; the text part if it is composite (Gemma 3)."""
    path = _path_of(spec)
    values = _read_json(path) if path else {"model_type": spec.name}
    config_class = _config_class(spec, path, values)
    config = _with_options(spec, config_class, values)
    text = _text_part(config)
    notes = []
    if text is not config:
        notes.append(f"only the text part ({text.model_type}) of {config.model_type} is analysed")
    stored = values.get("dtype", values.get("torch_dtype"))
    if stored not in (None, "float32"):
        notes.append(f"{path} says {stored}; built in float32 unless --dtype says otherwise")
    return Configured(_ready(text, spec), _weights_folder(spec, path), tuple(notes))


def _path_of(spec: Spec) -> Path | None:
    """Path of the config.json, or None if the name is a model type."""
    path = Path(spec.name).expanduser()
    if spec.name in _config_mapping():  # ./name means a folder of that name
        return None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(
                f'folder "{path}" (no config.json)', "a config.json in it", "name the right folder"
            )
        return path / "config.json"
    if path.is_file():
        return path
    if path.suffix == ".json" or path.is_absolute() or spec.name.startswith((".", "~")):
        raise UsageError(f'"{spec.name}" (not found)', "a config.json or its folder", "check the path")
    if "/" in spec.name:
        raise UsageError(
            f'"{spec.name}" (not found)',
            "a model type, a config.json or its folder; names of the Hub are never downloaded",
            "download it yourself and give the folder",
        )
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(
            f'"{path}" ({describe(error)})', "a config.json of transformers", "fix the file"
        ) from error
    if not isinstance(values, dict):
        raise UsageError(f'"{path}" ({type(values).__name__})', "a JSON object", "fix the file")
    if "model_type" not in values and "auto_map" not in values:
        raise UsageError(f'"{path}" (no model_type)', "a config.json of transformers", "add its model_type")
    return values


def _special_float(value: dict[str, Any]) -> Any:
    """Infinity or NaN, which transformers writes as {"__float__": "Infinity"}."""
    tag = value.get("__float__") if len(value) == 1 else None
    return float(tag) if tag in ("Infinity", "-Infinity", "NaN") else value


def _config_class(spec: Spec, path: Path | None, values: dict[str, Any]) -> Any:
    mapping = _config_mapping()
    model_type = str(values.get("model_type", ""))
    if model_type in mapping:
        return mapping[model_type]
    if "auto_map" in values:
        raise UsageError(
            f'"{path}" (model type "{model_type}", code by auto_map)',
            "a model type of transformers itself, because remote code is never run",
            "wrap the model in a factory, file.py:factory",
        )
    raise UsageError(
        f'model type "{model_type}" of "{spec.text}"',
        "a model type of transformers, a config.json or its folder",
        suggest(model_type, mapping.keys(), "see the documentation of transformers for the names"),
    )


def _config_mapping() -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def _with_options(spec: Spec, config_class: Any, values: dict[str, Any]) -> Any:
    """The configuration of `values` and the options; an option that only the text part has is set there."""
    own, text = _known_options(config_class)
    values = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
    for key, value in spec.options.items():
        if key in text and key not in own:
            values["text_config"] = {**values.get("text_config", {}), key: value}
        elif key in own or key in _FOR_ALL or _is_read_in_code(key, config_class):
            values[key] = value
        else:
            raise UsageError(
                f'option "{key}" of "{spec.text}"',
                f"an option of {config_class.__name__}",
                suggest(key, own | text, f"see the documentation of {config_class.__name__}"),
            )
    try:
        return config_class.from_dict(values)
    except Exception as error:  # a configuration's checks may raise anything
        raise UsageError(
            f'"{spec.text}" ({describe(error)})', f"values that {config_class.__name__} takes", "change them"
        ) from error


def _known_options(config_class: Any) -> tuple[set[str], set[str]]:
    """Options of the configuration itself and of its text part."""
    from transformers import PreTrainedConfig

    parts = getattr(config_class, "sub_configs", None) or {}
    text_class = parts.get("text_config")
    text = _attributes(text_class) if hasattr(text_class, "model_type") else set()
    # Inherited options (use_cache …) belong to the whole; options that describe a stack belong to the part.
    own = _attributes(config_class) - (text - _attributes(PreTrainedConfig))
    return own | set(parts), text


def _annotated(base: type) -> Iterable[str]:
    """Names that a class annotates. From Python 3.14 on reading `__annotations__` evaluates them, which fails
    where one names what is imported for type checkers alone.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(base, format=Format.FORWARDREF)
    return getattr(base, "__annotations__", {})


def _attributes(config_class: Any) -> set[str]:
    names = {name for base in config_class.__mro__ for name in _annotated(base)}
    made = None
    with contextlib.suppress(
        Exception
    ):  # a composite may need its parts: then the class's own names are used
        made = config_class()
    if made is not None:
        names |= set(made.to_dict()) | set(vars(made))
    names |= set(getattr(config_class, "attribute_map", {}))
    return {name for name in names if not name.startswith("_") and name not in ("model_type", "auto_map")}


def _is_read_in_code(key: str, config_class: Any) -> bool:
    """True if the type's code reads an option that its configuration does not declare.

    Qwen 2's model reads `config.head_dim`; ModernBERT's configuration turns older names into newer ones.
    """
    own = config_class.__module__
    declared = rf'kwargs(\.\w+\(|\[)\s*"{key}"|"{key}" (not )?in kwargs'
    read = rf'config\.{key}\b|config, "{key}"'
    places = ((own, declared), (own.replace(".configuration_", ".modeling_"), read))
    return any(re.search(pattern, _source(module)) for module, pattern in places)


def _source(module: str) -> str:
    try:
        return inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError):  # no such module, or no source
        return ""


def _text_part(config: Any) -> Any:
    """The language model of a composite configuration, if transformers can build it alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = getattr(config, "text_config", None)
    stands = text is not None and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return text if stands and not getattr(config, "is_encoder_decoder", False) else config


def _ready(config: Any, spec: Spec) -> Any:
    """Set the options that training needs, unless `spec` sets them.

    These are: no key-value cache, a start token for decoders, and `is_decoder` for types that are always
    decoders (BERT generation).
    """
    from transformers.models.auto import modeling_auto as auto

    settings: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
    if getattr(config, "is_encoder_decoder", False):
        if getattr(config, "decoder_start_token_id", None) is None:
            settings["decoder_start_token_id"] = getattr(config, "bos_token_id", None) or 0
    elif getattr(config, "is_decoder", None) is False:
        is_causal = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
        if is_causal and type(config) not in auto.MODEL_FOR_MASKED_LM_MAPPING:
            settings["is_decoder"] = True
    for key, value in settings.items():
        if key not in spec.options:
            setattr(config, key, value)
    return config


def _weights_folder(spec: Spec, path: Path | None) -> Path | None:
    """The folder of `spec` if it holds safetensors; None for random weights."""
    if path is None or not Path(spec.name).expanduser().is_dir():
        return None
    if any(path.parent.glob("*.safetensors")):
        return path.parent
    if any(path.parent.glob("*.bin")):
        raise UsageError(
            f'folder "{path.parent}" (pickled weights)',
            "weights in model.safetensors",
            f"convert them, or give {path} for random weights",
        )
    return None
