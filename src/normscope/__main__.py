"""`python -m normscope`: the command line."""

from normscope.cli import main

main()
