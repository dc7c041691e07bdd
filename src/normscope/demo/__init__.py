"""`normscope demo`, which takes about two minutes, and models for trying `normscope check` (`examples`)."""
