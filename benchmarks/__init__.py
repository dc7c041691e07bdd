"""Benchmarks of normscope against its alternatives.

`normscope bench [NAME…]` runs the functions in benches.py. Benchmarks that take longer, or that write a page
of docs/, are scripts: `python -m benchmarks.NAME` in the repository's root. README.md lists all of them.
"""
