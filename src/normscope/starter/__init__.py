"""`normscope init`: finds the model in a folder of Python files and writes the factory that `check` takes.

Files are parsed, never imported or run.
"""

from normscope.starter.start import Start, start

__all__ = ["Start", "start"]
