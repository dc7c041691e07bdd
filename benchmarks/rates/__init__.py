"""Truth grids of two questions about a learning rate: which warm-up makes it train, and how it scales.

`warmup_*` trains wanted learning rates that fail without a warm-up at several warm-ups. `scale_*` trains one
model at several widths and depths. Cases that are held out were fixed before any of their forecasts was made.
"""
