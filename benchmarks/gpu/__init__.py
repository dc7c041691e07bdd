"""Measurements on a GPU, run by hand: no test and no `normscope bench` makes them. docs/ has the results."""
