"""Compare two models: structure, start, recipe, function and verdict."""
