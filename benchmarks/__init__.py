"""Measure normscope against what a user would pick instead.

`normscope bench [NAME…]` runs the functions in benches.py. What takes longer, or writes a page of docs/, is a
script: `python -m benchmarks.NAME` in the repository's root.
"""
