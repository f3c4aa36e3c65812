"""Faults on real Spark: a supervisor kills, stops and starves an application, and a verdict covers every row.

supervisor.py, plan.py, targets.py, processes.py, full_disk.py   the faults, and the processes they hit
application.py, application_handle.py, protocol.py               the application, inside and outside
workload.py, recording.py, verdict.py                            its rows, their record, the verdict
outages.py, steady_traffic.py, standalone_cluster.py             single outages on any cluster

Installed with `pip install 'tiercel[lab]'`. Called by `tiercel chaos` and by tests; the product never imports
it.
"""
