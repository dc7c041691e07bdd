"""All handwritten cases: each module adds its rows to one table when it is imported."""

from importlib import import_module

from handwritten_base import CASES

for _part in ("placements", "joins", "norms", "branches", "runs", "structures", "catalogue"):
    import_module(f"handwritten_{_part}")

__all__ = ["CASES"]
