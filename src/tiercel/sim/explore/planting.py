"""The planting of bugs: for one run, a broken rule replaces a rule of the protocol.

Responsible for: replacing and restoring methods of the core's classes, from the simulator's side.
Not responsible for: the list of bugs (mutants.py), their patches (router_mutants.py,
    instance_mutants.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One method of one class, and its replacement while the bug is planted.

    `broken` is given the original function and returns the replacement.
    """

    owner: Any  # a class or a module
    name: str
    broken: Callable[[Any], Any]


_PLANTED: set[str] = set()


def instead(value: Any) -> Callable[[Any], Any]:
    """A replacement that ignores its arguments and returns `value`."""
    return lambda original: lambda *args, **kwargs: value


def patches_of(mutant: str) -> tuple[Patch, ...]:
    """The patches of a planted bug; none for the unchanged code."""
    # imported here: both name `Patch`
    from tiercel.sim.explore import (
        bundle_mutants,
        instance_mutants,
        outage_mutants,
        request_mutants,
        router_mutants,
        site_mutants,
        state_mutants,
    )

    tables = (
        *(router_mutants, instance_mutants, request_mutants, outage_mutants, state_mutants),
        *(site_mutants, bundle_mutants),
    )
    return tuple(patch for table in tables for patch in table.PATCHES.get(mutant, ()))


@contextlib.contextmanager
def planted(mutant: str) -> Iterator[None]:
    """Run the body with a bug planted. A bug that is planted already is not planted twice."""
    patches = patches_of(mutant) if mutant and mutant not in _PLANTED else ()
    if not patches:
        yield
        return
    _PLANTED.add(mutant)
    try:
        with patched(patches):
            yield
    finally:
        _PLANTED.discard(mutant)


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Run the body with some methods replaced."""
    with contextlib.ExitStack() as restore:
        for owner, name, broken in patches:
            own = vars(owner).get(name)
            original = getattr(owner, name)
            setattr(owner, name, broken(original))
            if own is None:
                restore.callback(delattr, owner, name)
            else:
                restore.callback(setattr, owner, name, own)
        yield
