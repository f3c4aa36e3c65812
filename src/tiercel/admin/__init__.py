"""Administration of the stored state of a deployment: show, back up, restore, split, merge.

Responsible for: the functions behind `tiercel state`, for programs; each takes the storage directory.
Not responsible for: running deployments (runtime/, spark/), keyed state as user code sees it (core/).
May be called by: the CLI and users' programs.

    show(storage)                           the stored state of each process, and how far its backup is
    checkpoint(storage)                     every instance of a running deployment takes one now
    history(location)                       every past state that a backup can restore
    backup(storage, location)               a full copy, also while it runs
    restore(location, storage)              a storage directory out of a backup, on any machine
    split(storage, instance, slots)         some of an instance's slots into a new instance
    merge(storage, source, destination)     all slots of one instance into another one
"""

from tiercel.admin.checkpoint import checkpoint
from tiercel.admin.repartition import RepartitionResult, merge, split
from tiercel.admin.show import StoredProcess, show
from tiercel.runtime.backup.deployment_backup import backup_deployment as backup
from tiercel.runtime.backup.deployment_backup import restore_deployment as restore
from tiercel.runtime.backup.point_in_time import PastState, history

__all__ = [
    "PastState",
    "RepartitionResult",
    "StoredProcess",
    "backup",
    "checkpoint",
    "history",
    "merge",
    "restore",
    "show",
    "split",
]
