"""The simulated machine room: time, network, disks, and processes that host the real machines.

Every module here is deterministic: the scheduler owns the only clock and the only random source.
Called by scenario/ (which builds a deployment out of these parts) and by tests of the parts.
"""
