"""Reading: the residual stream of any Transformer, from its dataflow."""

from normscope.anatomy.types import (
    Anatomy,
    AttentionSites,
    Block,
    Branch,
    Norm,
    Projection,
    Scale,
    Site,
    Stack,
)

__all__ = ["Anatomy", "AttentionSites", "Block", "Branch", "Norm", "Projection", "Scale", "Site", "Stack"]
