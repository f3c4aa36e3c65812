"""One driver at a time runs a deployment's directory.

Responsible for: a lock that a killed driver does not leave behind, and who holds it.
Not responsible for: processes of an older driver that live on for a moment (lives and epochs fence them).
"""

from __future__ import annotations

import fcntl
import os

from tiercel.errors import UserError
from tiercel.runtime.place import Place


class StorageLock:
    """Held from the start of a deployment to its end."""

    def __init__(self, place: Place) -> None:
        path = place.directory / "lock"
        try:
            place.directory.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="ascii")
        except OSError as error:
            raise UserError(
                f"{place.directory} cannot be written: {error.strerror}",
                expected="a directory that the driver and every executor can write",
                hint="choose another with storage=",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise UserError(
                f"{place.directory} is in use by the driver with pid {holder}",
                expected="one driver at a time",
                hint="stop that one, or choose another storage=",
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()
