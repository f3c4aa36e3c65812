"""The public API: what users hold and call in the driver.

`deployment` has `start` and `Live`; `streams` has the streams of a deployment; `clients` has producers and
subscribers, which need no Spark session; `drop_in` has PySpark's own signature. Declarations gather in
`graph`, which makes the topology and the manifest. `requests`, `moves` and `status` are about a deployment
that runs.

Users, the demonstration, the benchmarks and the chaos tests call this room. No other room of
`tiercel.spark` does.
"""
