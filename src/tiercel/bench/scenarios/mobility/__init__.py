"""Benchmarks of sources that travel: cars that drive from edge to edge, and keys that follow them.

`cars.py` is the load, `drive.py` runs it beside modes, `figures.py` judges and draws, `growth.py` varies one
thing at a time. Only cli/bench.py calls this package.
"""
