"""The models by name, and `build`, which makes one."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

from normscope.errors import UsageError, suggest
from normscope.nn.config import ModelConfig
from normscope.nn.encoder_decoder import EncoderDecoder
from normscope.nn.head import set_output_bias
from normscope.nn.language_model import Decoder, Encoder
from normscope.nn.vision import Vision

Model = Decoder | Encoder | EncoderDecoder | Vision

MODELS: Mapping[str, type[Model]] = MappingProxyType(
    {"decoder": Decoder, "encoder": Encoder, "encoder-decoder": EncoderDecoder, "vision": Vision}
)
"""Models that `nn:NAME` can build."""

_OF_IMAGES = ("image", "patch", "channels", "classes")
_OF_TEXT = ("vocab", "context", "tie")


def build(name: str, *, counts: Tensor | Sequence[float] | None = None, **options: object) -> Model:
    """Build the model `name` of `MODELS` with options of `ModelConfig`.

    Args:
        counts: (V,), number of occurrences of each id in a text, for `output_bias="unigram"`.

    Raises:
        UsageError: the name, an option or a value is invalid, or only one of counts and
            `output_bias="unigram"` is given.
    """
    config = config_of(name, **options)
    if (config.output_bias == "unigram") != (counts is not None):
        raise UsageError(
            'output_bias="unigram" without counts' if counts is None else "counts",
            'both counts and output_bias="unigram", or neither',
            "give build(…, counts=…) the counts of each id" if counts is None else "set output_bias",
        )
    model = MODELS[name](config)
    if counts is not None:
        set_output_bias(model, counts)
    return model


def config_of(name: str, **options: object) -> ModelConfig:
    """The config of `build(name, **options)`, checked."""
    if name not in MODELS:
        raise UsageError(
            f'model "nn:{name}"', f"one of {', '.join(MODELS)}", suggest(name, MODELS, "choose one of these")
        )
    known = options_of(name)
    for key in options:
        if key not in known:
            raise UsageError(
                f'option "{key}" of nn:{name}',
                f"one of {', '.join(known)}",
                suggest(key, known, "choose one of these"),
            )
    return ModelConfig(**options)  # type: ignore[arg-type]  # __post_init__ checks


def options_of(name: str) -> list[str]:
    """The fields of `ModelConfig` that the model `name` uses."""
    foreign = {*(_OF_TEXT if name == "vision" else _OF_IMAGES)}
    if name != "encoder-decoder":
        foreign.add("encoder_depth")
    return [field.name for field in dataclasses.fields(ModelConfig) if field.name not in foreign]


def name_of(model: nn.Module) -> str:
    """The name of a model's class in `MODELS`; UsageError for any other."""
    name = next((name for name, kind in MODELS.items() if type(model) is kind), None)
    if name is None:
        known = ", ".join(kind.__name__ for kind in MODELS.values())
        raise UsageError(
            f"a model of class {type(model).__name__}", f"one of {known}", "give a model of normscope.nn"
        )
    return name


def bare(model: Model) -> Model:
    """The model inside the wrapper of `torch.compile`."""
    return getattr(model, "_orig_mod", model)
