"""The store of one process in RocksDB, and reading it beside its writer.

It does not know about backups and replicas: `backup` and `replication` listen to its commits, and `recovery`
decides which copy is opened. Called by these three and by `process`, `admin` and spark/.
"""
