"""Failures after step 300: whether what is seen until step 36, 100, 300, 600 or 1000 announces them.

`ladders` is the grid, fixed before any of its runs was trained; `failures` says what a late failure is;
`watched` trains a ladder as a stack and `observed` measures its runs on the way; `scores` compares what was
measured with what happened.

    python -m benchmarks.later train FILE [WORD]     # trains the ladders whose names hold WORD
    python -m benchmarks.later score FILE            # prints the tables of docs/later-failures.md
    python -m benchmarks.later monitor FILE OUTPUT   # alarms of the monitor on the held-out runs of FILE

`runs.jsonl` beside this file was trained by the first command on 2026-11-28, on a shared 2-core x86 VM (AMD
EPYC), one thread, torch 2.13 CPU: 72 runs of 2000 steps, 2.7 to 4.8 s of processor time each. `alarms.jsonl`
was made by the third, on the same day and machine.
"""
