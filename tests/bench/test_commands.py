"""The commands of `tiercel bench`: their help, and what they refuse before anything starts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tiercel.cli import main as cli
from tiercel.cli.bench import bench

COMMANDS = (
    *("throughput", "latency", "reconfigure", "elastic", "idle", "recover"),
    *("memory", "checkpoint", "footprint", "app", "nexmark", "pipeline", "word-recovery", "largest-load"),
    *("offload", "skew", "soak", "gauges"),
    *("orders", "mobility", "transfer", "edge-footprint"),
)
RUNS = (*COMMANDS, "recover --sweep")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes as far as a measurement has refused nothing."""

    def measure(*options: object) -> None:
        pytest.fail("it was measured")

    modules = {
        "idle": "idle_overhead",
        "elastic": "elasticity.ramp",
        "offload": "elasticity.offload",
        "skew": "elasticity.skew",
        "soak": "elasticity.soak",
        "gauges": "elasticity.gauge_cost",
        "mobility": "mobility.drive",
        "edge-footprint": "mobility.edge_footprint",
        "app": "applications.app",
        "nexmark": "applications.nexmark",
        "word-recovery": "applications.word_recovery",
        "largest-load": "applications.largest_load",
        "orders": "transfer_orders",
    }
    for name in (*COMMANDS, "recover_sweep"):
        folder = "tiercel.bench" if name == "footprint" else "tiercel.bench.scenarios"
        module = import_module(f"{folder}.{modules.get(name, name)}")
        monkeypatch.setattr(module, "measure", measure)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error message for options that are refused."""
    code = cli.run_app(["bench", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert "Traceback" not in captured.err
    return captured.err


def test_list_of_benchmarks_is_complete() -> None:
    assert sorted(c.name or c.callback.__name__ for c in bench.registered_commands if c.callback) == sorted(
        COMMANDS
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_benchmark_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert cli.run_app(["bench", command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Example: tiercel bench {command}" in shown
    assert "--json" in shown
    assert "--out" in shown


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("mobility --modes fly", "unknown 'fly'"),
        ("mobility --cars 0", "--cars 0 is out of range"),
        ("mobility --probes 50 --cars 10", "--probes 50"),
        ("mobility --outputs-at mars", "unknown 'mars'"),
        ("mobility --vary weather --values 1", "unknown 'weather'"),
        ("mobility --vary latency --values many", "'many' is not a number"),
        ("transfer --state-mb 0", "--state-mb 0 is out of range"),
        ("transfer --strategies teleport", "unknown 'teleport'"),
        ("word-recovery --entries none", "'none' is not a number"),
        ("word-recovery --ways prayer", "unknown 'prayer'"),
        ("word-recovery --rate 0", "--rate 0 is out of range"),
        ("largest-load --limit 0", "--limit 0 is out of range"),
        ("largest-load --rate 10 --rate-max 5", "--rate 10 is out of range"),
        ("largest-load --app paint", "unknown application 'paint'"),
        ("largest-load --during explode", "unknown change 'explode'"),
        ("app --app paint", "unknown application 'paint'"),
        ("nexmark --queries q9", "unknown 'q9'"),
        ("nexmark --events 5", "--events 5 is out of range"),
        ("app --minutes 0", "seconds = 0"),
        ("app --rate 1000000000", "rate = 1,000,000,000"),
        ("app --during explode", "unknown change 'explode'"),
        ("app --set cars=0", "traffic: cars = '0'"),
        ("app --set cars", "--set 'cars'"),
        ("footprint --keys 0", "--keys 0 is out of range"),
        ("footprint --seconds 0", "--seconds 0 is out of range"),
        ("pipeline --keys none", "'none' is not a number"),
        ("pipeline --sink kafka", "unknown 'kafka'"),
        ("pipeline --rates 1", "--rates 1 is out of range"),
        ("pipeline --seconds 1", "--seconds 1 is out of range"),
        ("throughput --seconds 0", "--seconds 0 is out of range"),
        ("throughput --durability paper", "unknown 'paper'"),
        ("throughput --processors sum", "unknown 'sum'"),
        ("throughput --forms fold,lambda", "unknown 'lambda'"),
        ("throughput --spark-rows many", "'many' is not a number"),
        ("throughput --keys 1000,0", "--keys 0 is out of range"),
        ("throughput --spark-batches 0", "--spark-batches 0 is out of range"),
        ("latency --rates 0", "--rates 0 is out of range"),
        ("latency --rates 1000,,5", "'' is not a number"),
        ("latency --repeats 0", "--repeats 0 is out of range"),
        ("reconfigure --keys 1", "--keys 1 is out of range"),
        ("reconfigure --move 2000 --keys 1000", "--move 2000 is out of range"),
        ("reconfigure --state-bytes -1", "--state-bytes -1 is out of range"),
        ("reconfigure --strategies live,teleport", "unknown 'teleport'"),
        ("reconfigure --plant-stop -5", "--plant-stop -5 is out of range"),
        ("reconfigure --overload 1.2", "--overload needs to know what the source can process"),
        ("reconfigure --link 40,100", "--link between which sites?"),
        ("reconfigure --sites 2 --link 40,fast", "--link 40,fast"),
        ("reconfigure --sites 2 --link 40,1e9", "mbit = 1000000000.0"),
        ("reconfigure --workload key-count-zipf9", "--workload: unknown 'key-count-zipf9'"),
        ("reconfigure --rivals storm", "--rivals: unknown 'storm'"),
        ("reconfigure --flink-python python3", "--flink-python without Flink"),
        ("reconfigure --rivals flink-adaptive --flink-python /no/python", "no such program"),
        ("reconfigure --sweep cars=1,2", "--sweep cars=1,2"),
        ("reconfigure --sweep keys=many", "--sweep keys=many"),
        ("orders --units 12", "--units 12 is out of range"),
        ("orders --zipf steep", "--zipf 'steep'"),
        ("idle --pairs 0", "--pairs 0 is out of range"),
        ("idle --seconds nan", "--seconds nan is out of range"),
        ("recover --sizes 0", "--sizes 0 is out of range"),
        ("recover --sizes 1,large", "'large' is not a number"),
        ("recover --what driver", "--what: unknown 'driver'"),
        ("recover --local-disk maybe", "--local-disk: unknown 'maybe'"),
        ("recover --instances 0", "--instances 0 is out of range"),
        ("recover --instances 17", "--instances 17 is out of range"),
        ("recover --rate 0", "--rate 0 is out of range"),
        ("recover --read-mb-s -1", "--read-mb-s -1 is out of range"),
        ("recover --seed -1", "--seed -1 is out of range"),
        ("recover --sweep --sizes 0", "--sizes 0 is out of range"),
        ("recover --sweep --rate 0", "--rate 0 is out of range"),
        ("memory --state-mb 0", "--state-mb 0 is out of range"),
        ("memory --times 0.5", "--times 0.5 is out of range"),
        ("memory --state-bytes 8", "--state-bytes 8 is out of range"),
        ("memory --state-mb 1 --state-bytes 1000000", "--state-mb / --state-bytes 1 is out of range"),
        ("memory --rate 0", "--rate 0 is out of range"),
        ("memory --seconds nan", "--seconds nan is out of range"),
        ("memory --repeats 0", "--repeats 0 is out of range"),
        ("checkpoint --size 0", "--size 0 is out of range"),
        ("checkpoint --state-bytes 0", "--state-bytes 0 is out of range"),
        ("checkpoint --every 0", "--every 0 is out of range"),
        ("checkpoint --rate 0", "--rate 0 is out of range"),
        ("checkpoint --hot 0", "--hot 0 is out of range"),
        ("checkpoint --hot all", "'all' is not a number"),
        ("checkpoint --pairs 0", "--pairs 0 is out of range"),
        ("checkpoint --seconds nan", "--seconds nan is out of range"),
    ],
)
def test_invalid_options_are_refused_with_a_message(
    capsys: pytest.CaptureFixture[str], arguments: str, what: str
) -> None:
    assert what in refused(capsys, *arguments.split())


# -- where results go ------------------------------------------------------------------------------

# In /proc not even root can make a file or a directory.
PLACES = {
    "a file": "{file}",
    "below a file": "{file}/results",
    "no parent": "/proc/none/x",
    "nothing can be made there": "/proc/self",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("command", RUNS)
def test_unwritable_output_directory_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, place: str
) -> None:
    (tmp_path / "file").touch()
    out = place.format(file=tmp_path / "file")
    message = refused(capsys, *command.split(), "--out", out)
    assert f"cannot write to {out}: " in message
    assert "expected: a directory" in message
    assert "hint: give another directory: --out DIR" in message


@pytest.mark.parametrize("command", RUNS)
def test_missing_output_directory_is_created_and_left_empty(tmp_path: Path, command: str) -> None:
    out = tmp_path / "not" / "yet"
    with pytest.raises(pytest.fail.Exception, match="it was measured"):
        cli.run_app(["bench", *command.split(), "--out", str(out)])
    assert list(out.iterdir()) == []


def test_output_directory_lost_during_the_run_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The results are on stdout then."""
    out = tmp_path / "out"

    def measure(*options: object) -> list[dict[str, float]]:
        out.rmdir()
        out.touch()
        return [{"idle_ratio": 1.0}]

    monkeypatch.setattr("tiercel.bench.scenarios.idle_overhead.measure", measure)
    assert cli.run_app(["bench", "idle", "--json", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert '"idle_ratio": 1.0' in captured.out
    assert captured.err.endswith("hint: give another directory: --out DIR\n")
