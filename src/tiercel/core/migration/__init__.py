"""Moving keys between instances: one file per role, one file of tables.

    phases.py                 the phases of the four roles, every transition, every late message
    source_router.py          the router that the keys leave: it decides the move
    destination_router.py     the router that the keys come to
    source_instance.py        the instance that sends the state
    destination_instance.py   the instance that receives it
    coordinator.py            requests, locks, status; parallel_recovery.py: takeover of a dead instance

The router and instance roles see their machine through ports.py. Only core.router and core.instance call it.
"""
