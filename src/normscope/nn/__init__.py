"""Building: norms, schemes, attention, feed-forward, models one reads from top to bottom."""

from normscope.nn.models import Block, Decoder, Encoder, ModelConfig, Output, build
from normscope.nn.placement import SCHEMES, Initialisation, Join, Placement, Scheme, Slot, Where, scheme_named

__all__ = [
    "SCHEMES",
    "Block",
    "Decoder",
    "Encoder",
    "Initialisation",
    "Join",
    "ModelConfig",
    "Output",
    "Placement",
    "Scheme",
    "Slot",
    "Where",
    "build",
    "scheme_named",
]
