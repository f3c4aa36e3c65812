"""The protocol as pure state machines: routers, instances, clients. No IO, no clock, no randomness.

A machine is given an event and the time, and returns effects. A driver (runtime/, sim/, testing/) does the
rest, in this order: it hands over one event (or `on_events` for several), performs the effects in the order
of the list, writes each `Write` atomically and answers `Durable` once it is on disk, answers `ReadLog` by
`LogRead` and `LoadCheckpoint` by `CheckpointLoaded`, and fires each `SetTimer` as `TimerFired`.

    model, messages, machine    the words: keys, logs, routing; messages; events and effects
    router, instance, state     the two machines and the state of keys
    migration                   the four roles of a move, and their tables (phases.py)

The glossary is in ARCHITECTURE.md. Every other package may call this one; it imports none of them.
"""
