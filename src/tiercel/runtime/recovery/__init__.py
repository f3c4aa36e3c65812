"""Recovery: opening the storage of a process from the newest of its copies.

`recover` holds the decision table. `replica_fetch` and `takeover` read copies of replicas and of dead
instances, `read_only` opens storage beside its writers. Called by spark/cluster when a process starts, and by
`admin`.
"""
