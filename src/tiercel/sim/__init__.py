"""The deterministic simulator: the second driver of the core, with virtual time, network, disks and faults.

One seed decides everything in a run, so a failing seed fails again.

engine/    virtual time, connections, disks, and the process that hosts a machine
scenario/  what one run tries: sites, operators, traffic, moves, faults; and the deployment that runs it
check/     what happened in a run, the sequential reference, and one checker per promise
explore/   one run, many runs, crash points, mutants, shrinking of what failed
workload.py  small operators whose results depend on the order of rows

Called by tiercel.cli and by tests. Imports the core, never tiercel.runtime or tiercel.spark.
"""
