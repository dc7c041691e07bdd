"""The command line: one file a command, no logic."""

from normscope.cli.main import app, main

__all__ = ["app", "main"]
