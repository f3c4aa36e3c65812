"""Connections between processes: wire format, handshake, TLS, peers, and the registry of addresses.

Called by `process` and by everything that looks up or stops processes. It knows messages only as data.
"""
