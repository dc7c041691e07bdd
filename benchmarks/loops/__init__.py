"""Eight training scripts for `normscope check --forecast -- python ...`, unlike in model, data and loop.

The scripts were fixed after every rule of the forecast was, and before any forecast of them was made. Each
stands alone, as a user's does, and takes 300 steps at a constant learning rate. `scripts` lists and runs
them, `truth` trains them at nine learning rates and three seeds, `forecasts` forecasts them by the command
line, and `scores` compares both.
"""
