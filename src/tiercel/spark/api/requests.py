"""Requests of users to a running deployment: move, scale, recover, drain.

Responsible for: keys and sites as users name them; their owners and destinations; refusing what cannot work;
    handing plans to the controller.
Not responsible for: carrying plans out (control/controller.py, through cluster/controller_thread.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count, islice
from typing import Any

from tiercel.control.controller import ScaleRequest
from tiercel.control.planner import hand_over
from tiercel.control.plans import Plan, PlannedMove
from tiercel.control.predict import Choice, Costs, MoveFacts, Prediction, choose, learn
from tiercel.control.view import InstanceView
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import instance_name, operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.net.emulated_link import link_between
from tiercel.spark.api.graph import Graph, check_whole, key_packer
from tiercel.spark.api.moves import MoveHandle, ScaleHandle
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.controller_thread import ControllerThread
from tiercel.spark.cluster.load_view import LoadReader
from tiercel.spark.cluster.supervisor import Supervisor, running_processes
from tiercel.spark.cluster.task_slots import check_slots
from tiercel.spark.cluster.waiting import wait_until
from tiercel.spark.job_errors import could_not_start
from tiercel.spark.rows.row_codec import RowCodec

LEARNT_FROM = 50  # the last moves with a prediction


class DeploymentRequests:
    """What can be asked of a running deployment."""

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        controller: ControllerThread,
        supervisor: Supervisor,
        launch: Callable[[str], None],
    ) -> None:
        self._backend, self._graph = backend, graph
        self._controller, self._supervisor = controller, supervisor
        self._launch = launch  # returns when the instance is attached

    def owners(
        self, operator: str, keys: Iterable[Any] | None, slots: Iterable[int] | None, source: str
    ) -> list[tuple[str, KeySet]]:
        """Owners, each with its share of the given keys or slots; without any, all that `source` owns."""
        self._check_operator(operator)
        self._controller.refresh()
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
        by_slot, overrides = self._controller.routes(operator)
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
        """Key as the user writes it -> its owner, as the routers report it now."""
        self._check_operator(operator)
        self._controller.refresh()
        codec = self._key_codec(operator)
        by_slot, overrides = self._controller.routes(operator)
        found, pack = {}, key_packer(codec)
        for key in keys:
            packed = pack(key)
            found[key] = (overrides.get(packed) or by_slot[slot_of(packed, len(by_slot))]).instance
        return found

    def _owners_of_keys(self, operator: str, keys: Iterable[Any]) -> list[tuple[str, KeySet]]:
        codec = self._key_codec(operator)
        by_slot, overrides = self._controller.routes(operator)
        found: dict[str, set[Key]] = {}
        for key in map(key_packer(codec), keys):
            route = overrides.get(key) or by_slot[slot_of(key, len(by_slot))]
            found.setdefault(route.instance, set()).add(key)
        if not found:
            raise UserError("no key was named", expected="keys=[...] with at least one")
        return [(owner, KeySet(keys=frozenset(members))) for owner, members in found.items()]

    def _key_codec(self, operator: str) -> RowCodec:
        stream = self._graph.operators[operator].operator.inputs[0]
        return self._graph.streams[stream].codec

    def destination(self, operator: str, to: str) -> str:
        """An instance by name, or the one with the fewest slots at a site.

        A site without an instance gets one.
        """
        running = {i for i in self._controller.running() if operator_of(i) == operator}
        if "@" in to:
            if to not in running:
                raise UserError(f"{to!r} does not run", expected=f"one of: {', '.join(sorted(running))}")
            return to
        self._graph.check_site(to)
        here = sorted(i for i in running if site_of(i) == to)
        if not here:
            name = instance_name(operator, to, 1)
            if not self._controller.is_elsewhere(name):
                check_slots(
                    self._backend, 1, running=running_processes(self._backend.application), reserved=0
                )
            self._launch(name)
            return name
        by_slot, _ = self._controller.routes(operator)
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
        prediction: Prediction | None = None,
    ) -> MoveHandle:
        """Moves keys to the destination. No move is made for keys that are there already."""
        moves = tuple(
            PlannedMove(operator, keys, owner, destination, strategy)
            for owner, keys in wanted
            if owner != destination
        )
        deadline_ms = None if deadline_s is None else deadline_s * 1e3
        plan = Plan(moves, f"requested: {operator} to {destination}")
        names = self._controller.request(plan, retries, deadline_ms, prediction)
        return MoveHandle(self._controller, names, prediction)

    def choice(self, operator: str, wanted: Iterable[tuple[str, KeySet]], destination: str) -> Choice:
        """What each strategy would cost now, and the one that `auto` takes."""
        leaving = [(owner, keys) for owner, keys in wanted if owner != destination]
        facts = self._facts(operator, leaving, destination)
        ended = [(r.prediction, r.duration_ms) for r in self._controller.history.reports() if r.prediction]
        return choose(facts, learn(Costs(), ended[-LEARNT_FROM:]))

    def _facts(self, operator: str, leaving: list[tuple[str, KeySet]], destination: str) -> MoveFacts:
        deployment = self._controller.deployment
        manifest = deployment.manifest()
        routes = {name: self._controller.routes(name) for name in manifest.topology.operators}
        view = LoadReader(self._controller.gauges, manifest.topology, manifest.sites_here).view(
            0.0, self._controller.running(), routes, {}
        )
        sources = {i.name: i for i in view.operators[operator].instances}
        slots, _ = routes[operator]
        owned = Counter(route.instance for route in slots.values())
        keys, size, rate, backlog, service_us = 0.0, 0.0, 0.0, 0, 0.0
        latency_ms, mbit = 0.0, None
        for owner, members in leaving:
            load = sources.get(owner) or InstanceView(owner)
            has = max(1, load.state_keys)
            share = min(1.0, len(members.keys) / has if members.keys else len(members.slots) / owned[owner])
            count = float(len(members.keys)) if members.keys else share * load.state_keys
            keys, size = keys + count, size + load.state_bytes / has * count
            rate, backlog = rate + load.arrivals * share, max(backlog, load.backlog_rows)
            if load.capacity:
                service_us = max(service_us, 1e6 / load.capacity)
            link = link_between(manifest.links, site_of(owner), site_of(destination))
            if link is not None:
                latency_ms = max(latency_ms, link.latency_ms)
                mbit = min(m for m in (mbit, link.mbit) if m) if mbit or link.mbit else None
        standbys = self._controller.standbys()
        return MoveFacts(
            *(round(keys), round(size), round(rate, 1), backlog, round(service_us, 1), latency_ms, mbit),
            deterministic=manifest.topology.operators[operator].deterministic,
            has_standby=bool(leaving) and all(standbys.get(owner) == destination for owner, _ in leaving),
            checkpoint_ms=manifest.settings.checkpoint_ms,
            flip_keys_max=manifest.settings.flip_keys_max,
        )

    def scale(self, operator: str, instances: Mapping[str, int], strategy: str) -> ScaleHandle:
        self._check_operator(operator)
        wanted = self._graph.instances(operator, instances)
        new = [i for i in wanted if i not in self._supervisor.names and not self._controller.is_elsewhere(i)]
        check_slots(self._backend, len(new), running=running_processes(self._backend.application), reserved=1)
        incarnation = self._controller.incarnations
        self._controller.scale(ScaleRequest(operator, wanted, strategy))
        return ScaleHandle(self._controller, self._supervisor, operator, wanted, incarnation)

    def leave(self, site: str, strategy: str) -> list[str]:
        """Move all keys away from a site and end its instances; returns the operators that had some there."""
        self._graph.check_site(site)
        parent, streams = self._graph.sites[site], self._controller.deployment.manifest().topology.streams
        if parent is None:
            what = f"site {site!r} would leave, and it is the root"
            raise UserError(what, expected="a site with a parent", hint="live.stop() ends the deployment")
        homes = [s.name for s in streams.values() if s.logged and s.home == site and s.outputs_at != "site"]
        if homes:
            what = f"site {site!r} would leave, and it is the home of {', '.join(sorted(homes))}"
            raise UserError(what, expected="a site that is no home", hint="declare them with home=")
        self._controller.refresh()
        handles = {}
        for operator in self._graph.operators:
            running = [i for i in self._controller.running() if operator_of(i) == operator]
            counts = Counter(map(site_of, running))
            if counts.pop(site, 0):
                handles[operator] = self.scale(operator, dict(counts) or {parent: 1}, strategy)
        for handle in handles.values():
            handle.wait()
        return list(handles)

    def set_standby(self, instance: str, standby: str) -> None:
        running = sorted(self._controller.running())
        for name in (instance, standby) if standby else (instance,):
            if name not in running:
                raise UserError(f"{name!r} does not run", expected=f"one of: {', '.join(running)}")
        self._controller.set_standby(instance, standby)

    def recover(self, instance: str, over: int) -> list[str]:
        """Successors take over from a dead instance; returns their names when all of them work."""
        operator = operator_of(instance)
        self._check_operator(operator)
        check_whole("over", over, 1)
        if instance not in self._supervisor.names:
            known = ", ".join(n for n in self._supervisor.names if operator_of(n) == operator)
            raise UserError(f"unknown instance {instance!r}", expected=f"one of: {known}")
        check_slots(self._backend, over - 1, running=running_processes(self._backend.application), reserved=1)
        taken = {*self._supervisor.names, *self._supervisor.submissions}
        names = (instance_name(operator, site_of(instance), n) for n in count(1))
        successors = tuple(islice((name for name in names if name not in taken), over))
        recovery = self._controller.recover(instance, successors)

        def done() -> bool:
            self._controller.check_runs()
            for name in set(successors) & set(self._supervisor.failures):
                raise could_not_start(name, self._supervisor.failures[name])
            return not self._controller.recovering(recovery)

        wait_until(done, math.inf)
        if not set(successors) <= set(self._supervisor.names):
            what = f"{instance} was not taken over: the controller failed before it stored the request"
            raise UserError(what, hint="the controller has restarted by itself; ask again")
        return list(successors)

    def drain(self, instance: str) -> MoveHandle:
        operator = operator_of(instance)
        if operator not in self._graph.operators:
            known = ", ".join(sorted(self._controller.running()))
            raise UserError(f"unknown instance {instance!r}", expected=f"one of: {known}")
        wanted = self.owners(operator, None, None, instance)
        others = [i for i in self._controller.running() if operator_of(i) == operator and i != instance]
        if not others:
            what = f"no other instance of {operator!r} runs"
            raise UserError(what, expected="one that takes its keys", hint="live.scale(...) first")
        by_slot, _ = self._controller.routes(operator)
        load = Counter(route.instance for route in by_slot.values())
        least_loaded = min(others, key=lambda i: (load[i], i))
        return self.move(operator, wanted, least_loaded, "live", 0, None)

    def _check_operator(self, operator: str) -> None:
        if operator not in self._graph.operators:
            known = ", ".join(sorted(self._graph.operators))
            raise UserError(f"unknown operator {operator!r}", expected=f"one of: {known}")
