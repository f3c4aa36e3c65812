"""The router of a site: it sequences the rows of its keys, dispatches them and admits the outputs.

    router.py       the machine: passes each event to a component, one write per event
    intake.py       rows of clients          outputs.py     outputs of instances
    forwarding.py   frames between sites     watermarks.py  event time
    sessions.py     instances that attach    recovery.py    stored items after a restart
    moves.py        the interface of migration; a router can be built without migration

Drivers use `Router` only. The logs of the site are in core/logs. core/migration sees the router through its
own ports.
"""
