"""Timing ourselves against what a user would pick instead; and the demo."""

from normscope.bench.registry import BENCHES, bench

__all__ = ["BENCHES", "bench"]
