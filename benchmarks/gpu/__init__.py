"""Measurements on a GPU, which no test and no `normscope bench` makes: run by hand, the results are in docs/."""
