"""Spark data sources over a deployment's storage directory.

`stream_source` is the format "tiercel" (reads by `stream_reader`, writes by `stream_writer`),
`state_source` is "tiercel-state", `metrics_source` is "tiercel-metrics". `stream_source.register` registers
all of them with a session. Spark calls these classes; `tiercel.spark.api` calls `register` and a few
helpers. No deployment needs to run here.
"""
