"""The shape of a machine: events in, effects out, one atomic write per step, the durable tables.

Both machines and every driver use it. `step.py` collects what one event causes, `stored.py` declares the
durable tables, `names.py` builds and parses the names of timers and readers.
"""
