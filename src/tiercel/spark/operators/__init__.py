"""User code behind the core: what an instance runs for its operator.

`plans` has the data that travels to the executors. `processor_adapter` runs a PySpark `StatefulProcessor`,
`pandas_adapter` one that takes DataFrames, `folds` a step function, `transforms` the map, filter and
flat_map in front. `tiercel.spark.api` makes the plans, `tiercel.spark.cluster.task` and `tiercel.testing`
run them.
"""
