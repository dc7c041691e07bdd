"""Counterpart of a model: the same config and weights with the norms of the other placement, pre or post.

It is built for the models of `normscope.nn`. Of any other model, the gain of each norm in dB (see `ratios`)
is what can be measured: it compares a stored stream before and after its norm, in the placement as it is.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import cast

from normscope.anatomy import read_anatomy
from normscope.nn.drawn import is_trained
from normscope.nn.models import Model, bare
from normscope.nn.swap import SwapWarning, swap
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.quantisation.look import Look
from normscope.probes.quantisation.places import PARTS
from normscope.probes.quantisation.ratios import sqnr_rows
from normscope.probes.quantisation.rounding import Rounding
from normscope.probes.quantisation.together import together_rows
from normscope.subjects import Subject

OTHER = {"pre": "post", "post": "pre"}
PREFIX = "counterpart-"
NONE = "only an nn: model with scheme pre or post has a counterpart; norm-…-gain is measured at every norm"


def counterpart(subject: Subject) -> tuple[Subject, str] | None:
    """The subject with its norms moved, and how it was made; None where it has no counterpart."""
    model = bare(cast(Model, subject.model))
    if not isinstance(model, Model) or model.config.scheme not in OTHER:
        return None
    scheme = OTHER[model.config.scheme]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwapWarning)  # what it warns of is what is measured
        other = swap(model, scheme)
    how = f"{EXACT}; the same model with scheme {scheme}, same config and weights"
    how += f", which were trained as {model.config.scheme}" if is_trained(model) else ""
    return dataclasses.replace(subject, model=other), how


def counterpart_rows(subject: Subject, roundings: Sequence[Rounding]) -> Iterator[Measurement]:
    """SQNR of the counterpart's stream, and the harm of rounding each of its parts."""
    made = counterpart(subject)
    if made is None:
        for rounding in roundings:
            for part in PARTS:
                yield not_measured(f"quantisation/{PREFIX}{part}-{rounding.name}-together", "", NONE)
        return
    other, how = made
    look = Look.at(other, read_anatomy(other))
    for rounding in roundings:
        rows = sqnr_rows(look, rounding, ("stream",), PREFIX)
        yield from (dataclasses.replace(row, how=how) if row.measured else row for row in rows)
        yield from together_rows(look, rounding, PREFIX, how)
