"""From one schema of an operator's state to the next: what may change, how values follow, when.

Responsible for: comparing what is declared with what is stored; trying the change on every stored value
    before anything is touched; carrying it out where an instance stores, before the instance starts.
Not responsible for: names and columns of stored values (state_schema.py), checkpoints (core/).

    driver      declared and found schemas differ --> upgrade= for each variable, else refused
                every stored value through it, in memory --> one that fails: refused
                the manifest says version 2, and what version 1 was
    executor    the instance's store, before it is opened: average -> average@2, a few keys at a time;
                then a mark that all is done. Killed in between, the next start finds what is left by its name

A state that was restored as of an earlier moment is found in the same way: then `upgrade` is needed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import types as t

from tiercel.core.effects import StorageKey, Write
from tiercel.core.records import KeyImage
from tiercel.errors import UserError
from tiercel.runtime.place import Place, VariableFacts
from tiercel.runtime.store import Store, StoreView
from tiercel.runtime.stored_state import stored_keys
from tiercel.runtime.storing import exists
from tiercel.spark.processors import DeclaredState, state_columns
from tiercel.spark.state_schema import (
    Content,
    Facts,
    facts_of,
    shown,
    single_values,
    stored_name,
    struct_of,
    variable_of,
)

Upgrade = Mapping[str, Any] | Callable[[dict[str, Any]], Any]
Upgrades = Mapping[str, Upgrade]  # by variable: defaults of new fields, or a function from old row to new

KEYS_PER_BATCH = 500


@dataclass(frozen=True)
class StatePlan:
    """How an operator's values are stored, and how older ones become like that."""

    facts: dict[str, VariableFacts] = field(default_factory=dict)
    upgrades: Upgrades = field(default_factory=dict)

    @property
    def renamed(self) -> dict[str, str]:
        """Variables that are not stored under their own name."""
        return {n: stored_name(n, f.version) for n, f in self.facts.items() if f.version > 1}

    @property
    def versions(self) -> dict[str, int]:
        return {name: facts.version for name, facts in self.facts.items()}

    def stored_name(self, variable: str) -> str:
        return self.renamed.get(variable, variable)

    def converted(self, image: KeyImage) -> KeyImage | None:
        """A key's image with every value as it is stored now; None if it is already."""
        values: dict[str, Any] = {}
        changed = False
        for stored, (kind, content) in (image.values or {}).items():
            name, version = variable_of(stored)
            facts = self.facts.get(name)
            if facts is None or version == facts.version:
                values[stored] = (kind, content)
                continue
            changed = True
            if version in facts.earlier:
                values[stored_name(name, facts.version)] = (
                    kind,
                    self._convert(name, version, content, image),
                )
            elif version > facts.version:
                raise UserError(
                    f"state variable {name!r} has values of version {version}",
                    expected=f"at most version {facts.version}: what is stored is newer than its manifest",
                )  # else: of a variable that was deleted
        return msgspec.structs.replace(image, values=values) if changed else None

    def _convert(self, name: str, version: int, content: Content, image: KeyImage) -> Content:
        facts = self.facts[name]
        if name not in self.upgrades:
            raise missing_upgrade(name, facts.earlier[version], facts.schema)
        try:
            return converter(name, facts.earlier[version], facts, self.upgrades[name])(content)
        except UserError:
            raise
        except Exception as error:
            key = msgspec.msgpack.decode(image.key)
            raise UserError(
                f"upgrade of state variable {name!r} failed at key {key}: {type(error).__name__}: {error}",
                expected="a function that makes a row of the new schema out of every stored one",
                hint="nothing was changed",
            ) from error


def converter(
    name: str, earlier: str, facts: VariableFacts, upgrade: Upgrade
) -> Callable[[Content], Content]:
    """From content of an earlier schema to content of the one in `facts`."""
    old, new = state_columns(name, struct_of(earlier)), state_columns(name, struct_of(facts.schema))

    def convert(kept: Any) -> Any:
        row = dict(zip(old.names, old.values(kept), strict=True))
        made = upgrade(row) if callable(upgrade) else _by_name(new.schema, row, upgrade)
        return new.payload(tuple(new.in_order(made)))

    return lambda content: single_values(facts.kind, content, convert, facts.ttl)


def _by_name(schema: t.StructType, row: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] if name in row else defaults[name] for name in schema.names}


# -- what may change ------------------------------------------------------------------------------


def continued(
    operator: str, declared: DeclaredState, found: Facts | None, upgrades: Upgrades
) -> dict[str, VariableFacts]:
    """How an operator's state is stored from now on; UserError if what is stored cannot become that."""
    facts = dict(found or {})
    now = {variable.name: facts_of(variable) for variable in declared.variables}
    for name in upgrades.keys() - now.keys():
        what = f"upgrade of {name!r}: operator {operator!r} declares no such state variable"
        raise UserError(what, expected=f"one of: {', '.join(now) or '(there are none)'}")
    for name in declared.deleted & facts.keys():
        facts[name] = msgspec.structs.replace(facts[name], deleted=True, earlier={})
    for name, new in now.items():
        was = facts.get(name)
        if was is None:
            facts[name] = new
        elif was.deleted:
            facts[name] = msgspec.structs.replace(new, version=was.version + 1)
        else:
            facts[name] = successor(operator, name, was, new, upgrades.get(name))
    return facts


def successor(
    operator: str, name: str, was: VariableFacts, new: VariableFacts, upgrade: Upgrade | None
) -> VariableFacts:
    """The facts of a variable that has values already."""
    what = f"state variable {name!r} of operator {operator!r}"
    for fact, told in (
        ("kind", "kind of state"),
        ("key_schema", "type of map keys"),
        ("ttl", "time to live"),
    ):
        before, after = getattr(was, fact), getattr(new, fact)
        if before != after:
            raise UserError(
                f"{what}: its {told} is not as stored: {_told(fact, after)}",
                expected=_told(fact, before),
                hint="a variable of another name can have it; handle.deleteIfExists(...) drops the old one",
            )
    if was.schema == new.schema:
        return was
    if upgrade is None:
        raise missing_upgrade(name, was.schema, new.schema, what)
    if not callable(upgrade):
        _check_defaults(what, was.schema, new.schema, upgrade)
    earlier = {**was.earlier, was.version: was.schema}
    return msgspec.structs.replace(new, version=was.version + 1, earlier=earlier)


def _told(fact: str, value: Any) -> str:
    if fact == "key_schema":
        return shown(value) if value else "none"
    return ("one" if value else "none") if fact == "ttl" else str(value)


def _check_defaults(what: str, was: str, new: str, defaults: Any) -> None:
    if not isinstance(defaults, Mapping):
        raise UserError(
            f"upgrade of {what}: {defaults!r:.80}",
            expected="a dict of defaults, or a function of the old row",
        )
    old, fresh = struct_of(was), struct_of(new)
    added = [name for name in fresh.names if name not in old.names]
    unsaid = [name for name in added if name not in defaults]
    if unsaid:
        raise UserError(
            f"{what}: no default for {', '.join(unsaid)}", expected=f"one for: {', '.join(added)}"
        )
    foreign = [name for name in defaults if name not in added]
    if foreign:
        expected = f"defaults of new fields: {', '.join(added) or '(there are none)'}"
        raise UserError(f"{what}: default for {', '.join(foreign)}", expected=expected)
    changed = [n for n in fresh.names if n in old.names and fresh[n].dataType != old[n].dataType]
    gone = [name for name in old.names if name not in fresh.names]
    if changed or gone:
        raise UserError(
            f"{what}: {', '.join(changed or gone)} {'has another type' if changed else 'is gone'}",
            expected="the same fields and new ones with defaults",
            hint=f"upgrade={{...: lambda old: {{...}}}} makes rows of: {fresh.simpleString()}",
        )


def missing_upgrade(name: str, was: str, new: str, what: str = "") -> UserError:
    return UserError(
        f"{what or f'state variable {name!r}'} has another schema than what is stored: {shown(new)}",
        expected=shown(was),
        hint=f"upgrade={{{name!r}: ...}}: a dict with defaults of new fields, or a function from the old row "
        "as a dict to the new one",
    )


# -- carrying it out ------------------------------------------------------------------------------


def try_upgrade(place: Place, operator: str, plan: StatePlan, instances: Iterable[str]) -> None:
    """Every stored value through the upgrade, without writing anything; UserError if one fails."""
    if all(version == 1 for version in plan.versions.values()):
        return
    if place.manifest().local:
        needed = bool(plan.upgrades)  # what executors' disks hold is seen in the backup, at some cost
    else:
        needed = not all(_is_done(place.process(instance), plan.versions) for instance in instances)
    if needed:
        for stored in stored_keys(place, operator):
            plan.converted(stored.image)


def upgrade_store(directory: Path, plan: StatePlan) -> None:
    """Everything an instance stores as the current schema has it; before anybody else opens it."""
    if _is_done(directory, plan.versions):
        return
    with contextlib.closing(StoreView(directory)) as view:
        store = Store(directory, "disk")
        with contextlib.closing(store):
            seq, puts = 0, dict[StorageKey, Any]()

            def write(more: dict[StorageKey, Any]) -> int:
                store.add(Write(seq + 1, more))
                store.commit()
                return seq + 1

            for table in ("state", "move"):
                for where, image in view.scan((table,)):
                    converted = plan.converted(image)
                    if converted is not None:
                        puts[where] = converted
                    if len(puts) >= KEYS_PER_BATCH:
                        seq, puts = write(puts), {}
            write(puts | {("schema",): plan.versions})
            store.sync()


def upgraded(items: dict[StorageKey, Any], plan: StatePlan) -> dict[StorageKey, Any]:
    """What an instance loads of another's store: that one may have died before it could be upgraded."""
    return {
        where: (plan.converted(value) or value) if isinstance(value, KeyImage) else value
        for where, value in items.items()
    }


def _is_done(directory: Path, versions: Mapping[str, int]) -> bool:
    """Whether a store has nothing of an earlier version."""
    if all(version == 1 for version in versions.values()) or not exists(directory):
        return True
    with contextlib.closing(StoreView(directory)) as view:
        done: dict[str, int] = view.get(("schema",)) or {}
    return all(done.get(name, 1) >= version for name, version in versions.items())
