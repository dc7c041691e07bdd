"""Names that a module of claims is written with, so that one line imports them."""

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure, effect
from normscope.claims.plots import Line, Plot, lines_along, lines_at, lines_by, lines_of
from normscope.claims.setup import Setup, flat, mapped

__all__ = [
    "Case",
    "Evidence",
    "Figure",
    "Kind",
    "Line",
    "Plot",
    "Sentence",
    "Setup",
    "claim",
    "effect",
    "flat",
    "lines_along",
    "lines_at",
    "lines_by",
    "lines_of",
    "mapped",
]
