"""Benchmarks of a deployment on this machine, next to Spark's own transformWithState and to simple floors.

scenarios/   one module per command of `tiercel bench`
baselines/   what the figures are compared with: an echo, Spark, the operator's own code, the machine's noise
loadgen/     the load and the checking subscriber, in processes of their own
deployments.py, operators.py   what is measured
metrics.py, report.py          definitions of the figures; tables and JSON

Installed with `pip install 'tiercel[lab]'`. Called by tiercel.cli; the product never imports it.
"""
