"""Grid: the cells of a map, and the grammar that names them on the command line."""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from normscope.errors import UsageError
from normscope.maps.cell import Cell
from normscope.nn import MODELS
from normscope.nn.models import config_of
from normscope.subjects.spec import Spec, parse
from normscope.train import RunConfig

T = TypeVar("T")
MOST_CELLS = 100_000
_LARGEST = 2**63 - 1  # SQLite's largest integer
_PLAIN = re.compile(r"[A-Za-z_][\w.+-]*")
AXES = ("scheme", "depth", "init")
"""Options of an nn: model that a grid may vary; the others are the same in all its cells."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination of the given values, each value once, in the given order.

    Attributes:
        base: settings that all cells share, except for the axes.
        schemes, depths, inits: options of an nn: model; empty keeps the base's own.
        lrs, warmups, seeds: settings of the trial.

    Raises:
        UsageError: there are no cells or too many, or a model cannot be built.
    """

    base: RunConfig
    lrs: Sequence[float]
    schemes: Sequence[str] = ()
    depths: Sequence[int] = ()
    inits: Sequence[str] = ()
    warmups: Sequence[int] = (0,)
    seeds: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        spec = parse(self.base.model)
        for name in ("schemes", "depths", "inits"):
            if getattr(self, name) and not _is_ours(spec):
                raise UsageError(
                    f"--{name} with --model {self.base.model}",
                    "an nn: model (nn:decoder, …), whose scheme, depth and initialisation can be chosen",
                    f"leave --{name} out; --lrs, --warmups and --seeds work with every model",
                )
        for name in ("lrs", "warmups", "seeds"):
            if not getattr(self, name):
                raise UsageError(f"a map without {name}", "at least one value", f"give --{name}")
        number = len(self.models) * math.prod(map(len, (self.lrs, self.warmups, self.seeds)))
        if number > MOST_CELLS:
            raise UsageError(f"{number} cells", f"at most {MOST_CELLS}", "give fewer values")
        for model in self.models:
            parameters_of(model)  # raises UsageError if it cannot be built; creates no weights

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells, grouped by shape."""
        values = itertools.product(self.models, _once(self.warmups), _once(self.lrs), _once(self.seeds))
        names = ("model", "warmup", "lr", "seed")
        return tuple(Cell(self.base.replace(**dict(zip(names, each, strict=True)))) for each in values)

    @property
    def models(self) -> tuple[str, ...]:
        """The MODEL of each combination of scheme, initialisation and depth, in canonical spelling."""
        spec = parse(self.base.model)
        if not _is_ours(spec):
            return (self.base.model,)
        axes: list[list[tuple[str, Any]]] = [
            [(name, value) for value in values] or [(name, spec.options.get(name))]
            for name, values in (("scheme", self.schemes), ("init", self.inits), ("depth", self.depths))
        ]
        options = [spec.options | dict(choice) for choice in itertools.product(*axes)]
        return tuple(dict.fromkeys(spell(spec.name, chosen) for chosen in options))


def _is_ours(spec: Spec) -> bool:
    return spec.kind == "nn" and spec.name in MODELS


def with_options(model: str, **options: Any) -> str:
    """`model` with these options of an nn: model; options that are None are not changed.

    Raises:
        UsageError: it is not an nn: model.
    """
    given = {name: value for name, value in options.items() if value is not None}
    spec = parse(model)
    if given and not _is_ours(spec):
        raise UsageError(
            f"--{next(iter(given))} with --model {model}", "an nn: model (nn:decoder, …)", "leave it out"
        )
    return spell(spec.name, spec.options | given) if given else model


@functools.cache
def parameters_of(model: str) -> int:
    """Number of parameters of an nn: model, without creating them; 0 for other models, which would be built.

    Raises:
        UsageError: the model cannot be built.
    """
    spec = parse(model)
    if not _is_ours(spec):
        return 0
    with torch.device("meta"):
        return sum(p.numel() for p in MODELS[spec.name](config_of(spec.name, **spec.options)).parameters())


def spell(name: str, options: dict[str, Any]) -> str:
    """The MODEL `nn:NAME,key=value…`, with options sorted by name, without those that are None."""
    words = [
        f"{key}={value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value)}"
        for key, value in sorted(options.items(), key=lambda item: (item[0] not in AXES, item[0]))
        if value is not None
    ]
    return ",".join([f"nn:{name}", *words])


def rates(text: str, option: str = "--lrs", most: int = MOST_CELLS) -> list[float]:
    """Learning rates from `1e-4,3e-4`, or from `1e-4:3e-2:8`: eight from 1e-4 to 3e-2 on a log scale.

    Rates of a range are rounded to three digits, so that ranges that share a rate share its cells.

    Args:
        most: largest number of rates of a range.

    Raises:
        UsageError: the text has another form, or a rate is not positive.
    """
    found: list[float] = []
    for part in words(option, text):
        first, *rest = part.split(":")
        if not rest:
            found.append(_positive(option, first, text))
            continue
        if len(rest) != 2:
            raise UsageError(f'{option} "{text}"', "a range FIRST:LAST:COUNT", "write 1e-4:3e-2:8")
        low, high = (_positive(option, word, text) for word in (first, rest[0]))
        count = _count(option, rest[1], text, 2, most)
        found += [float(f"{low * (high / low) ** (i / (count - 1)):.3g}") for i in range(count)]
    return found


def counts(option: str, text: str, least: int = 0) -> list[int]:
    """Whole numbers from a text with commas.

    Raises:
        UsageError: a part is not a whole number, or is below `least`.
    """
    return [_count(option, part, text, least) for part in words(option, text)]


def seeds(text: str) -> list[int]:
    """Seeds from a text: `3` gives 0, 1 and 2; `0,7` gives 0 and 7."""
    found = counts("--seeds", text)
    if "," in text:
        return found
    if not 1 <= found[0] <= MOST_CELLS:
        expected = f"the number of seeds, up to {MOST_CELLS}, or seeds with commas"
        raise UsageError(f'--seeds "{text}"', expected, f"give 1 or more, or write {found[0]},")
    return list(range(found[0]))


def words(option: str, text: str) -> list[str]:
    """Words from a text with commas; UsageError if there are none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f'{option} "{text}"', "values with commas", "give at least one, or leave it out")
    return parts


def _positive(option: str, word: str, text: str) -> float:
    rate = _number(float, word)
    if rate is None or not 0 < rate < float("inf"):
        raise UsageError(f'learning rate "{word}" of {option} "{text}"', "a positive number", "try 3e-4")
    return rate


def _count(option: str, word: str, text: str, least: int, most: int = _LARGEST) -> int:
    count = _number(int, word)
    if count is None or not least <= count <= most:
        expected = f"a whole number from {least}" + (f" to {most}" if most < _LARGEST else "")
        raise UsageError(f'"{word}" of {option} "{text}"', expected, "change it")
    return count


def _number(kind: Callable[[str], T], word: str) -> T | None:
    try:
        return kind(word)
    except ValueError:
        return None


def _once(values: Sequence[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
