"""The data that every part of the core shares: keys, rows and logs, routing tables, the topology.

Values and look-ups only. Everything may import this package; it imports nothing of the core but errors.
"""
