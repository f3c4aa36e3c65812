"""Benchmarks of whole applications: phases around a change, the largest load, recovery, NEXMark beside Spark.

The command line calls `measure` of each.
"""
