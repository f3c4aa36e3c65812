"""A deployment inside a Spark application: processes as Spark tasks, and the driver's threads around them.

In the driver: `bootstrap` starts a deployment, `supervisor` submits and restarts its tasks,
`controller_thread` runs the controller, `liveness`, `decommission` and `warm_workers` are threads that look
after processes and executors, `replica_placement` says where replicas run. Before a start: `session`,
`backend`, `task_slots`, `preflight`. On the executors: `task`, the code that Spark runs for each process.

`tiercel.spark.api` calls this room. Benchmarks replace what a task hosts (`task.Build`).
"""
