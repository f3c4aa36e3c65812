"""Two sites, two Spark applications: keys move between them, a killed one comes back, strangers stay out."""

from __future__ import annotations

import secrets
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from oracle import until

import tiercel
from tiercel.chaos.sites.proxy import OPEN, LinkState, Proxy
from tiercel.chaos.sites.run import free_ports
from tiercel.chaos.sites.site_process import SiteProcess
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.sites.deployment_file import DeploymentFile
from tiercel.runtime.sites.remote import differences
from tiercel.runtime.sites.site_application import SiteApplication
from tiercel.spark.api.connect import RemoteClients

SITES = ("cloud", "edge")
CARS = [f"car-{n}" for n in range(20)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sites")
    (directory / "secret").write_bytes(secrets.token_bytes(32))
    cloud, edge, cloud_door, edge_door = free_ports(4)
    path = directory / "cars.toml"
    path.write_text(
        f"""
        name = "cars"
        secret_file = "secret"
        [sites.cloud]
        listen = "127.0.0.1:{cloud}"
        advertise = "127.0.0.1:{cloud_door}"
        [sites.edge]
        parent = "cloud"
        listen = "127.0.0.1:{edge}"
        advertise = "127.0.0.1:{edge_door}"
        """,
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def links(file: Path) -> Iterator[dict[str, Proxy]]:
    """The doors of the sites, which can be shut in one direction or in both."""
    facts = tomllib.loads(file.read_text(encoding="utf-8"))["sites"]
    ports = {site: [int(facts[site][end].split(":")[1]) for end in ("advertise", "listen")] for site in SITES}
    made = {site: Proxy(*ports[site]) for site in SITES}
    yield made
    for link in made.values():
        link.close()


@pytest.fixture(scope="module")
def sites(file: Path, links: dict[str, Proxy]) -> Iterator[dict[str, SiteProcess]]:
    started = {name: SiteProcess(file, name) for name in SITES}
    try:
        for site in started.values():
            assert site.read() == "deployed"
        yield started
    finally:
        for site in started.values():
            site.end()


def move(site: SiteProcess, keys: list[str], to: str, strategy: str) -> None:
    found = site.ask(do="move", keys=keys, to=to, strategy=strategy)
    assert isinstance(found, list), found
    assert all(" done after " in report for report in found), found


def connected(file: Path, site: str) -> RemoteClients:
    return tiercel.connect(address_of(file, site), secret=file.with_name("secret"))


def address_of(file: Path, site: str) -> str:
    address: str = tomllib.loads(file.read_text(encoding="utf-8"))["sites"][site]["listen"]
    return address


class Traffic:
    """Rows of all cars into one site, and the outputs as another site gives them."""

    def __init__(self, file: Path, enters: str, leaves: str, name: str) -> None:
        self.producer = connected(file, enters).producer("cars", name=name)
        self.subscriber = connected(file, leaves).subscribe("sums.out", after=0)
        self.sent = 0
        self.cars = CARS
        self.found: dict[str, list[tuple[int, int]]] = {car: [] for car in CARS}

    def send(self, rounds: int) -> None:
        for _ in range(rounds):
            self.sent += 1
            self.producer.send_many([(car, self.sent) for car in self.cars])

    def check(self) -> None:
        """Each car has each number once, in order, with the sum of all before it."""
        wanted = [(n, n * (n + 1) // 2) for n in range(1, self.sent + 1)]

        def complete() -> bool:
            for received in self.subscriber.poll(0.2):
                if received.row.car in self.found:
                    self.found[received.row.car].append((received.row.n, received.row.total))
            return all(len(rows) >= len(wanted) for rows in self.found.values())

        until(complete, lambda: f"outputs: { {car: len(rows) for car, rows in self.found.items()} }")
        assert all(rows == wanted for rows in self.found.values())

    def close(self) -> None:
        self.producer.close()
        self.subscriber.close()


def test_keys_move_between_applications_and_a_killed_application_comes_back(
    sites: dict[str, SiteProcess], file: Path
) -> None:
    cloud = sites["cloud"]
    traffic = Traffic(file, enters="edge", leaves="edge", name="gateway")
    try:
        traffic.send(20)
        move(cloud, CARS, "edge", "live")
        traffic.send(20)
        move(cloud, CARS, "cloud", "pause")
        traffic.send(20)
        move(cloud, CARS[:10], "edge", "live")
        traffic.send(20)
        traffic.check()
        owners = cloud.ask(do="owners", keys=CARS)
        assert owners == {car: f"sums@{'edge' if car in CARS[:10] else 'cloud'}#1" for car in CARS}

        sites["edge"].kill()
        assert cloud.ask(do="owners", keys=CARS) == owners, "a silent site blocks no question elsewhere"
        sites["edge"] = SiteProcess(file, "edge")
        traffic.send(20)  # the producer connects again by itself
        assert sites["edge"].read() == "deployed"
        traffic.check()
        cloud.ask(do="scale", instances={"cloud": 1, "edge": 2})
        traffic.send(20)
        traffic.check()
        assert "sums@edge#2" in cloud.ask(do="owners", keys=CARS).values()
    finally:
        traffic.close()
    refused = sites["edge"].ask(do="move", keys=CARS, to="cloud", strategy="live")
    assert "requests in the application of the root site 'cloud'" in refused["error"]


def test_policies_of_the_root_see_and_scale_the_application_of_another_site(
    sites: dict[str, SiteProcess], file: Path
) -> None:
    cloud = sites["cloud"]
    traffic = Traffic(file, enters="edge", leaves="cloud", name="second gateway")
    try:
        move(cloud, CARS, "edge", "pause")
        cloud.ask(do="autoscale", policy="rate", min={"*": 1, "edge": 3}, max=3, cool_down_s=1)

        def edge_seen() -> bool:
            traffic.send(20)
            view = cloud.ask(do="load")
            edge = view["sites"]["edge"]
            at_edge = [i for i in view["operators"]["sums"]["instances"] if "@edge#" in i["name"]]
            entering = view["operators"]["sums"]["entering"].get("edge", {})
            measured = edge.get("links", {}).get("cloud", [None])[0] is not None and edge["cores"]
            return bool(measured and entering.get("rate") and any(i.get("rate") for i in at_edge))

        until(edge_seen, lambda: f"the cloud does not see the edge: {cloud.ask(do='load')}")

        def grown() -> bool:
            traffic.send(20)
            view = cloud.ask(do="load")
            return len([i for i in view["operators"]["sums"]["instances"] if "@edge#" in i["name"]]) == 3

        until(grown, lambda: f"the edge does not grow: {cloud.ask(do='policies')}")
        assert any("the minimum at edge is 3" in line for line in cloud.ask(do="policies"))
        assert cloud.ask(do="load")["sites"]["edge"]["free_slots"] == 0, "as its own driver counts them"
        assert "requests in the application of the root site" in sites["edge"].ask(do="load")["error"]
    finally:
        traffic.close()


@pytest.mark.parametrize(
    ("strategy", "heard"),
    [
        ("restart", LinkState(toward=False)),
        ("restart", LinkState(back=False)),
        ("live", LinkState(toward=False)),
        pytest.param("live", LinkState(back=False), marks=pytest.mark.long),
        pytest.param("pause", LinkState(toward=False), marks=pytest.mark.long),
        pytest.param("pause", LinkState(back=False), marks=pytest.mark.long),
    ],
)
def test_a_move_beside_a_link_that_is_heard_one_way_only_ends_and_loses_nothing(
    sites: dict[str, SiteProcess], file: Path, links: dict[str, Proxy], strategy: str, heard: LinkState
) -> None:
    cloud = sites["cloud"]
    traffic = Traffic(file, enters="edge", leaves="cloud", name=f"stalled-{strategy}-{heard.toward}")
    cars = [f"{strategy}-{heard.toward}-{n}" for n in range(10)]
    traffic.cars, traffic.found = cars, {car: [] for car in cars}
    try:
        traffic.send(5)
        for to, door in (("edge", "cloud"), ("cloud", "edge")):
            cloud.send(do="move", keys=cars, to=to, strategy=strategy)
            links[door].set(heard)
            traffic.send(5)
            time.sleep(1.5)
            links[door].set(OPEN)
            answer = cloud.read()
            assert isinstance(answer, list) or "was undone" in answer["error"], answer
            traffic.send(5)
        traffic.check()
    finally:
        traffic.close()


def test_a_site_that_is_connected_and_does_not_answer_blocks_no_question(
    sites: dict[str, SiteProcess], links: dict[str, Proxy]
) -> None:
    links["cloud"].set(LinkState(toward=False))  # the edge has dialled the cloud: it is not heard any more
    links["edge"].set(LinkState(back=False))
    try:
        begun = time.monotonic()
        status = sites["cloud"].ask(do="status")
        assert status["silent"].keys() == {"edge"}
        assert time.monotonic() - begun < 15.0, "it is not waited for as long as one of our own"
    finally:
        for link in links.values():
            link.set(OPEN)
    until(lambda: sites["cloud"].ask(do="status")["silent"] == {}, lambda: "the edge is silent")


def test_a_site_leaves_with_all_its_keys_and_comes_back(sites: dict[str, SiteProcess], file: Path) -> None:
    cloud = sites["cloud"]
    cars = [f"parting-{n}" for n in range(10)]
    traffic = Traffic(file, enters="cloud", leaves="cloud", name="parting")
    traffic.cars, traffic.found = cars, {car: [] for car in cars}
    try:
        traffic.send(5)
        move(cloud, cars, "edge", "live")
        traffic.send(5)
        assert cloud.ask(do="leave", site="edge") == ["sums"]
        assert set(cloud.ask(do="owners", keys=cars).values()) == {"sums@cloud#1"}
        assert "is the root" in cloud.ask(do="leave", site="cloud")["error"]
        sites["edge"].end()
        traffic.send(5)
        traffic.check()
        sites["edge"] = SiteProcess(file, "edge")
        assert sites["edge"].read() == "deployed"
        cloud.ask(do="scale", instances={"cloud": 1, "edge": 1})
        move(cloud, cars, "edge", "live")
        traffic.send(5)
        traffic.check()
    finally:
        traffic.close()


def test_a_subscriber_at_an_edge_reads_there_what_the_edge_makes(
    sites: dict[str, SiteProcess], file: Path
) -> None:
    cars = [f"local-{n}" for n in range(5)]
    move(sites["cloud"], cars, "edge", "live")
    here = connected(file, "edge").subscribe("sums.out", site="edge")
    elsewhere = connected(file, "edge").subscribe("sums.out", site="cloud")
    with connected(file, "edge").producer("cars", name="local") as producer:
        here.poll(0.0)
        producer.send_many([(car, 7) for car in cars])
        found: list[str] = []

        def complete() -> bool:
            found.extend(row.row.car for row in here.poll(0.2) if row.row.car in cars)
            return len(found) >= len(cars)

        until(complete, lambda: f"at the edge: {found}")
        assert sorted(found) == cars
        assert not [row for row in elsewhere.poll(0.5) if row.row.car in cars]
    here.close()
    elsewhere.close()


@pytest.mark.usefixtures("sites")
def test_client_with_another_secret_or_a_wrong_address_is_told_so(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 32)
    address = address_of(file, "edge")
    with pytest.raises(tiercel.UserError, match="has another secret"):
        tiercel.connect(address, secret=tmp_path / "other")
    [closed] = free_ports(1)
    with pytest.raises(tiercel.UserError, match="no router of a deployment answers"):
        tiercel.connect(f"127.0.0.1:{closed}", secret=file.with_name("secret"), timeout_s=0.3)
    with pytest.raises(tiercel.UserError, match='expected: "host:port"'):
        tiercel.connect("127.0.0.1", secret=file.with_name("secret"))


@pytest.mark.usefixtures("sites")
def test_a_second_application_of_a_site_or_another_program_is_refused(file: Path, tmp_path: Path) -> None:
    again = SiteProcess(file, "edge")
    assert "is in use by the driver" in again.read()["error"]
    again.end()
    declared = connected(file, "cloud").deployment.manifest()
    assert differences(declared, declared) == []
    other = msgspec.structs.replace(
        declared,
        streams={name: facts for name, facts in declared.streams.items() if name != "cars/dead"},
        settings=msgspec.structs.replace(declared.settings, tick_ms=declared.settings.tick_ms + 1),
    )
    edge = SiteApplication(DeploymentFile.read(file), "edge")
    running = connected(file, "edge").deployment.manifest()
    with pytest.raises(tiercel.UserError, match=r"site 'edge' runs already .* with another storage"):
        edge.join(DeploymentDir(tmp_path), msgspec.structs.replace(running, id="another"))
    with pytest.raises(tiercel.UserError, match="operator 'sums' has other code here than there"):
        edge.join(DeploymentDir(tmp_path), msgspec.structs.replace(running, code={"sums": "changed"}))
    edge.join(DeploymentDir(tmp_path), running)
    found = "; ".join(differences(other, declared))
    assert "stream 'cars/dead' is declared there only" in found
    assert f"setting tick_ms: {declared.settings.tick_ms + 1} here" in found


def test_a_deployment_file_goes_with_a_site_and_not_with_other_addresses(file: Path) -> None:
    with pytest.raises(tiercel.UserError, match="without deployment="):
        tiercel.start(site="edge")
    with pytest.raises(tiercel.UserError, match="expected: one of: cloud, edge"):
        tiercel.start(deployment=file)
    with pytest.raises(tiercel.UserError, match="site 'edge-7' is not in the deployment file"):
        tiercel.start(deployment=file, site="edge-7")
    with pytest.raises(tiercel.UserError, match="bind, ports, advertise or tls beside deployment="):
        tiercel.start(deployment=file, site="edge", bind="0.0.0.0")
