"""Truth grids of two questions about a learning rate: which warm-up makes it train, and how it scales.

`warmup_*` trains wanted learning rates that fail without a warm-up at several warm-ups. `scale_*` trains one
model at several widths. Cases that are held out were fixed before any of their forecasts was made.

`warmup_truth.jsonl` has one replica of four cases so far. `warmup_forecasts.jsonl` was made by an earlier
rule, whose answer reads "72 steps" in place of "72 steps or more".
"""
