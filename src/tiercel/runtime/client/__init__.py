"""Clients for any Python program: producer, subscriber, and batch tasks and commits of DataFrame feeds.

Each client runs a machine of the core in its own thread. Called by spark/api and spark/sources, and by
programs without Spark.
"""
