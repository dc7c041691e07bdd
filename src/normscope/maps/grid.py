"""Grid: the cells of a map."""

import functools
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from normscope.errors import UsageError
from normscope.maps.cell import Cell
from normscope.nn import MODELS
from normscope.nn.models import config_of
from normscope.option_values import MOST_CELLS
from normscope.subjects.spec import Spec, parse
from normscope.train import RunConfig

T = TypeVar("T")
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


def _once(values: Sequence[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
