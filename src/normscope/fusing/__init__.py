"""Residual adds and the norms behind them in one operation, in a model that exists already."""

from normscope.fusing.model import Fused, fuse
from normscope.fusing.pairs import Pair

__all__ = ["Fused", "Pair", "fuse"]
