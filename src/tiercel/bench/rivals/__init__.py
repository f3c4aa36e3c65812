"""Other systems that reconfigure a keyed operator, in the same run: Spark's own query, and Flink.

Called by scenarios/reconfigure.py. spark.py and flink.py measure one rescaling each; flink_job.py runs in a
Python of its own, and imports nothing of ours.
"""
