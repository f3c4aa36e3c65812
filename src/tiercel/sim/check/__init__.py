"""Judgement of a simulated run: the recorded facts, the sequential reference, one checker per promise.

The deployment feeds the recorder during the run; explore/run.py asks the checkers at its end.
"""
