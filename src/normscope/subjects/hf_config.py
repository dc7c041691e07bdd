"""`hf:` names → a configuration of transformers, without the network and without remote code."""

import json
from pathlib import Path
from typing import Any

from normscope.errors import UsageError, describe, suggest
from normscope.subjects.spec import Spec


def hf_config(spec: Spec) -> Any:
    """The configuration that `spec` asks for, its text part where it is composite (Gemma 3)."""
    mapping = _config_mapping()
    path = _path_of(spec)
    values = _read_json(path, spec) if path else {}
    model_type = str(values.pop("model_type", "")) if path else spec.name
    if model_type not in mapping:
        raise _unknown_type(spec, model_type, path, values, mapping)
    config_class = mapping[model_type]
    own, for_text = _sort_options(spec, config_class)
    values.update(own)
    if for_text:
        values["text_config"] = {**values.get("text_config", {}), **for_text}
    values.pop("auto_map", None)  # a native type needs no remote code
    config = _make(config_class, values, spec)
    return _text_part(config)


def weights_folder(spec: Spec) -> Path | None:
    """The folder whose safetensors `spec` asks for, or None for random weights."""
    folder = Path(spec.name).expanduser()
    if not folder.is_dir():
        return None
    if any(folder.glob("*.safetensors")):
        return folder
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise UsageError(
            f'folder "{folder}" (pickled weights)',
            "weights in model.safetensors",
            f"convert them, or give {folder / 'config.json'} for random weights",
        )
    return None


def _config_mapping() -> Any:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise UsageError(
            "a model of Hugging Face", "transformers to be installed", "run pip install 'normscope[hf]'"
        ) from error
    return CONFIG_MAPPING


def _path_of(spec: Spec) -> Path | None:
    """The config.json that is meant, or None where the name is a model type."""
    path = Path(spec.name).expanduser()
    if "/" not in spec.name and path.suffix != ".json" and spec.name in _config_mapping():
        return None
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise UsageError(
                f'folder "{path}" (no config.json)', "a config.json in it", "name the right folder"
            )
        return config
    if path.is_file():
        return path
    if path.suffix == ".json" or path.is_absolute() or spec.name.startswith((".", "~")):
        raise UsageError(f'"{spec.name}" (not found)', "a config.json or its folder", "check the path")
    if "/" in spec.name:
        raise UsageError(
            f'"{spec.name}" (not found)',
            "a model type, a config.json or its folder: names of the Hub are never downloaded",
            "download it yourself and give the folder",
        )
    return None


def _read_json(path: Path, spec: Spec) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f'"{path}" ({describe(error)})', "a config.json", "mend the file") from error
    if not isinstance(values, dict):
        raise UsageError(f'"{path}" ({type(values).__name__})', "a JSON object", "mend the file")
    if "model_type" not in values and "auto_map" not in values:
        raise UsageError(
            f'"{path}" of "{spec.text}"', "a model_type in it", "give a config.json of transformers"
        )
    return values


def _unknown_type(
    spec: Spec, model_type: str, path: Path | None, values: dict[str, Any], mapping: Any
) -> UsageError:
    if "auto_map" in values:
        return UsageError(
            f'"{path}" (model type "{model_type}" by auto_map)',
            "a model type that transformers has itself, as remote code is never run",
            "wrap the model in a factory, file.py:factory",
        )
    where = f' in "{path}"' if path else ""
    return UsageError(
        f'model type "{model_type}"{where}',
        "a model type of transformers",
        suggest(model_type, mapping.keys(), "see the transformers documentation for the names"),
    )


def _sort_options(spec: Spec, config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the configuration itself, and those of its text part. UsageError for what neither has."""
    known = _attributes(config_class)
    text_class = getattr(config_class, "sub_configs", {}).get("text_config")
    text_known = (
        _attributes(text_class) if text_class is not None and hasattr(text_class, "model_type") else set()
    )
    own: dict[str, Any] = {}
    for_text: dict[str, Any] = {}
    for key, value in spec.options.items():
        if key in text_known:
            for_text[key] = value
        elif key in known:
            own[key] = value
        else:
            raise UsageError(
                f'option "{key}" of "{spec.text}"',
                f"an option of {config_class.__name__}",
                suggest(key, known | text_known, f"see the documentation of {config_class.__name__}"),
            )
    return own, for_text


def _attributes(config_class: Any) -> set[str]:
    try:
        config = config_class()
    except Exception as error:  # some cannot be made without their parts; their annotations must do
        annotated = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
        if not annotated:
            raise UsageError(
                f"{config_class.__name__} ({describe(error)})",
                "a type that has defaults",
                "give a config.json",
            ) from error
        return annotated
    names = set(config.to_dict()) | set(vars(config)) | set(config.attribute_map)
    return {name for name in names if not name.startswith("_") and name not in ("model_type", "auto_map")}


def _make(config_class: Any, values: dict[str, Any], spec: Spec) -> Any:
    try:
        return config_class.from_dict(values) if values else config_class()
    except Exception as error:
        raise UsageError(
            f'"{spec.text}" ({describe(error)})',
            f"values that {config_class.__name__} takes",
            "change the options",
        ) from error


def _text_part(config: Any) -> Any:
    """The language model of a composite configuration, where it is one that can stand by itself."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.is_encoder_decoder:
        return config
    text = getattr(config, "text_config", None)
    return text if text is not None and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config
