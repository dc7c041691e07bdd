"""The effect in two minutes (`normscope demo`), and models to try `normscope check` on (`examples`)."""
