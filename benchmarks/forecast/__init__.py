"""The forecast on its held-out grid: models, learning rates, kept outcomes, and the bench of its accuracy."""
