"""RunConfig: all that one run of `normscope train` is made of, flat in a TOML file."""

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normscope.errors import UsageError, suggest
from normscope.subjects import Subject, load
from normscope.train.config import TrialConfig, is_count, is_number
from normscope.train.criterion import CRITERION_STEPS

_PATHS = ("text", "source", "target")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What is trained, on what, and how.

    Attributes:
        model: a MODEL spec; it names scheme and initialisation.
        text: a file or folder of text; None is the Python standard library's source.
        source, target: parallel texts for an encoder–decoder, line by line.
        images: "digits" for a model of images.
        batch_size, seq_len: sequences of a batch, and tokens of a sequence.
        validation: the last share of the data, which is not trained on; 0 keeps none.
        device: "cpu", "cuda", …
        trial: optimiser, rate, schedule, steps, …; its seed is also that of weights and batches.

    Raises:
        UsageError: a value that no run can have.
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
    trial: TrialConfig = field(default_factory=lambda: TrialConfig(steps=CRITERION_STEPS))

    def __post_init__(self) -> None:
        if not (isinstance(self.model, str) and self.model):
            raise UsageError(f"model {self.model!r}", "a MODEL such as nn:decoder,scheme=post", "name one")
        for name in _PATHS:
            value = getattr(self, name)
            if isinstance(value, Path):
                object.__setattr__(self, name, str(value))
        for name in (*_PATHS, "images"):
            self._require(
                name, lambda value: value is None or (isinstance(value, str) and value != ""), "text"
            )
        self._require("device", lambda value: isinstance(value, str) and value != "", "cpu, cuda, cuda:1, …")
        self._require("batch_size", lambda value: is_count(value, least=1), "a whole number from 1")
        self._require("seq_len", lambda value: is_count(value, least=1), "a whole number from 1")
        self._require("validation", lambda value: is_number(value) and 0 <= value < 1, "a share in [0, 1)")

    def _require(self, name: str, is_right: Callable[[Any], bool], expected: str) -> None:
        value = getattr(self, name)
        if not is_right(value):
            raise UsageError(f"{name} = {value!r}", expected, f"change {_dashed(name)}")

    @classmethod
    def from_dict(cls, flat: Mapping[str, Any]) -> "RunConfig":
        """The config of `to_dict`, or of a table with dashes or underscores in its keys.

        Raises:
            UsageError: an unknown key (with the nearest known one), no model, a value that no run can have.
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
        return cls(trial=TrialConfig(**trial), **{k: v for k, v in given.items() if k not in _OF_TRIAL})

    @classmethod
    def read_toml(cls, path: Path) -> "RunConfig":
        """The config in a TOML file, flat.

        Raises:
            UsageError: no such file, no TOML, or not the config of a run.
        """
        return cls.from_dict(read_table(path))

    def to_dict(self) -> dict[str, Any]:
        """Every value by its name, flat, for JSON."""
        own = {name: getattr(self, name) for name in _OF_RUN}
        return own | dataclasses.asdict(self.trial)

    def replace(self, **changes: Any) -> "RunConfig":
        """The same with other values, by their flat names."""
        return self.from_dict(self.to_dict() | changes)

    def to_toml(self) -> str:
        """A TOML file with every value that is set."""
        lines = (
            f"{_dashed(name)} = {_toml(value)}" for name, value in self.to_dict().items() if value is not None
        )
        return "\n".join(lines) + "\n"

    def paths(self) -> dict[str, Path | None]:
        """Text, source and target."""
        values = {name: getattr(self, name) for name in _PATHS}
        return {name: None if value is None else Path(value) for name, value in values.items()}

    def subject(self, device: str | None = None) -> Subject:
        """Model, batches and loss, as `load` makes them; on `device` rather than the config's."""
        paths = self.paths()
        return load(
            self.model,
            seed=self.trial.seed,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            images=self.images,
            validation=self.validation,
            device=device or self.device,
            text=paths["text"],
            source=paths["source"],
            target=paths["target"],
        )


_OF_RUN = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "trial")
_OF_TRIAL = tuple(f.name for f in dataclasses.fields(TrialConfig))
KEYS = (*_OF_RUN, *_OF_TRIAL)
"""Every key of a flat config."""


def read_table(path: Path) -> dict[str, Any]:
    """The flat table of a TOML file, for `RunConfig.from_dict`, which looks at its keys.

    Raises:
        UsageError: no such file, or no TOML.
    """
    do = "give a file of keys such as lr = 1e-3"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f'"{path}" ({error.strerror})', "a TOML file", do) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f'"{path}" ({error})', "a TOML file", do) from error


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _toml(value: str | int | float) -> str:
    """A TOML string or number: as JSON writes it, but that TOML wants DEL escaped too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
