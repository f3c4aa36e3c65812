"""Tiercel on PySpark: the only package of the product that imports pyspark.

    api        what users call: `start`, `Live`, streams, clients, moves, status
    cluster    the deployment inside a Spark application: supervisor, tasks, controller thread, watchers
    sources    Spark data sources: streams, state and metrics as DataFrames
    operators  user code behind the core: processors, folds, transforms
    state      declared and stored state of operators: schemas, upgrades, state from elsewhere
    rows       rows and values: schemas, conversion, the row codec and its code generator

Each room may import the rooms below it. `pyspark_internals` is the only use of PySpark's private API. Users
import `tiercel`; the benchmarks, the demonstration and the chaos tests use `api` and `cluster.session`.
"""
