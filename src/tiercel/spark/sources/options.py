"""Options of the data sources: parsed, checked, and refused with what would have been right.

Responsible for: storage, stream and operator names, numbers, choices; misspelt names.
Not responsible for: what the options do (stream_source.py and the modules it names).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, StreamFacts

EARLIEST, LATEST = "earliest", "latest"


class Options:
    """The options of one DataFrame. `known` lists ours; Spark adds some of its own."""

    def __init__(self, given: Mapping[str, str], known: Sequence[str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        ours = {name.lower(): name for name in known}
        for name in self._given.keys() - ours.keys():
            meant = difflib.get_close_matches(name, ours, 1, cutoff=0.8)
            if meant:
                what = f"option {name!r} is not known"
                raise UserError(what, expected=ours[meant[0]])

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name.lower(), default).strip()

    def needed(self, name: str, expected: str) -> str:
        value = self.text(name)
        if not value:
            raise UserError(f"option {name!r} is missing", expected=expected)
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of these choices; the first is the default."""
        value = self.text(name, choices[0])
        if value.lower() not in choices:
            raise UserError(f"option {name} = {value!r}", expected=" or ".join(choices))
        return value.lower()

    def flag(self, name: str) -> bool:
        return self.choice(name, ("false", "true")) == "true"

    def number(self, name: str, expected: str) -> int | None:
        value = self.text(name)
        return None if not value else _natural(name, value, expected)

    def offset(self, name: str, default: str) -> str | int:
        """`earliest`, `latest`, or the number of an entry."""
        value = self.text(name, default).lower()
        return (
            value if value in (EARLIEST, LATEST) else _natural(name, value, "earliest, latest or an offset")
        )

    def deployment(self) -> DeploymentDir:
        return DeploymentDir(self.needed("storage", "the storage directory of a deployment"))


def _natural(name: str, value: str, expected: str) -> int:
    if not value.isascii() or not value.isdecimal() or int(value) < 1:
        raise UserError(f"option {name} = {value!r}", expected=expected)
    return int(value)


def facts_of(deployment: DeploymentDir, stream: str) -> StreamFacts:
    """The facts of a stream; UserError with the names of all streams if there is none of that name."""
    streams = deployment.manifest().streams
    if stream not in streams:
        what = f"no stream {stream!r} in {deployment.directory}"
        raise UserError(what, expected=f"one of: {', '.join(sorted(streams)) or '(there are none)'}")
    return streams[stream]
