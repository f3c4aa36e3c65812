"""From what users ask for to moves between instances: who owns these keys, who shall have them.

Responsible for: keys and sites as users name them; refusing what cannot be; handing plans over.
Not responsible for: carrying them out (control/controller.py, through console.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count, islice
from typing import Any

from tiercel.control.controller import Scale
from tiercel.control.planner import hand_over
from tiercel.control.plans import Plan, WantedMove
from tiercel.core.records import Key, KeySet
from tiercel.core.routing import slot_of
from tiercel.core.topology import instance_name, operator_of, site_of
from tiercel.errors import UserError
from tiercel.spark.backend import Backend
from tiercel.spark.console import Console
from tiercel.spark.graph import Graph, check_whole, key_packer
from tiercel.spark.hosting import LOOK_S, Hosting, could_not_start, hosted
from tiercel.spark.moves import Moving, Scaling
from tiercel.spark.schema import Columns
from tiercel.spark.slots import check_slots


class Wishes:
    """What can be asked of a running deployment."""

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        console: Console,
        hosting: Hosting,
        launch: Callable[[str], None],
    ) -> None:
        self._backend, self._graph = backend, graph
        self._console, self._hosting = console, hosting
        self._launch = launch  # returns when the instance is attached

    def owners(
        self, operator: str, keys: Iterable[Any] | None, slots: Iterable[int] | None, source: str
    ) -> list[tuple[str, KeySet]]:
        """Owners, and which of the wanted keys or slots are theirs; nothing named: all that `source` owns."""
        self._check_operator(operator)
        self._console.refresh()
        for what, given in (("keys", keys), ("slots", slots)):
            if given is not None and (isinstance(given, str | bytes) or not isinstance(given, Iterable)):
                raise UserError(f"{what}={given!r:.80}", expected=f"several, as in {what}=[{given!r:.80}]")
        if keys is not None:
            if slots is not None:
                raise UserError("keys and slots were given", expected="one of them")
            return self._owners_of_keys(operator, keys)
        if slots is None and not source:
            raise UserError("nothing to move was named", expected="keys=, slots= or source=")
        if source and operator_of(source) != operator:
            raise UserError(
                f"source {source!r}", expected=f"an instance, as in {operator}@{self._graph.root}#1"
            )
        by_slot, overrides = self._console.routes(operator)
        nothing = UserError(f"{source!r} owns none of them", hint="live.status() shows who owns what")
        if slots is None:
            everything = [(m.source, m.keys) for m in hand_over(operator, by_slot, overrides, {source: ""})]
            if not everything:
                raise nothing
            return everything
        found: dict[str, set[int]] = {}
        for slot in slots:
            if slot not in by_slot:
                raise UserError(f"slot {slot!r}", expected=f"0 to {len(by_slot) - 1}")
            owner = by_slot[slot].instance
            if not source or owner == source:
                found.setdefault(owner, set()).add(slot)
        if not found:
            raise nothing
        return [(owner, KeySet(slots=frozenset(members))) for owner, members in found.items()]

    def owner_by_key(self, operator: str, keys: Iterable[Any]) -> dict[Any, str]:
        """Key as the user writes it -> its owner, as the routers tell it now."""
        self._check_operator(operator)
        self._console.refresh()
        columns = self._key_columns(operator)
        by_slot, overrides = self._console.routes(operator)
        found, pack = {}, key_packer(columns)
        for key in keys:
            packed = pack(key)
            found[key] = (overrides.get(packed) or by_slot[slot_of(packed, len(by_slot))]).instance
        return found

    def _owners_of_keys(self, operator: str, keys: Iterable[Any]) -> list[tuple[str, KeySet]]:
        columns = self._key_columns(operator)
        by_slot, overrides = self._console.routes(operator)
        found: dict[str, set[Key]] = {}
        for key in map(key_packer(columns), keys):
            route = overrides.get(key) or by_slot[slot_of(key, len(by_slot))]
            found.setdefault(route.instance, set()).add(key)
        if not found:
            raise UserError("no key was named", expected="keys=[...] with at least one")
        return [(owner, KeySet(keys=frozenset(members))) for owner, members in found.items()]

    def _key_columns(self, operator: str) -> Columns:
        stream = self._graph.operators[operator].operator.inputs[0]
        return self._graph.streams[stream].columns

    def destination(self, operator: str, to: str) -> str:
        """An instance by name, or the one with the fewest slots at a site; a site without one gets one."""
        running = {i for i in self._console.running() if operator_of(i) == operator}
        if "@" in to:
            if to not in running:
                raise UserError(f"{to!r} does not run", expected=f"one of: {', '.join(sorted(running))}")
            return to
        self._graph.check_site(to)
        here = sorted(i for i in running if site_of(i) == to)
        if not here:
            name = instance_name(operator, to, 1)
            check_slots(self._backend, 1, running=hosted(self._backend.application), spare=0)
            self._launch(name)
            return name
        by_slot, _ = self._console.routes(operator)
        load = Counter(route.instance for route in by_slot.values())
        return min(here, key=lambda i: (load[i], i))

    def move(
        self,
        operator: str,
        wanted: Iterable[tuple[str, KeySet]],
        destination: str,
        strategy: str,
        retries: int,
        deadline_s: float | None,
    ) -> Moving:
        """Keys that are at the destination already stay there: no move is made for them."""
        moves = tuple(
            WantedMove(operator, keys, owner, destination, strategy)
            for owner, keys in wanted
            if owner != destination
        )
        deadline_ms = None if deadline_s is None else deadline_s * 1e3
        plan = Plan(moves, f"asked for: {operator} to {destination}")
        return Moving(self._console, self._console.request(plan, retries, deadline_ms))

    def scale(self, operator: str, instances: Mapping[str, int], strategy: str) -> Scaling:
        self._check_operator(operator)
        wanted = self._graph.instances(operator, instances)
        new = [i for i in wanted if i not in self._hosting.names]
        check_slots(self._backend, len(new), running=hosted(self._backend.application), spare=1)
        life = self._console.lives
        self._console.scale(Scale(operator, wanted, strategy))
        return Scaling(self._console, self._hosting, operator, wanted, life)

    def recover(self, instance: str, over: int) -> list[str]:
        """New instances take over from one that died; returns them when all of them work."""
        operator = operator_of(instance)
        self._check_operator(operator)
        check_whole("over", over, 1)
        if instance not in self._hosting.names:
            known = ", ".join(n for n in self._hosting.names if operator_of(n) == operator)
            raise UserError(f"unknown instance {instance!r}", expected=f"one of: {known}")
        check_slots(self._backend, over - 1, running=hosted(self._backend.application), spare=1)
        taken = {*self._hosting.names, *self._hosting.submissions}
        names = (instance_name(operator, site_of(instance), n) for n in count(1))
        heirs = tuple(islice((name for name in names if name not in taken), over))
        recovery = self._console.recover(instance, heirs)
        while self._console.recovering(recovery):
            time.sleep(LOOK_S)
            self._console.check_runs()
            for name in set(heirs) & set(self._hosting.failures):
                raise could_not_start(name, self._hosting.failures[name])
        if not set(heirs) <= set(self._hosting.names):
            what = f"{instance} was not taken over: the controller failed before it had stored the request"
            raise UserError(what, hint="it has started again by itself; ask again")
        return list(heirs)

    def drain(self, instance: str) -> Moving:
        operator = operator_of(instance)
        if operator not in self._graph.operators:
            known = ", ".join(sorted(self._console.running()))
            raise UserError(f"unknown instance {instance!r}", expected=f"one of: {known}")
        wanted = self.owners(operator, None, None, instance)
        others = [i for i in self._console.running() if operator_of(i) == operator and i != instance]
        if not others:
            what = f"no other instance of {operator!r} runs"
            raise UserError(what, expected="one that takes its keys", hint="live.scale(...) first")
        by_slot, _ = self._console.routes(operator)
        load = Counter(route.instance for route in by_slot.values())
        calmest = min(others, key=lambda i: (load[i], i))
        return self.move(operator, wanted, calmest, "live", 0, None)

    def _check_operator(self, operator: str) -> None:
        if operator not in self._graph.operators:
            known = ", ".join(sorted(self._graph.operators))
            raise UserError(f"unknown operator {operator!r}", expected=f"one of: {known}")
