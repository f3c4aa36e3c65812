"""Bad input of users: a clear error, while a neighbour deployment outputs each row once in order."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import CalendarIntervalType, StructType

import tiercel
from certificates import make_authority, needs_openssl, run
from tiercel import UserError
from tiercel.bench.operators import INPUT, OUTPUT_SCHEMA, NumberedAverage
from tiercel.chaos.outages import check_ours
from tiercel.chaos.steady_traffic import OPERATOR, Traffic, declare
from tiercel.runtime.config import Listening
from tiercel.runtime.net.wire import FRAME_BYTES_MAX
from tiercel.spark.api.deployment import Live

ROWS = "car string, seq long"


class Neighbour:
    """The deployment that everything here must leave alone."""

    def __init__(self, live: Live, traffic: Traffic, streams: tuple[Any, Any]) -> None:
        self.live, self.traffic = live, traffic
        self.readings, self.averages = streams


@pytest.fixture(scope="module")
def neighbour(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Neighbour]:
    storage = tmp_path_factory.mktemp("neighbour") / "storage"
    with tiercel.start(spark, ["cloud", "edge"], storage) as live:
        streams = declare(live, instances={"cloud": 1, "edge": 1})
        traffic = Traffic(*streams)
        incarnations = {found.name: found.incarnation for found in live.status().processes}
        yield Neighbour(live, traffic, streams)
        traffic.go_on()
        traffic.finish()
        assert {
            found.name: found.incarnation for found in live.status().processes
        } == incarnations  # nothing was restarted
        assert live.status().moves == {}


def says(refused: Callable[[], Any], *parts: str) -> None:
    """As `mentions`, and also what was expected and what to do: for all that people get wrong most."""
    message = mentions(refused, *parts)
    for part in ("\nexpected: ", "\nhint: "):
        assert message.count(part) == 1, message


def mentions(refused: Callable[[], Any], *parts: str) -> str:
    """A user's error, whose message has these parts, and nothing of Python's or Java's insides."""
    with pytest.raises(UserError) as caught:
        refused()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert "Traceback" not in message
    assert "\tat " not in message
    return message


class Count(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            n = (self.n.get() or (0,))[0] + 1
            self.n.update((n,))
            yield self.output(key[0], row.seq, n)

    def output(self, car: str, seq: int, n: int) -> Row:
        return Row(car=car, n=n)

    def close(self) -> None:
        pass


# -- declaring ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(spark: SparkSession, neighbour: Neighbour) -> Live:
    """One that is only declared: nothing runs, and there is nothing to end."""
    return tiercel.start(spark, ["cloud", "edge"])


def test_invalid_schemas_are_refused(fresh: Live) -> None:
    says(lambda: fresh.stream("a", "car strin, seq long", key="car"), "'a'", "strin")
    says(lambda: fresh.stream("a", "car string, , seq", key="car"), "'a'", "expected")
    says(lambda: fresh.stream("a", 7, key="car"), "7", "StructType")  # type: ignore[arg-type]
    says(lambda: fresh.stream("a", "int", key="car"), "expected")
    says(lambda: fresh.stream("a", "", key="car"), "expected")
    interval = StructType().add("car", "string").add("gap", CalendarIntervalType())
    says(lambda: fresh.stream("a", interval, key="car"), "gap", "interval")
    says(lambda: fresh.stream("a", "car string, v variant", key="car"), "v", "variant")
    cars = fresh.stream("schemas", ROWS, key="car")
    says(lambda: cars.transform_with_state(Count(), "car strin"), "strin")
    says(lambda: cars.map(lambda row: row, "car strin"), "strin")


def test_invalid_key_columns_are_refused(fresh: Live) -> None:
    says(lambda: fresh.stream("b", ROWS, key="bus"), "'bus'", "car, seq")
    says(lambda: fresh.stream("b", ROWS, key=()), "'b'", "key='column'")
    says(lambda: fresh.stream("b", ROWS, key=None), "'b'", "key='column'")  # type: ignore[arg-type]
    says(lambda: fresh.stream("b", "car map<string,int>", key="car"), "car", "without maps")
    says(lambda: fresh.stream("b", ROWS, key="car", event_time="seq"), "'seq'", "timestamp")
    mentions(
        lambda: fresh.stream("b", "at timestamp", key="at", event_time="at", delay=-1), "-1", "10 seconds"
    )
    mentions(
        lambda: fresh.stream("b", "at timestamp", key="at", event_time="at", idle="soon"), "soon", "10 sec"
    )
    mentions(
        lambda: fresh.stream("b", "at timestamp", key="at", event_time="at", idle=0), "idle = 0", "above 0"
    )
    mentions(lambda: fresh.stream("b", "at timestamp", key="at", idle=3), "idle = 3", "event_time")
    cars = fresh.stream("keys", ROWS, key="car")
    says(lambda: cars.key_by("bus"), "'bus'", "car, seq")
    mentions(lambda: fresh.stream("keys", ROWS, key="car"), "'keys'", "twice")
    mentions(lambda: fresh.stream("a|b", ROWS, key="car"), "a|b", "without any of")


def test_invalid_processors_are_refused(fresh: Live) -> None:
    cars = fresh.stream("processors", ROWS, key="car")

    class Duck:
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            return iter(())

    class NoInit(StatefulProcessor):
        init = None  # type: ignore[assignment]
        handleInputRows = Count.handleInputRows

    class Raises(Count):
        def init(self, handle: Any) -> None:
            raise ZeroDivisionError("no luck")

    class Locked(Count):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    def give(processor: Any, **options: Any) -> Callable[[], Any]:
        return lambda: cars.transform_with_state(processor, "car string, n long", **options)

    says(give(Duck()), "Duck", "StatefulProcessor", "derive")
    says(give(Count), "Count is a class", "Count()")
    says(give(NoInit()), "init of NoInit", "declares state")
    says(give(Raises()), "init of Raises", "ZeroDivisionError: no luck")
    says(give(Locked()), "Locked", "pickle")
    mentions(give(Count(), time_mode="later"), "'later'", "processingTime")
    mentions(give(Count(), on_error="ignore"), "'ignore'", "dead-letter")
    mentions(give(Count(), time_mode="eventTime"), "event time", "processors")
    says(give(Count(), output_key="bus"), "'bus'", "car, n")


def test_invalid_folds_are_refused(fresh: Live) -> None:
    cars = fresh.stream("folds", ROWS, key="car")
    lock = threading.Lock()

    def fold(step: Any = lambda n, row: (n, None), initial: Any = (0,), **options: Any) -> Callable[[], Any]:
        options = {"state_schema": "n long"} | options
        return lambda: cars.fold(step, initial, "car string, n long", **options)

    mentions(fold(step="count"), "fold('count')", "function")
    mentions(fold(step=lambda n, row: (lock, None)), "Fold", "pickle")
    mentions(fold(initial=("x",)), "initial.n", "'x'")
    mentions(fold(initial=0), "initial", "0 (int)")
    says(fold(state_schema="n lon"), "lon")
    mentions(fold(pandas=True), "'pandas'", "instances")
    mentions(fold(time_mode="eventTime"), "'time_mode'", "instances")
    mentions(fold(on_error="ignore"), "'ignore'", "dead-letter")
    written = tiercel.Fold(lambda n, row: (n, None), (0,), "n long", "car string, n long")
    mentions(
        lambda: cars.transform_with_state(written, "car string, n long", time_mode="processingTime"),
        "is a fold",
        "StatefulProcessor",
    )


def test_invalid_numbers_and_sites_are_refused(spark: SparkSession, fresh: Live) -> None:
    cars = fresh.stream("numbers", ROWS, key="car")

    def give(**options: Any) -> Callable[[], Any]:
        return lambda: cars.transform_with_state(Count(), "car string, n long", name="numbered", **options)

    mentions(give(instances={"cloud": -1}), "-1", "0 or more")
    mentions(give(instances={"cloud": 0}), "at least one")
    mentions(give(instances={"cloud": 1.5}), "1.5", "whole number")
    mentions(give(instances=3), "3", '{"cloud": 2}')
    says(give(instances={"mars": 1}), "'mars'", "cloud, edge")
    mentions(give(slots=-4), "-4", "slots")
    mentions(give(retries=-1), "-1", "retries")
    mentions(lambda: tiercel.start(spark, []), "site", '["cloud"]')
    mentions(lambda: tiercel.start(spark, {"edge": "cloud"}), "'cloud'", "'edge'")
    mentions(lambda: tiercel.start(spark, ["a@b"]), "a@b")
    mentions(lambda: tiercel.start(spark, durability="paper"), "paper", "os, disk, replica")  # type: ignore[arg-type]
    mentions(lambda: tiercel.start(spark, settings=tiercel.Settings(tick_ms=-1)), "tick_ms", "-1", "above 0")
    says(lambda: tiercel.start(spark, ["cloud"], ports={"mars": 1}), "'mars'", "cloud")
    mentions(lambda: tiercel.start(spark, ["cloud"], ports={"cloud": 70_000}), "70000", "65535")
    says(lambda: tiercel.start(spark, ["cloud"], advertise={"mars": "10.0.0.5"}), "'mars'", "cloud")
    mentions(lambda: tiercel.start(spark, ["cloud"], advertise={"cloud": "0.0.0.0"}), "'0.0.0.0'", "can dial")
    mentions(fresh.deploy, "no operator", "transform_with_state")


@needs_openssl
def test_unusable_tls_files_are_refused(spark: SparkSession, neighbour: Neighbour, tmp_path: Path) -> None:
    ours, others = (msgspec.structs.asdict(make_authority(tmp_path / name)) for name in ("ours", "others"))
    run("openssl ec -in ours/member.key -aes128 -passout pass:x -out locked.key", tmp_path)
    sign = "openssl x509 -req -in ours/member.csr -CA ours/authority.pem -CAkey ours/authority.key"
    run(f"{sign} -days -1 -out expired.pem", tmp_path)
    run(f"echo extendedKeyUsage=serverAuth > usage; {sign} -extfile usage -out server.pem", tmp_path)

    def give(tls: Any = None, **others: Any) -> Callable[[], Any]:
        return lambda: tiercel.start(spark, ["cloud"], tmp_path / "storage", tls=tls or ours | others)

    names = "certificate, key, authority"
    guide = "Encrypted connections"
    says(give(tls=True), "tls = True", names, "False", guide)
    says(give(tls=ours["certificate"]), "member.pem", names, guide)
    says(give(tls={"key": ours["key"]}), "no 'certificate'", names, guide)
    says(give(password="x"), "unknown 'password'", names, guide)
    says(give(key=7), "key = 7", "path of a PEM file", guide)
    missing = str(tmp_path / "none.pem")
    for name in ours:
        says(give(**{name: missing}), f"{name} = {missing!r}", "No such file", "every machine", guide)
        says(give(**{name: str(tmp_path)}), f"{name} = {str(tmp_path)!r}", "Is a directory", guide)
        says(give(**{name: str(tmp_path / "usage")}), "TLS cannot use", "usage", "PEM files", guide)
    says(give(key=others["key"]), "others/member.key", "KEY_VALUES_MISMATCH", "its key", guide)
    says(give(key=str(tmp_path / "locked.key")), "locked.key", "without a passphrase", guide)
    says(give(authority=others["authority"]), "others/authority.pem", "would not accept", "has signed", guide)
    says(give(certificate=str(tmp_path / "expired.pem")), "expired.pem", "has expired", "valid now", guide)
    says(give(certificate=str(tmp_path / "server.pem")), "server.pem", "purpose", "for clients and", guide)
    assert not (tmp_path / "storage").exists()


@needs_openssl
def test_stored_tls_files_are_checked_at_each_start_and_can_be_removed(
    spark: SparkSession, neighbour: Neighbour, tmp_path: Path
) -> None:
    files = make_authority(tmp_path / "ours")
    storage = tmp_path / "storage"
    storage.mkdir()
    for name in ("instances.json", "secret"):
        shutil.copy(neighbour.live.deployment.directory / name, storage)
    before = msgspec.structs.replace(neighbour.live.deployment.manifest(), tls=files)
    (storage / "deployment.json").write_bytes(msgspec.json.encode(before))
    Path(files.key).unlink()
    live = tiercel.start(spark, ["cloud", "edge"], storage)
    declare(live, instances={"cloud": 1, "edge": 1})
    says(live.deploy, "key = ", "member.key", "No such file", "Encrypted connections")
    assert live.deployment.manifest() == before
    live.stop()
    without = Listening.of("127.0.0.1", None, None, False, {"cloud": None})
    assert without.applied("", before).tls is None


def test_dataframes_with_other_columns_are_refused(spark: SparkSession, fresh: Live) -> None:
    cars = fresh.stream("frames", ROWS, key="car")
    rate = spark.readStream.format("rate").load()
    says(lambda: cars.feed(rate), "'frames'", "car, seq", "timestamp, value")
    says(lambda: cars.feed(rate.selectExpr("'a' car", "timestamp seq")), "seq is timestamp, not bigint")
    says(lambda: cars.feed(spark.range(1).selectExpr("'a' car", "id seq")), "not a streaming", "readStream")
    fitting = rate.selectExpr("'a' car", "value seq")
    mentions(lambda: cars.feed(fitting, partitions=0), "partitions: 0", "1 or more")
    says(lambda: cars.feed(fitting, site="mars"), "'mars'", "cloud, edge")


# -- a deployment that runs -----------------------------------------------------------------------


def test_batch_with_an_invalid_row_is_refused_as_a_whole(neighbour: Neighbour) -> None:
    with neighbour.readings.producer("misfit") as producer:
        good = (10**6, 0, 0, 1.0)
        mentions(lambda: producer.send(good, ("x", 0, 0, 1.0)), "sensor", "'x'", "bigint")
        mentions(lambda: producer.send({"sensor": 1}), "n is missing", "sensor")
        mentions(lambda: producer.send((1, 2)), "2 values", "4: sensor, n, due_ns, value")
        mentions(lambda: producer.send((2**63, 0, 0, 1.0)), "sensor", "9223372036854775808")
        mentions(
            lambda: producer.send({"sensor": 1, "n": 0, "due_ns": 0, "value": 1.0, "x": 1}),
            "unknown column x",
        )
        mentions(lambda: producer.send("sensor"), "'sensor'", "a dict")
        assert producer.client.submitted == 0


def test_unknown_names_are_refused(neighbour: Neighbour) -> None:
    live, readings = neighbour.live, neighbour.readings
    for refused in (
        lambda: readings.producer("elsewhere", site="mars"),
        lambda: live.move(OPERATOR, keys=[1], to="mars"),
        lambda: live.scale(OPERATOR, {"mars": 1}),
        lambda: tiercel.Producer(live.deployment, INPUT, name="elsewhere", site="mars"),
    ):
        says(refused, "'mars'", "cloud, edge")
    mentions(lambda: live.move("avrage", keys=[1], to="edge"), "'avrage'", OPERATOR)
    mentions(lambda: live.scale("avrage", {"cloud": 1}), "'avrage'", OPERATOR)
    mentions(lambda: live.move(OPERATOR, keys=[1], to=f"{OPERATOR}@cloud#9"), "#9", f"{OPERATOR}@cloud#1")
    mentions(lambda: live.move(OPERATOR, source="cloud", to="edge"), "'cloud'", f"{OPERATOR}@cloud#1")
    mentions(lambda: live.move(OPERATOR, source=f"{OPERATOR}@cloud#9", to="edge"), "#9", "owns none")
    mentions(lambda: live.move(OPERATOR, keys=[1], to="edge", strategy="magic"), "'magic'", "live")
    mentions(lambda: live.drain("average"), "'average'", f"{OPERATOR}@cloud#1")
    mentions(lambda: tiercel.Producer(live.deployment, "nothing", name="x"), "'nothing'", INPUT)
    mentions(lambda: tiercel.Subscriber(live.deployment, "nothing"), "'nothing'", f"{OPERATOR}.out")
    mentions(lambda: tiercel.Producer(live.deployment, f"{OPERATOR}.out", name="x"), OPERATOR)
    mentions(lambda: neighbour.averages.producer("x"), f"{OPERATOR}.out", "live.stream")
    for of in (readings.filter(bool), readings.dead_letters, neighbour.averages.dead_letters):
        mentions(lambda of=of: of.dead_letters, of.name, "the output of an operator")  # type: ignore[misc]
    mentions(lambda: readings.dead_letters.producer("x"), f"{INPUT}/dead", "which a feed writes")
    mentions(
        lambda: tiercel.Producer(live.deployment, f"{INPUT}/dead", name="x"), f"the feeds of '{INPUT}'", INPUT
    )
    mentions(lambda: readings.producer("cloud"), "'cloud'", "name")
    missing = live.deployment.directory / "nowhere"
    says(lambda: tiercel.Producer(missing, INPUT, name="x"), str(missing), "storage")  # type: ignore[arg-type]


def test_invalid_moves_are_refused(neighbour: Neighbour) -> None:
    live = neighbour.live

    def move(**options: Any) -> Callable[[], Any]:
        return lambda: live.move(OPERATOR, to="edge", **options)

    mentions(move(), "keys=, slots= or source=")
    mentions(move(keys=[]), "at least one")
    mentions(move(keys="car"), "keys='car'", "keys=['car']")
    mentions(move(keys=7), "keys=7", "keys=[7]")
    mentions(move(keys=["car"]), "sensor", "'car'", "bigint")
    mentions(move(keys=[(1, 2)]), "2 columns", "sensor")
    mentions(move(slots=[-1]), "-1", "0 to 4095")
    mentions(move(slots=[4096]), "4096", "0 to 4095")
    mentions(move(keys=[1], slots=[1]), "one of them")
    mentions(move(keys=[1], retries=-1, source=""), "-1", "retries")
    mentions(move(keys=[1], deadline_s=-1), "-1000", "deadline")
    mentions(lambda: live.scale(OPERATOR, {"cloud": -1}), "-1", "0 or more")
    mentions(lambda: live.scale(OPERATOR, {"cloud": 0}), "at least one")
    mentions(lambda: live.scale(OPERATOR, 3), "3", '{"cloud": 2}')  # type: ignore[arg-type]
    mentions(lambda: live.scale(OPERATOR, {"cloud": 1}, strategy="magic"), "'magic'", "live")
    mentions(lambda: neighbour.averages.subscribe(after=-1), "-1")


def test_move_of_a_key_to_its_owner_does_nothing(neighbour: Neighbour) -> None:
    """No error: who asks for what is so already has what they asked for."""
    live = neighbour.live
    owner = live.owners(OPERATOR, [1])[1]
    moving = live.move(OPERATOR, keys=[1], to=owner)
    assert moving.wait() == []
    assert str(moving) == moving.progress() == "nothing to move"


def test_declaring_after_the_start_is_refused(neighbour: Neighbour) -> None:
    live, readings = neighbour.live, neighbour.readings
    mentions(lambda: live.stream("late", ROWS, key="car"), "runs already", "start again")
    mentions(
        lambda: readings.transform_with_state(NumberedAverage(), OUTPUT_SCHEMA, name="late"), "runs already"
    )
    mentions(lambda: readings.filter(bool).subscribe(), "runs already")


def test_too_few_task_slots_are_refused_before_anything_starts(
    spark: SparkSession, neighbour: Neighbour, tmp_path: Path
) -> None:
    says(lambda: neighbour.live.scale(OPERATOR, {"cloud": 40}), "task slots", "tiercel.session(slots=")
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        declare(live, instances={"cloud": 10})  # there would be room, but for the other deployment
        says(
            live.deploy,
            "11 routers, replicas and instances",
            "4 run already",
            "has 16",
            "tiercel.session(slots=17)",
        )
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        declare(live, instances={"cloud": 40})
        says(live.deploy, "41 routers, replicas and instances", "has 16", "tiercel.session(slots=47)")
    assert not (tmp_path / "storage" / "deployment.json").exists()


# -- storage ----------------------------------------------------------------------------------------


def test_storage_in_use_is_refused_in_this_and_in_another_process(
    spark: SparkSession, neighbour: Neighbour
) -> None:
    storage = neighbour.live.deployment.directory
    second = tiercel.start(spark, ["cloud", "edge"], storage)
    declare(second, instances={"cloud": 1, "edge": 1})
    says(second.deploy, str(storage), str(os.getpid()), "one driver at a time")
    second.stop()  # does not end the first
    program = (
        "import sys; from tiercel.runtime.deployment import DriverLock\n"
        "from tiercel.runtime.deployment import DeploymentDir\n"
        "from tiercel import UserError\n"
        "try: DriverLock(DeploymentDir(sys.argv[1]))\n"
        "except UserError as error: print(error)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, storage], capture_output=True, text=True, check=True
    )
    assert f"in use by the driver with pid {os.getpid()}" in other.stdout


def test_unwritable_storage_is_refused(spark: SparkSession, neighbour: Neighbour, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("I was here first", encoding="ascii")
    for storage in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/tiercel")):
        live = tiercel.start(spark, ["cloud"], storage)
        declare(live)
        says(live.deploy, str(storage), "cannot be written", "storage=")
        live.stop()
    assert (tmp_path / "file").read_text(encoding="ascii") == "I was here first"


def test_storage_of_another_deployment_is_refused_and_unchanged(
    spark: SparkSession, neighbour: Neighbour, tmp_path: Path
) -> None:
    deployment = neighbour.live.deployment
    storage = tmp_path / "copy"
    storage.mkdir()
    for name in ("deployment.json", "instances.json", "secret"):
        shutil.copy(deployment.directory / name, storage)
    before = (storage / "deployment.json").read_bytes()

    def deploy(sites: list[str], schema: str, name: str = OPERATOR) -> Callable[[], Any]:
        live = tiercel.start(spark, sites, storage)
        rows = live.stream(INPUT, schema, key="sensor")
        rows.transform_with_state(NumberedAverage(), OUTPUT_SCHEMA, name=name, output_key=())
        return live.deploy

    same = "sensor bigint, n bigint, due_ns bigint, value double"
    sites = ["cloud", "edge"]
    says(deploy(["cloud"], same), "another deployment", "sites", "storage=")
    says(deploy(sites, same.replace("double", "float")), "another deployment", INPUT, "schema")
    says(deploy(sites, same, "mean"), "another deployment", OPERATOR)
    assert (storage / "deployment.json").read_bytes() == before
    (storage / "deployment.json").write_bytes(b"{not json")
    says(deploy(sites, same), "deployment.json", "cannot be read")
    manifest = json.loads(before) | {"format": 99}
    (storage / "deployment.json").write_bytes(msgspec.json.encode(manifest))
    says(deploy(sites, same), "format 99", "version")


# -- strangers --------------------------------------------------------------------------------------


def test_unauthenticated_connections_do_no_harm(neighbour: Neighbour) -> None:
    for name in ("cloud", f"{OPERATOR}@cloud#1"):
        address = neighbour.live.deployment.registry.find(name)
        assert address is not None
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(4096),
            (FRAME_BYTES_MAX + 1).to_bytes(4),
            b"\xff\xff\xff\xff" + bytes(100_000),
            (5).to_bytes(4) + b"\xc1\xc1\xc1\xc1\xc1",
        ):
            with socket.create_connection((address.host, address.port), timeout=30) as stranger:
                stranger.sendall(said)
                with pytest.raises((ConnectionError, StopIteration)):  # it hangs up
                    next(iter(lambda: stranger.recv(4096), b""))
    neighbour.traffic.go_on()


def test_client_with_another_secret_is_refused(neighbour: Neighbour, tmp_path: Path) -> None:
    storage = tmp_path / "copy"
    storage.mkdir()
    shutil.copy(neighbour.live.deployment.directory / "deployment.json", storage)
    shutil.copytree(neighbour.live.deployment.directory / "registry", storage / "registry")
    (storage / "secret").write_bytes(bytes(32))
    says(lambda: tiercel.Producer(str(storage), INPUT, name="spy"), "another secret", "not a copy")
    says(lambda: tiercel.Subscriber(str(storage), f"{OPERATOR}.out"), "another secret", "not a copy")


def test_start_on_a_used_port_names_the_port(
    spark: SparkSession, neighbour: Neighbour, tmp_path: Path
) -> None:
    address = neighbour.live.deployment.registry.find("cloud")
    assert address is not None
    live = tiercel.start(spark, ["cloud"], tmp_path / "storage", ports={"cloud": address.port})
    declare(live)
    says(
        live.deploy, "cloud could not be started", f"port {address.port}", "another process", "hint: end that"
    )
    says(live.status, "stopped", "start it again")


def test_router_listens_on_its_fixed_port_also_after_a_crash(spark: SparkSession, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tiercel.start(spark, ["cloud"], tmp_path / "storage", ports={"cloud": port}) as live:
        traffic = Traffic(*declare(live))
        traffic.go_on()
        first = live.deployment.registry.find("cloud")
        assert first is not None
        os.kill(check_ours(first.pid, [os.getpid()]), signal.SIGKILL)
        traffic.go_on()
        second = live.deployment.registry.find("cloud")
        assert second is not None
        assert (first.port, second.port, second.incarnation) == (port, port, 2)
        traffic.finish()


# -- user code that fails -------------------------------------------------------------------------


class Choosy(Count):
    """Raises on some rows, after it has changed state; gives others what does not fit."""

    def output(self, car: str, seq: int, n: int) -> Row:
        match seq % 10:
            case 3:
                raise LookupError(f"no luck with {seq}")
            case 5:
                return Row(car=car, n="many")
            case 7:
                return (car, n)  # type: ignore[return-value]
            case _:
                return Row(car=car, n=n)


class Flaky(Count):
    """Raises on a row until it has been tried three times; each try leaves a mark in a file."""

    def __init__(self, marks: Path) -> None:
        self.marks = marks

    def output(self, car: str, seq: int, n: int) -> Row:
        with self.marks.open("a", encoding="ascii") as file:
            file.write(".")
        tries = self.marks.stat().st_size
        if seq == 0 and tries < 3:
            raise ConnectionError("try again")
        return Row(car=car, n=n)


def read_all(stream: Any, count: int) -> list[Any]:
    found: list[Any] = []
    with stream.subscribe(after=0) as subscriber:
        while len(found) < count:
            found += subscriber.poll(1.0)
    return found


def test_rows_on_which_user_code_raises_become_dead_letters(
    spark: SparkSession, neighbour: Neighbour, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", ROWS, key="car")
        counts = cars.transform_with_state(Choosy(), "car string, n long", name="choosy")
        flaky = cars.transform_with_state(
            Flaky(marks), "car string, n long", name="flaky", on_error="retry", retries=5
        )
        again = cars.transform_with_state(
            Choosy(), "car string, n long", name="again", on_error="retry", retries=2
        )
        with cars.producer("p") as producer:
            producer.send_many([("a", seq) for seq in range(20)])
        letters = read_all(counts.dead_letters, 6)
        refused_again = read_all(again.dead_letters, 6)
        assert [letter.row for letter in refused_again] == [letter.row for letter in letters]
        assert [letter.row.reason for letter in letters] == [
            reason
            for seq, n in ((3, 6), (13, 13))  # the number that the refused row would have had
            for reason in (
                f"LookupError: no luck with {seq}",
                "BadRow: column n: 'many' (str)\nexpected: bigint\n"
                "hint: change the yielded rows, or the output schema",
                f"BadRow: output ('a', {n}) (tuple)\nexpected: a Row with the columns: car, n\n"
                "hint: yield Row(car=..., n=...)",
            )
        ]
        assert {tuple(letter.row.key) for letter in letters} == {tuple(counts.codec.key_of(("a", 0)))}
        assert all(letter.row.offset >= 1 for letter in letters)
        rows = [msgspec.msgpack.decode(msgspec.msgpack.decode(letter.row.row)) for letter in letters]
        assert rows == [["a", seq] for seq in (3, 5, 7, 13, 15, 17)]
        assert [found.row.n for found in read_all(counts, 14)] == list(range(1, 15))
        assert [found.row.n for found in read_all(flaky, 20)] == list(range(1, 21))
        assert read_all(flaky.dead_letters, 0) == []


def without_letters(storage: Path) -> None:
    """As a version that had no dead letters of feeds has left it."""
    path = storage / "deployment.json"
    manifest = json.loads(path.read_bytes())
    for streams in (manifest["streams"], manifest["topology"]["streams"]):
        assert streams.pop("cars/dead")
        for facts in streams.values():
            facts.pop("dead_letters_of", None)
            facts.pop("letters", None)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def test_invalid_rows_of_a_feed_become_dead_letters_also_on_older_storage(
    spark: SparkSession, neighbour: Neighbour, tmp_path: Path
) -> None:
    storage, schema = tmp_path / "storage", "car string not null, seq int"
    for older in (True, False):
        with tiercel.start(spark, ["cloud", "edge"], storage) as live:
            cars = live.stream("cars", schema, key="car")
            dotted = live.stream("cars.dead", ROWS, key="car")  # who has such a stream keeps it
            counts = cars.transform_with_state(Count(), "car string, n long", name="count")
            dotted.transform_with_state(Count(), "car string, n long", name="others")
            mentions(
                lambda cars=cars: cars.dead_letters.transform_with_state(Count(), ROWS),  # type: ignore[misc]
                "'cars/dead'",
                "dead_letters.subscribe()",
            )
            if older:
                with cars.producer("p") as producer:
                    producer.send(("a", 1))
            else:
                (tmp_path / "rows").mkdir()
                rows = [
                    {"car": "a", "seq": 2},
                    {"seq": 3},
                    {"car": "b", "seq": 1 << 40},
                    {"car": "a", "seq": 4},
                ]
                (tmp_path / "rows" / "1.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
                frame = spark.readStream.schema(ROWS).json(str(tmp_path / "rows"))
                feed = cars.feed(frame, name="trips", site="edge", trigger="availableNow")
                live.deploy()
                assert feed.wait(600)
                letters = read_all(cars.dead_letters, 2)
                query = (
                    cars.dead_letters.dataframe().writeStream.format("memory").queryName("letters").start()
                )
                query.processAllAvailable()
                query.stop()
            good = 1 if older else 3
            assert [found.row.n for found in read_all(counts, good)] == list(range(1, good + 1))
        if older:
            without_letters(storage)
    key = cars.codec.key_of(("b", 0))
    expected = [
        ("column car: None (NoneType)\nexpected: string not null", None, 2, '{"car":null,"seq":3}'),
        (
            "column seq: 1099511627776 (int)\nexpected: int: -2147483648 to 2147483647",
            key,
            3,
            '{"car":"b","seq":1099511627776}',
        ),
    ]
    assert [tuple(found.row) for found in letters] == [(*letter, "trips", 0, 0) for letter in expected]
    assert [tuple(row) for row in spark.table("letters").collect()] == [tuple(found.row) for found in letters]
    assert len({found.id for found in letters}) == 2


def test_init_that_fails_on_executors_is_reported(
    spark: SparkSession, neighbour: Neighbour, tmp_path: Path
) -> None:
    class AtHome(Count):
        def __init__(self) -> None:
            self.home = os.getpid()

        def init(self, handle: Any) -> None:
            if os.getpid() != self.home:
                raise FileNotFoundError("model.bin")
            super().init(handle)

    live = tiercel.start(spark, ["cloud"], tmp_path / "storage")
    live.stream("cars", ROWS, key="car").transform_with_state(AtHome(), "car string, n long", name="homely")
    says(
        live.deploy,
        "homely@cloud#1",
        "init of AtHome failed",
        "FileNotFoundError: model.bin",
        "executors too",
    )


def test_operator_with_on_error_fail_stops_with_the_reason_and_resumes_with_fixed_code(
    spark: SparkSession, neighbour: Neighbour, tmp_path: Path
) -> None:
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", ROWS, key="car")
        cars.transform_with_state(Choosy(), "car string, n long", name="strict", on_error="fail")
        with cars.producer("p") as producer:
            producer.send_many([("a", seq) for seq in range(6)])
            producer.flush()
        while "strict@cloud#1" not in live.failures:
            time.sleep(0.1)
        status = live.status()
        failed = next(found for found in status.processes if found.name == "strict@cloud#1")
        assert failed.state == "failed"
        assert "operator strict failed at offset" in failed.reason
        assert "LookupError: no luck with 3" in failed.reason
        assert failed.reason in str(status)
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", ROWS, key="car")
        counts = cars.transform_with_state(Count(), "car string, n long", name="strict", on_error="fail")
        assert [found.row.n for found in read_all(counts, 6)] == list(range(1, 7))


# -- the end ----------------------------------------------------------------------------------------


def test_use_after_stop_is_refused(spark: SparkSession, neighbour: Neighbour, tmp_path: Path) -> None:
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", ROWS, key="car")
        counts = cars.transform_with_state(Count(), "car string, n long", name="count")
        producer, subscriber = cars.producer("p"), counts.subscribe()
        producer.send(("a", 1))  # and no flush: the end of the deployment waits for it
    assert not live.deployment.registry.names()
    for refused in (live.deploy, live.status, cars.dataframe, counts.subscribe, lambda: cars.producer("q")):
        says(refused, "stopped", "start it again")
    says(lambda: live.move("count", keys=["a"], to="cloud"), "stopped")
    says(lambda: live.stream("more", ROWS, key="car"), "stopped")
    says(lambda: producer.send(("a", 2)), "p is closed", "before its deployment ends")
    with contextlib.suppress(UserError):
        subscriber.poll()  # what had come before the end may still be taken
    says(subscriber.poll, "closed")
    live.stop()  # again, and nothing happens
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", ROWS, key="car")
        counts = cars.transform_with_state(Count(), "car string, n long", name="count")
        assert [tuple(found.row) for found in read_all(counts, 1)] == [("a", 1)]
