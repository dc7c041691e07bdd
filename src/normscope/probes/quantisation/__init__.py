"""Effect of rounding to int8, int4 or fp8 on the model, place by place. Opt-in; nothing is trained.

A place is the weights of a branch's matmuls, the stream at a block's entry or exit, the output of a norm, or
the term that a branch adds (the parts "weights", "stream", "norm", "branch"). At each place, with x its
tensor, Q(x) the rounded one, y the model's output and y' the output with this place alone rounded:

    quantisation/<part>-<format>-<granularity>-sqnr   10 log10(Σx² / Σ(Q(x) − x)²), dB
    …-estimate     first-order estimate of ‖y' − y‖/‖y‖, see `estimate`
    …-harm         the same, measured with one forward
    …-loss-change  change of the loss in that forward
    …-rank         1 for the most harmful place of all parts

and over the whole model:

    quantisation/<part>-<format>-<granularity>-together  ‖y' − y‖/‖y‖ with all places of a part rounded
    quantisation/norm-<format>-<granularity>-gain        SQNR of a norm's output minus that of its input, dB
    quantisation/stream-outlier-channels, -ratio, norm-outlier-…, llm-int8-channels   see `outliers`
    quantisation/counterpart-…                           with the norms moved, see `counterpart`

On the fixed batch, in eval mode. Rounding is torchao's, see `rounding`.
"""

from collections.abc import Iterable, Iterator, Sequence

from normscope.anatomy import Anatomy
from normscope.option_values import FORMATS, parse_formats
from normscope.probes.measurement import Measurement
from normscope.probes.quantisation.alone import alone_rows, find_estimates
from normscope.probes.quantisation.counterpart import counterpart_rows
from normscope.probes.quantisation.formats import GRANULARITIES
from normscope.probes.quantisation.look import Look
from normscope.probes.quantisation.outliers import outlier_rows
from normscope.probes.quantisation.places import PARTS
from normscope.probes.quantisation.ranking import MEASURED
from normscope.probes.quantisation.ratios import gain_rows, sqnr_rows
from normscope.probes.quantisation.rounding import Rounding, primitives, rounded
from normscope.probes.quantisation.together import together_rows
from normscope.subjects import Subject

__all__ = [
    "FORMATS",
    "GRANULARITIES",
    "MEASURED",
    "PARTS",
    "Rounding",
    "formats_to_round",
    "measure_quantisation",
    "parse_formats",
    "rounded",
]


def formats_to_round(given: str | Iterable[str]) -> tuple[str, ...]:
    """The formats that the user named; torchao is imported only if there are any.

    Raises:
        UsageError: a name is unknown, or torchao is not installed or cannot be used.
    """
    formats = parse_formats(given)
    if formats:
        primitives()
    return formats


def measure_quantisation(
    subject: Subject, anatomy: Anatomy, formats: Sequence[str] = FORMATS, *, every: bool = False
) -> Iterator[Measurement]:
    """Rounding errors, the harm of each, their ranking, outlier channels and the counterpart's figures.

    Args:
        subject: the model and its batch.
        anatomy: its reading.
        formats: some of `FORMATS`.
        every: measure the harm at every place, not only at the first few of each ranking.

    Raises:
        UsageError: torchao is not installed or cannot be used.
    """
    primitives()
    roundings = [Rounding(format, granularity) for format in formats for granularity in GRANULARITIES]
    look = Look.at(subject, anatomy)
    for rounding in roundings:
        yield from sqnr_rows(look, rounding, PARTS)
        yield from gain_rows(look, rounding)
    yield from outlier_rows(look)
    found = find_estimates(look, roundings)
    for rounding in roundings:
        yield from alone_rows(look, rounding, found, None if every else MEASURED)
        yield from together_rows(look, rounding)
    yield from counterpart_rows(subject, roundings)
