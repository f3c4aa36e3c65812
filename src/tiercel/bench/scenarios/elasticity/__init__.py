"""Benchmarks of policies: an operator whose load changes, scaled by nobody or by a policy.

`ramp` is `tiercel bench elastic`. It drives a deployment through the public API and the load process, as the
other benchmarks do; only the command line calls it.
"""
