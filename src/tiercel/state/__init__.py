"""What a deployment keeps, as a thing to handle: look at it, copy it, bring it back, divide it.

Responsible for: the functions behind `tiercel state`, for programs; each takes the storage directory.
Not responsible for: what happens while it runs (runtime/), keyed state as user code sees it (core/).

    show(storage)                           what each process keeps, and how far its backup is
    checkpoint(storage)                     every instance of a running deployment takes one now
    history(location)                       every past state that a backup can restore
    backup(storage, location)               a full copy, also while it runs
    restore(location, storage)              a storage directory out of a backup, on any machine
    split(storage, instance, slots)         some of an instance's slots into an instance of their own
    merge(storage, source, destination)     all slots of one instance into another one
"""

from tiercel.runtime.moments import State, history
from tiercel.state.asking import checkpoint
from tiercel.state.copying import backup, restore
from tiercel.state.looking import Kept, show
from tiercel.state.ranges import Divided, merge, split

__all__ = [
    "Divided",
    "Kept",
    "State",
    "backup",
    "checkpoint",
    "history",
    "merge",
    "restore",
    "show",
    "split",
]
