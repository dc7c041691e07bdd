"""Read the residual stream of any Transformer from its dataflow."""

from normscope.anatomy.capture import capture
from normscope.anatomy.expecting import PLACEMENTS, departures
from normscope.anatomy.measuring import measuring
from normscope.anatomy.names import named_modules, named_parameters
from normscope.anatomy.reading import read_anatomy, require_residual_stream
from normscope.anatomy.replacing import replace
from normscope.anatomy.types import (
    Anatomy,
    AttentionSites,
    Block,
    Branch,
    Fused,
    LongSkip,
    Norm,
    Projection,
    Scale,
    Site,
    Stack,
)

__all__ = [
    "PLACEMENTS",
    "Anatomy",
    "AttentionSites",
    "Block",
    "Branch",
    "Fused",
    "LongSkip",
    "Norm",
    "Projection",
    "Scale",
    "Site",
    "Stack",
    "capture",
    "departures",
    "measuring",
    "named_modules",
    "named_parameters",
    "read_anatomy",
    "replace",
    "require_residual_stream",
]
