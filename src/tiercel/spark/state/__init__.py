"""The keyed state of operators, as declared, as stored and from elsewhere.

`declared_state` finds out what a processor declares; `schema` maps it to stored names and columns;
`schema_evolution` upgrades stored values to a new schema; `stored_state_adapter` lets processors work on
stored state. `external_state` and `spark_checkpoint` read initial state from an export or from a checkpoint
of Spark. The rooms api, cluster, sources and operators call it.
"""
