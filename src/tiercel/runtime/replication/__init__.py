"""Replication: a process sends its commits to a replica, which holds a copy in memory.

`primary` is the side of the process, `replica` the machine of the replica. Called by `process`, `recovery`
and spark/cluster.
"""
