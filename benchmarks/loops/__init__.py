"""Eight training scripts for `normscope check --forecast -- python ...`, unlike in model, data and loop.

The scripts and their truth were fixed before any forecast of them was scored, see docs/forecast-evidence.md.
Each stands alone, as a user's does, and takes 300 steps at a constant learning rate. `scripts` lists and runs
them, `truth` trains them at nine learning rates and three seeds, `forecasts` forecasts them by the command
line, and `scores` compares both. `truth.jsonl` and `forecasts.jsonl` hold the results.

One script was changed after runs of the truth: at 32 tokens, `bytes_post` trained at none of the learning
rates with seed 0, so that it has the 40 tokens again with which it was written. Its runs at 32 were dropped.
"""
