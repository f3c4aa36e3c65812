"""The load of a benchmark: a machine that produces and checks, and the child processes that run it.

The load runs outside of the driver's process, so that measuring does not disturb what is measured.
Called by bench/scenarios; child.py also by chaos.
"""
