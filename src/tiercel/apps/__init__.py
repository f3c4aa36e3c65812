"""Applications of published papers, each with a generator, a graph of operators and an oracle.

An application is an `App` (app.py). `catalogue.py` lists all of them, `run.py` runs one on an embedded
session: events at a rate, a move, a scale-out and a kill inside the run, and every output row compared with
the oracle's.
Applications use the public API of Tiercel only. `tiercel app` and `tiercel bench app` call this package.
"""
