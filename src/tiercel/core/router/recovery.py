"""The recovery of a router: after a restart it knows only the contents of its storage.

Responsible for: passing each stored item to the component that owns its table.
Not responsible for: the use of an item (`load` of each component), an instance's recovery (core/instance/).

A restarted router undoes moves that are not decided: their capture and shadow depended on memory of the
incarnation that ended. It continues decided moves. A write that was not durable never happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercel.core.machine.effects import StorageKey

Loader = Callable[[StorageKey, Any], None]

# tables whose items modify items of other tables: they are loaded last
LAST = frozenset(("retired", "shadow", "move_mark", "batch_frame"))


def load_items(items: dict[StorageKey, Any], loaders: dict[str, Loader]) -> None:
    """Pass every item to the loader of its table. An unknown table is a `KeyError`."""
    for key, value in items.items():
        if key[0] not in LAST:
            loaders[key[0]](key, value)
    for key, value in items.items():
        if key[0] in LAST:
            loaders[key[0]](key, value)


def as_older_copy(items: dict[StorageKey, Any]) -> dict[StorageKey, Any]:
    """The items of a copy that may lack the last writes of its storage, such as a backup.

    Rule R43: the numbers behind the copy may have been used. The router numbers anew, as another origin.
    """
    return {key: value for key, value in items.items() if key != ("storage",)}


def not_loaded(key: StorageKey, value: Any) -> None:
    """Skip log entries: they stay in storage until a reader needs them."""
