"""Changes of the schema of an operator's state: what may change, and how stored values are upgraded.

Responsible for: comparing declared with stored schemas; trying an upgrade on every stored value before
    anything is written; upgrading the store of an instance before the instance starts.
Not responsible for: names and columns of stored values (schema.py), checkpoints (core/).

    driver      declared and stored schemas differ --> upgrade= for each variable, else refused
                every stored value through it, in memory --> one that fails: refused
                the manifest records version 2, and the schema of version 1
    executor    the instance's store, before it is opened: average -> average@2, a few keys at a time; then a
                mark that all is done. After a crash in between, the next start finds the rest by its name

A state that was restored from an earlier time is upgraded in the same way: then `upgrade` is needed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import types as t

from tiercel.core.machine.effects import StorageKey, Write
from tiercel.core.model.keys import StateImage
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, VariableFacts
from tiercel.runtime.recovery.read_only import stored_keys
from tiercel.runtime.storage.directory import exists
from tiercel.runtime.storage.store import Store, StoreView
from tiercel.spark.state.declared_state import DeclaredState, variable_codec
from tiercel.spark.state.schema import (
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
Upgrades = Mapping[str, Upgrade]  # by variable: defaults of new fields, or a function of the old row

KEYS_PER_BATCH = 500


@dataclass(frozen=True)
class StatePlan:
    """How an operator's values are stored, and how older values are upgraded."""

    facts: dict[str, VariableFacts] = field(default_factory=dict)
    upgrades: Upgrades = field(default_factory=dict)

    @property
    def renamed(self) -> dict[str, str]:
        """Variables that are not stored under their own name, with the name they have."""
        return {n: stored_name(n, f.version) for n, f in self.facts.items() if f.version > 1}

    @property
    def versions(self) -> dict[str, int]:
        return {name: facts.version for name, facts in self.facts.items()}

    def stored_name(self, variable: str) -> str:
        return self.renamed.get(variable, variable)

    def converted(self, image: StateImage) -> StateImage | None:
        """A key's image with every value upgraded; None if nothing is to be upgraded."""
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
                    expected=f"at most version {facts.version}: the stored state is newer than its manifest",
                )  # else it belongs to a variable that was deleted
        return msgspec.structs.replace(image, values=values) if changed else None

    def _convert(self, name: str, version: int, content: Content, image: StateImage) -> Content:
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
    """A function from content of an earlier schema to content of the one in `facts`."""
    old, new = variable_codec(name, struct_of(earlier)), variable_codec(name, struct_of(facts.schema))

    def convert(stored: Any) -> Any:
        row = dict(zip(old.names, old.values(stored), strict=True))
        made = upgrade(row) if callable(upgrade) else _by_name(new.schema, row, upgrade)
        return new.payload(tuple(new.in_order(made)))

    return lambda content: single_values(facts.kind, content, convert, facts.ttl)


def _by_name(schema: t.StructType, row: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] if name in row else defaults[name] for name in schema.names}


# -- what may change ------------------------------------------------------------------------------


def next_facts(
    operator: str, declared: DeclaredState, found: Facts | None, upgrades: Upgrades
) -> dict[str, VariableFacts]:
    """How an operator's state is stored from now on; UserError if the stored state cannot follow."""
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
            facts[name] = next_variable_facts(operator, name, was, new, upgrades.get(name))
    return facts


def next_variable_facts(
    operator: str, name: str, was: VariableFacts, new: VariableFacts, upgrade: Upgrade | None
) -> VariableFacts:
    """The facts of a variable that has stored values already."""
    what = f"state variable {name!r} of operator {operator!r}"
    for fact, label in (
        ("kind", "kind of state"),
        ("key_schema", "type of map keys"),
        ("ttl", "time to live"),
    ):
        before, after = getattr(was, fact), getattr(new, fact)
        if before != after:
            raise UserError(
                f"{what}: its {label} is not as stored: {_shown_fact(fact, after)}",
                expected=_shown_fact(fact, before),
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


def _shown_fact(fact: str, value: Any) -> str:
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
    missing = [name for name in added if name not in defaults]
    if missing:
        raise UserError(
            f"{what}: no default for {', '.join(missing)}", expected=f"one for: {', '.join(added)}"
        )
    unknown = [name for name in defaults if name not in added]
    if unknown:
        expected = f"defaults of new fields: {', '.join(added) or '(there are none)'}"
        raise UserError(f"{what}: default for {', '.join(unknown)}", expected=expected)
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


def try_upgrade(deployment: DeploymentDir, operator: str, plan: StatePlan, instances: Iterable[str]) -> None:
    """Run the upgrade on every stored value without writing anything; UserError if one fails."""
    if all(version == 1 for version in plan.versions.values()):
        return
    if deployment.manifest().local:
        needed = bool(plan.upgrades)  # the disks of executors are read from the backup, which is expensive
    else:
        needed = not all(_is_done(deployment.process(instance), plan.versions) for instance in instances)
    if needed:
        for stored in stored_keys(deployment, operator):
            plan.converted(stored.image)


def upgrade_store(directory: Path, plan: StatePlan) -> None:
    """Upgrade the whole store of an instance, before any other code opens it."""
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


def upgrade_items(items: dict[StorageKey, Any], plan: StatePlan) -> dict[StorageKey, Any]:
    """Upgrade what a successor loads from the store of another instance, which may be older."""
    return {
        where: (plan.converted(value) or value) if isinstance(value, StateImage) else value
        for where, value in items.items()
    }


def _is_done(directory: Path, versions: Mapping[str, int]) -> bool:
    """Whether a store has no value of an earlier version."""
    if all(version == 1 for version in versions.values()) or not exists(directory):
        return True
    with contextlib.closing(StoreView(directory)) as view:
        done: dict[str, int] = view.get(("schema",)) or {}
    return all(done.get(name, 1) >= version for name, version in versions.items())
