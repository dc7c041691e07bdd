"""The model types of transformers, small and with random weights: which are built, read, and healthy."""
