"""Keyed state in memory.

handle.py is the state API for user code (PySpark's), table.py a set of keys with timers and dirty marks.
eviction.py decides which keys leave memory. copy_on_write.py captures many keys as of one moment while they
change; digests.py computes their digests in this way.

An instance has one table for its own keys and one for each set of arriving keys. core.instance and
core.migration use this package; it does no IO and knows nothing of moves.
"""
