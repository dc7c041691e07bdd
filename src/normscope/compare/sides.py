"""Sides of a comparison from what the user gives: texts, modules, runs and reports."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from normscope.compare.side import LiveSide, SavedSide, Settings, Side
from normscope.errors import UsageError
from normscope.recording.intake import as_run
from normscope.report import Report
from normscope.subjects import Run, Subject, load_to_read, make_subject
from normscope.subjects.rng import seeded

Given = str | nn.Module | Subject | Run | Report | Callable[[], nn.Module] | Any
"""One side, as it is given: see `normscope.diff`."""


@contextmanager
def opened(a: Given, b: Given, settings: Settings, batch: Any = None) -> Iterator[tuple[Side, Side]]:
    """The two sides; their processes and temporary files end with the context.

    Raises:
        UsageError: one of them cannot be used.
    """
    with ExitStack() as held:
        sides = []
        for given in (a, b):
            side = side_of(given, settings, batch)
            held.callback(side.close)
            sides.append(side)
        yield sides[0], sides[1]


def side_of(given: Given, settings: Settings, batch: Any = None) -> Side:
    """The side that `given` names."""
    if isinstance(given, str):
        return _of_text(given, settings)
    return _of_object(as_run(given), settings, batch)


def _of_text(spec: str, settings: Settings) -> Side:
    def build(seed: int) -> nn.Module:
        return load_to_read(spec, **settings.loading() | {"seed": seed, "batch_size": 1}).model

    return LiveSide(load_to_read(spec, **settings.loading()), settings, build)


def _of_object(given: Any, settings: Settings, batch: Any) -> Side:
    if isinstance(given, Report):
        return SavedSide(given.model, given.to_dict())
    if isinstance(given, Subject):
        return LiveSide(given, settings)
    if isinstance(given, nn.Module | Run):
        return LiveSide(_made(given, settings, batch), settings)
    if not callable(given):
        raise UsageError(
            f"a {type(given).__name__} to compare",
            "a MODEL, a module, a function that builds one, a Subject, a Run or a Report",
            "pass one of these",
        )

    def build(seed: int) -> nn.Module:
        with seeded(seed):
            made = given()
        if not isinstance(made, nn.Module):
            expected = "a function that returns a module"
            raise UsageError(f"a function that returned a {type(made).__name__}", expected, "change it")
        return made

    return LiveSide(_made(build(settings.seed), settings, batch), settings, build)


def _made(given: nn.Module | Run, settings: Settings, batch: Any) -> Subject:
    """The subject of a module or a Run that is built already."""
    return make_subject(
        given,
        batch,
        seed=settings.seed,
        batch_size=settings.batch_size,
        seq_len=settings.seq_len,
        text=settings.text,
    )
