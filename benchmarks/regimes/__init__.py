"""Truth grids of the forecast by regime: what a user trains that is not bytes for 300 steps.

`data` makes batches from files that every machine has, `models` builds the models, `cases` lists the ladders
of every regime, `truth` trains them and keeps the results. A part of each regime is held out: its data, sizes
and seeds were fixed before any of its forecasts was made.
"""
