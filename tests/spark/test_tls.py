"""A deployment with TLS through the public API: its rows pass, clients without a certificate do not."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from pathlib import Path

import msgspec
from oracle import until
from pyspark.sql import SparkSession

import tiercel
from certificates import make_authority, needs_openssl
from tiercel.bench.operators import INPUT
from tiercel.chaos.outages import check_ours
from tiercel.chaos.steady_traffic import KEYS, OPERATOR, Traffic, declare
from tiercel.runtime.net.connection import Answer, Opening
from tiercel.runtime.net.registry import Address
from tiercel.runtime.net.tls import TlsFiles
from tiercel.runtime.net.wire import pack
from tiercel.spark.api.deployment import Live

SITES = ["cloud", "edge"]
INSTANCES = {"cloud": 1, "edge": 1}
BY_JOB = 99  # a sensor that no traffic has
MEANT_WELL = pack(msgspec.msgpack.encode(Opening("somebody", b"n" * 32, 1)))


def answer_to(connection: socket.socket) -> bytes:
    """What a process says to an opening as its own members send it; nothing if it hangs up."""
    with connection, connection.makefile("rb") as file:
        connection.sendall(MEANT_WELL)
        return file.read(int.from_bytes(file.read(4)))


def dial(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=60)


def dial_tls(address: Address, tls: TlsFiles, *, shown: bool) -> socket.socket:
    context = ssl.create_default_context(cafile=tls.authority)
    context.check_hostname = False
    if shown:
        context.load_cert_chain(tls.certificate, tls.key)
    return context.wrap_socket(dial(address))


def is_answer(said: bytes) -> bool:
    try:
        return bool(msgspec.msgpack.decode(said, type=Answer).name)
    except msgspec.DecodeError:
        return False


def refused(dialled: socket.socket) -> bool:
    try:
        return not is_answer(answer_to(dialled))
    except OSError:  # of TLS or of the socket: it hangs up
        return True


def check_only_members_are_answered(live: Live, tls: TlsFiles, expected: set[str]) -> None:
    names = live.deployment.registry.names()
    assert expected <= set(names)
    for name in names:
        address = live.deployment.registry.find(name)
        assert address is not None
        assert address.local == ""  # no way around TLS
        assert is_answer(answer_to(dial_tls(address, tls, shown=True))), name
        assert refused(dial(address)), name
        assert refused(dial_tls(address, tls, shown=False)), name


@needs_openssl
def test_all_connections_use_tls_and_clients_without_certificate_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = make_authority(tmp_path / "ours")
    tls = {"certificate": files.certificate, "key": Path(files.key), "authority": files.authority}
    storage = tmp_path / "storage"
    everyone = {*SITES, f"{OPERATOR}@cloud#1", f"{OPERATOR}@edge#1"}
    with tiercel.start(spark, SITES, storage, durability="replica", tls=tls) as live:
        traffic = Traffic(*declare(live, instances=INSTANCES))
        traffic.go_on()
        check_only_members_are_answered(live, files, {*everyone, "controller"})
        moved = live.move(OPERATOR, keys=range(KEYS), to="edge").wait()
        assert moved
        assert set(live.owners(OPERATOR, range(KEYS)).values()) == {f"{OPERATOR}@edge#1"}
        before = live.deployment.registry.find(f"{OPERATOR}@edge#1")
        assert before is not None
        os.kill(check_ours(before.pid, [os.getpid()]), signal.SIGKILL)  # it asks its replica before it begins
        traffic.go_on()
        rounds = traffic.finish()

    with tiercel.start(spark, SITES, storage, durability="replica") as live:  # the storage remembers
        readings, averages = declare(live, instances=INSTANCES)
        assert live.deploy().deployment.manifest().tls == files
        traffic = Traffic(readings, averages, name="later", begin=rounds)
        traffic.go_on()
        check_only_members_are_answered(live, files, everyone)
        rounds = traffic.finish()
        rows = spark.range(5).selectExpr(f"{BY_JOB}L sensor", "id n", "0L due_ns", "1.0D value").coalesce(1)
        rows.write.format("tiercel").mode("append").options(storage=str(storage), stream=INPUT).save()
        kept = spark.read.format("tiercel").options(storage=str(storage), stream=averages.name).load()

        def found() -> dict[int, list[int]]:
            by_key: dict[int, list[int]] = {}
            for row in kept.collect():
                by_key.setdefault(row.sensor, []).append(row.n)
            return by_key

        expected = {**{key: list(range(rounds)) for key in range(KEYS)}, BY_JOB: list(range(5))}
        until(lambda: BY_JOB in found(), lambda: "what a job has written does not come out")
        assert found() == expected
