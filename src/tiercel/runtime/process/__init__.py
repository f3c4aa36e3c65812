"""The process of one machine: host, durability gate, send buffer, metrics, heartbeat.

`Host` drives a machine of the core with asyncio. Called by spark/cluster, the clients, and tests.
"""
