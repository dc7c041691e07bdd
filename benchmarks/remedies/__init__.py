"""Remedies of failing runs against truth: which rescue a run in 300 steps, and which rank first."""
