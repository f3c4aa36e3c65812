"""One module per benchmark: what it deploys, how it loads it, and the rows of its result.

Each has `measure(...)`, which returns the rows; the command line (cli/bench.py) checks the options and
prints.
"""
