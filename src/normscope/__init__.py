"""normscope: will this deep Transformer train? Where the norms sit, what that does, and why."""

__version__ = "0.1.0"
