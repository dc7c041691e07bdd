"""Failures after step 300: whether what is seen until step 36, 100, 300, 600 or 1000 announces them.

`ladders` is the grid, fixed before any of its runs was trained; `failures` says what a late failure is;
`watched` trains a ladder as a stack and `observed` measures its runs on the way; `scores` compares what was
measured with what happened.

    python -m benchmarks.later train FILE [WORD]   # trains the ladders whose name has WORD; can be continued
    python -m benchmarks.later score FILE          # prints the tables of docs/forecast.md

`runs.jsonl` beside this file has the runs as they were trained.
"""
