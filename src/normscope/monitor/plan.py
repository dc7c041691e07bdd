"""Plan: what a monitor watches in one model, decided at its first forward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from normscope.anatomy import Anatomy, Site, read_anatomy
from normscope.anatomy.taps import Tap
from normscope.errors import describe
from normscope.monitor.groups import Groups, groups_of
from normscope.monitor.taps import Stream, places_of, streams_of
from normscope.subjects import Batch, call_model, untouched


@dataclass(frozen=True)
class Plan:
    """Streams, their taps, and the groups of the parameters.

    Attributes:
        anatomy: the reading of the model; without stacks where it could not be read.
        streams: the tapped streams and branches, in the order of the forward.
        columns: column of each of them. Two have one where they are one tensor, as the last block's exit and
            the stack's output without a final norm.
        places: tap of each column: the streams, the branches, and the tensors that branches are added to.
        beside: of each branch, by its site, the column of the tensor that it is added to.
        groups: the parameters that require a gradient.
        notes: sentences on what is not watched, and why.
    """

    anatomy: Anatomy
    streams: tuple[Stream, ...]
    columns: tuple[int, ...]
    places: dict[int, Tap]
    beside: dict[str, int]
    groups: Groups
    notes: tuple[str, ...]

    def of(self, kind: str) -> list[tuple[Stream, int]]:
        """The tapped tensors of a kind, "stream" or "branch", with their columns."""
        return [
            (each, column)
            for each, column in zip(self.streams, self.columns, strict=True)
            if each.kind == kind
        ]


def plan_of(model: nn.Module, batch: Batch) -> Plan:
    """Read the model on the batch of its first forward; the model is restored."""
    notes = []
    try:
        anatomy = read_anatomy(model, batch)
        notes += [f"not read: {line}" for line in anatomy.unread]
    except Exception as error:  # the model's own forward in eval mode may raise anything
        anatomy = Anatomy(())
        notes.append(f"no stream is watched, because the model could not be read ({describe(error)})")
    streams = list(streams_of(anatomy))
    found = _found(
        model, batch, [*(each.place for each in streams), *filter(None, (s.beside for s in streams))]
    )
    kept = [each for each in streams if each.place in found]
    if len(kept) < len(streams):
        lost = ", ".join(each.site for each in streams if each.place not in found)
        notes.append(
            f"{len(kept)} of {len(streams)} streams are watched; no module receives or returns: {lost}"
        )
    columns: dict[Site, int] = {}
    for each in kept:
        columns.setdefault(each.place, len(columns))
    beside: dict[str, int] = {}
    for each in kept:
        if each.beside is not None and each.beside in found:
            beside[each.site] = columns.setdefault(each.beside, len(columns))
    places = {column: found[site] for site, column in columns.items()}
    of_each = tuple(columns[each.place] for each in kept)
    return Plan(anatomy, tuple(kept), of_each, places, beside, groups_of(model, anatomy), tuple(notes))


def _found(model: nn.Module, batch: Batch, sites: list[Site]) -> dict[Site, Tap]:
    if not sites:
        return {}
    run: Callable[[], Any] = lambda: call_model(model, batch)  # noqa: E731
    with untouched(model):
        return places_of(model, run, sites)
