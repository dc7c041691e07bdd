"""RunConfig: the settings of a run of `normscope train`, as a flat TOML file."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normscope.checks import count, text
from normscope.errors import UsageError, suggest
from normscope.subjects import Subject, load
from normscope.subjects.text import SHARE
from normscope.train.criterion import CRITERION_STEPS
from normscope.train.recipe import Every, Recipe

_PATHS = ("text", "source", "target")
_SIZE = count(1, "a whole number from 1", "change it")
_NAME = text("text", "leave it out, or name one", optional=True)
_RULES = {
    "model": text("a MODEL such as nn:decoder,scheme=post", "name one"),
    **dict.fromkeys((*_PATHS, "images"), _NAME),
    "device": text("cpu, cuda, cuda:1, …", "leave it out for cpu"),
    "batch_size": _SIZE,
    "seq_len": _SIZE,
    "validation": SHARE,
    "validate_every": count(1, "a number of steps from 1", "leave it out for a tenth", optional=True),
}
_LATER = ("validate_every", "checkpoint_every", "beta1", "beta2", "lr_end", "decay_steps")
"""Keys that older stores of maps lack; at their defaults they are not part of a run's identity."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a training run: the model, the data and the training.

    Attributes:
        model: a MODEL spec; it names scheme and initialisation.
        text: a file or folder of text; None is the Python standard library's source.
        source, target: parallel texts for an encoder–decoder, line by line.
        images: "digits" for a model of images.
        batch_size, seq_len: sequences per batch, and tokens per sequence.
        validation: fraction of the data, at its end, that is held out for validation; 0 holds out none.
        device: "cpu", "cuda", …
        validate_every: steps between two validation losses; None is a tenth of the run.
        checkpoint_every: steps ("100") or seconds ("60s") between two checkpoints, see `Every`.
        trial: optimiser, learning rate, schedule, steps, …; its seed is also that of weights and batches.

    Raises:
        UsageError: a value is invalid.
    """

    model: str
    text: str | None = None
    source: str | None = None
    target: str | None = None
    images: str | None = None
    batch_size: int = 4
    seq_len: int = 64
    validation: float = 0.1
    device: str = "cpu"
    validate_every: int | None = None
    checkpoint_every: str = "60s"
    trial: Recipe = field(default_factory=lambda: Recipe(steps=CRITERION_STEPS))

    def __post_init__(self) -> None:
        for name in _PATHS:
            value = getattr(self, name)
            if isinstance(value, Path):
                object.__setattr__(self, name, str(value))
        for name, rule in _RULES.items():
            rule.require(f"{_dashed(name)} =", getattr(self, name))
        object.__setattr__(self, "checkpoint_every", str(self.checkpoint_every))  # 100 in a TOML file
        Every.parse(self.checkpoint_every)

    @classmethod
    def from_dict(cls, flat: Mapping[str, Any]) -> "RunConfig":
        """The config of `to_dict`, or of a table with dashes or underscores in its keys.

        Raises:
            UsageError: a key is unknown (the error names the nearest known one), the model is missing, or a
                value is invalid.
        """
        given: dict[str, Any] = {}
        for key, value in flat.items():
            name = key.replace("-", "_")
            if name not in KEYS:
                known = [_dashed(k) for k in KEYS]
                raise UsageError(
                    f'key "{key}"', "one of " + ", ".join(known), suggest(key, known, "remove it")
                )
            if name in given:
                raise UsageError(f'key "{key}" twice', "each key once", "keep one of them")
            given[name] = value
        if "model" not in given:
            raise UsageError("a run without a model", "a MODEL such as nn:decoder,scheme=post", "name one")
        trial = {"steps": CRITERION_STEPS} | {k: v for k, v in given.items() if k in _OF_TRIAL}
        return cls(trial=Recipe(**trial), **{k: v for k, v in given.items() if k not in _OF_TRIAL})

    def to_dict(self) -> dict[str, Any]:
        """Every value by its name, flat, for JSON."""
        return {name: getattr(self, name) for name in _OF_RUN} | {
            name: getattr(self.trial, name) for name in _OF_TRIAL
        }

    def identity(self) -> dict[str, Any]:
        """`to_dict` without newer keys that are at their defaults."""
        return {k: v for k, v in self.to_dict().items() if k not in _LATER or v != _DEFAULTS[k]}

    def replace(self, **changes: Any) -> "RunConfig":
        """A copy with other values, by their flat names."""
        return self.from_dict(self.to_dict() | changes)

    def to_toml(self) -> str:
        """A TOML file with every value that is set."""
        given = {_dashed(name): value for name, value in self.to_dict().items() if value is not None}
        lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in given.items())
        return "".join(lines).replace("\x7f", "\\u007f")  # TOML also needs DEL escaped, which JSON does not

    def paths(self) -> dict[str, Path | None]:
        """Paths of text, source and target."""
        values = {name: getattr(self, name) for name in _PATHS}
        return {name: None if value is None else Path(value) for name, value in values.items()}

    def subject(self, device: str | None = None, tokens: Path | None = None) -> Subject:
        """Load model, batches and loss; `device` overrides the config's.

        Args:
            tokens: folder for the tokens of the whole text, see `load`.
        """
        own = ("batch_size", "seq_len", "images", "validation")
        given: dict[str, Any] = {**self.paths(), **{name: getattr(self, name) for name in own}}
        return load(self.model, **given, seed=self.trial.seed, device=device or self.device, tokens=tokens)


_OF_RUN = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "trial")
_OF_TRIAL = tuple(f.name for f in dataclasses.fields(Recipe) if f.name != "run_steps")
_DEFAULTS = {f.name: f.default for cls in (RunConfig, Recipe) for f in dataclasses.fields(cls)}
KEYS = (*_OF_RUN, *_OF_TRIAL)
"""All keys of a flat config."""


def read_table(path: Path) -> dict[str, Any]:
    """Read the flat table of a TOML file, for `RunConfig.from_dict`, which checks the keys.

    Raises:
        UsageError: the file does not exist or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        do = "give a file of keys such as lr = 1e-3"
        raise UsageError(f'"{path}" ({why})', "a TOML file", do) from error


def _dashed(name: str) -> str:
    return name.replace("_", "-")
