"""Runs the commands whose results the documents show, stores their output, and inserts it into the documents.

    python docs/measure.py core latency      run these commands and store their output in docs/measured/
    python docs/measure.py latency -- --repeats 2    the same with further options, which are stored too
    python docs/measure.py --fill            insert the stored output into the documents
    python docs/measure.py --check           fail if a document shows anything else than the stored output

Nobody types the text between `<!-- measured: NAME -->` or `<!-- file: PATH -->` and `<!-- end -->` in these
documents. `measured: headline` is the table of README.md: one figure of each of five benchmarks.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "docs" / "measured"
PICTURES = ROOT / "docs" / "pictures"
DRAWN = ROOT / "out" / "measured"  # commands draw there; the newest picture becomes docs/measured/NAME.png
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "apps.md")
TIERCEL = [sys.executable, "-m", "tiercel"]
NEXMARK = {f"q{n}": 200_000 for n in range(1, 9)} | {"q7-drrs": 100_000, "q8-drrs": 40_000}  # query -> events
SCALED = ("q3", "q5", "q8")
TOLL = {  # change -> rates: 1,700 a second are one expressway
    "none": (1_700, 6_800, 10_200, 13_600, 17_000),
    "scale": (6_800, 10_200),
    "restart": (6_800, 10_200),
}
APPLICATIONS = ("traffic", "toll", "nexmark", "wordcount", "keycount", "riot")
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "quickstart": ("python examples/quickstart.py", [sys.executable, "examples/quickstart.py"]),
    "demo": ("make demo", [*TIERCEL, "demo"]),
    "test": ("make test", ["make", "--silent", "test"]),
    "seeds": ("tiercel sim --seeds 5000", [*TIERCEL, "sim", "--seeds", "5000"]),
    "points": ("tiercel sim --points", [*TIERCEL, "sim", "--points"]),
    "mutants": ("tiercel sim --mutants", [*TIERCEL, "sim", "--mutants"]),
    "large": ("tiercel sim --large --json", [*TIERCEL, "sim", "--large", "--json"]),
    "fleet": ("tiercel sim --fleet --json", [*TIERCEL, "sim", "--fleet", "--json"]),
    "core": (
        "python -m tiercel.bench.scenarios.core_cost",
        [sys.executable, "-m", "tiercel.bench.scenarios.core_cost"],
    ),
    "throughput": (
        "tiercel bench throughput --keys 1000,100000 --json",
        [*TIERCEL, "bench", "throughput", "--keys", "1000,100000", "--json"],
    ),
    "latency": (
        "tiercel bench latency --durabilities os,disk,replica --json",
        [*TIERCEL, "bench", "latency", "--durabilities", "os,disk,replica", "--json"],
    ),
    "reconfigure": (
        "tiercel bench reconfigure --keys 1000 --state-bytes 1024 --move 1000 --rate 5000 --seconds 30 "
        "--repeats 5 --strategies live,pause,restart --seed 1 --json",
        [
            *(*TIERCEL, "bench", "reconfigure", "--keys", "1000", "--state-bytes", "1024", "--move", "1000"),
            *("--rate", "5000", "--seconds", "30", "--repeats", "5", "--strategies", "live,pause,restart"),
            *("--seed", "1", "--json"),
        ],
    ),
    "idle": ("tiercel bench idle --json", [*TIERCEL, "bench", "idle", "--json"]),
    "recover": (
        "tiercel bench recover --what worker --json",
        [*TIERCEL, "bench", "recover", "--what", "worker", "--json"],
    ),
    "deaths": (
        "tiercel bench recover --what executor,application --sizes 50 --instances 1 --json",
        [
            *(*TIERCEL, "bench", "recover", "--what", "executor,application", "--sizes", "50"),
            *("--instances", "1", "--json"),
        ],
    ),
    "sweep": (
        "tiercel bench recover --sweep --sizes 1 --rate 10000 --json",
        [*TIERCEL, "bench", "recover", "--sweep", "--sizes", "1", "--rate", "10000", "--json"],
    ),
    "traffic": (
        "tiercel bench app --app traffic --set cars=124000 --set segments=101 --set probes=20 --rate 4000 "
        "--minutes 1 --during none,half,segment,kill --json",
        [
            *(*TIERCEL, "bench", "app", "--app", "traffic", "--set", "cars=124000", "--set", "segments=101"),
            *("--set", "probes=20", "--rate", "4000", "--minutes", "1"),
            *("--during", "none,half,segment,kill", "--json"),
        ],
    ),
    **{
        f"apps_{name}": (
            f"tiercel app check --apps {name} --json",
            [*TIERCEL, "app", "check", "--apps", name, "--json"],
        )
        for name in APPLICATIONS
    },
    "words": ("tiercel bench word-recovery --json", [*TIERCEL, "bench", "word-recovery", "--json"]),
    **{
        name: (f"tiercel bench {line}", [*TIERCEL, "bench", *line.split()])
        for name, line in {
            **{
                f"toll_{during}_{rate}": (
                    f"largest-load --app toll --set expressways=0 --limit 5 --rate {rate} --rate-max {rate} "
                    f"--seconds 70 {'' if during == 'none' else f'--during {during} '}--steps 0 --json"
                )
                for during, rates in TOLL.items()
                for rate in rates
            },
            "traffic_closed": (
                "app --app traffic --set cars=124000 --set segments=101 --rate 0 --minutes 0.5 --during none "
                "--json"
            ),
            **{
                f"nexmark_{query}": f"nexmark --queries {query} --events {events} --json"
                for query, events in NEXMARK.items()
            },
            **{
                f"nexmark_scale_{query}": (
                    f"app --app nexmark --set query={query} --set speed=20 --rate 2000 --minutes 0.75 "
                    "--during none,scale,restart --json"
                )
                for query in SCALED
            },
            **{
                f"riot_{dataflow}_{dataset}": (
                    f"app --app riot --set dataflow={dataflow} --set dataset={dataset} --set tasks=chained "
                    f"--rate {rate} --minutes 0.4 --during none,move --json"
                )
                for dataset, rate in (("city", 7_000), ("taxi", 4_000))
                for dataflow in ("etl", "stats", "pred")
            },
        }.items()
    },
    **{
        name: (f"tiercel bench {line}", [*TIERCEL, "bench", *line.split(), "--out", str(DRAWN)])
        for name, line in {
            "orders": "orders --units 4,8 --zipf 0.5,1.5 --cases 50 --json",
            "strategies": (
                "reconfigure --keys 10000 --bytes-per-key 1024 --share 0.5 --seconds 12 --repeats 1 "
                "--strategies live,pause,restart,push,push-sorted,fetch,meces,bins,subscale,standby,replicate"
                " --json"
            ),
            "rivals": (  # `flink-python` on the path is a Python with apache-flink
                "reconfigure --keys 10000 --bytes-per-key 1024 --share 0.5 --seconds 12 --repeats 1 "
                "--strategies live,pause,restart --rivals all --flink-python flink-python --json"
            ),
            "link": (
                "reconfigure --keys 1000 --share 0.5 --rate 2000 --seconds 12 --repeats 3 "
                "--strategies live,pause --sites 2 --link 40,100 --json"
            ),
            "overload": (
                "reconfigure --keys 1000 --share 0.5 --service-us 1000 --overload 1.2 --warm 25 --seconds 30 "
                "--repeats 1 --strategies push,pause,fetch,bins --json"
            ),
            "standby_idle": "idle --standby --json",
            "gauges": "gauges --json",
            "elastic": "elastic --high 7000 --seconds 45 --json",
            "elastic_wordcount": (
                "elastic --app wordcount --modes fixed,rate,restart --high 7000 --seconds 45 --json"
            ),
            "elastic_toll": (
                "elastic --app toll --modes fixed,rate,restart --seconds 45 --low 200 --high 1700 "
                "--service-us 800 --json"
            ),
            "offload": "offload --json",
            "skew": "skew --json",
            "soak": "soak --minutes 3 --json",
            "mobility": "mobility --modes none,push,live,pause,standby,restart --outputs-at site --json",
            "mobility_latency": "mobility --modes push,live --vary latency --values 10,40,80,160 --json",
            "mobility_edges": "mobility --modes push,live --vary edges --values 2,4,6,8 --json",
            "mobility_keys": "mobility --modes push,live --vary keys --values 5,100,400 --json",
            "mobility_state": (
                "mobility --modes push,live --vary state --values 1024,16384,131072,1048576 "
                "--together 20 --json"
            ),
        }.items()
    },
    "policies": ("tiercel policy simulate --json", [*TIERCEL, "policy", "simulate", "--json"]),
    "checkpoint": ("tiercel bench checkpoint --json", [*TIERCEL, "bench", "checkpoint", "--json"]),
    "memory": ("tiercel bench memory --json", [*TIERCEL, "bench", "memory", "--json"]),
    "chaos": (
        "tiercel chaos --minutes 20 --seed 1 --durability replica --json",
        [*TIERCEL, "chaos", "--minutes", "20", "--seed", "1", "--durability", "replica", "--json"],
    ),
}
FEW_KEYS, MANY_KEYS = 1_000, 100_000  # of the throughput benchmark
RECOVERED = (
    "size_mb what local_disk instances tiercel_s spark_s ratio tiercel_normal_s spark_normal_s normal_ratio"
)
BENCHES = {  # the columns that the documents show; the stored file has all of them
    "throughput": (
        "keys processor form durability tiercel_events_per_s spark_events_per_s ratio "
        "spark_events_per_s_below_2s ratio_below_2s faults"
    ),
    "latency": "rate durability p50_ms p99_ms p999_ms max_ms echo_p50_ms echo_p99_ms",
    "reconfigure": (
        "strategy stoppage_p50_ms stoppage_p99_ms stoppage_max_ms floor_p99_ms others_p99_ms peak_ms "
        "duration_ms bytes_moved lost doubled reordered"
    ),
    **dict.fromkeys(
        ("strategies", "rivals", "link", "overload"),
        "strategy stoppage_p50_ms stoppage_p99_ms floor_p99_ms gap_ms gap_floor_ms peak_ms stabilise_ms "
        "duration_ms bytes_moved lost doubled reordered",
    ),
    "orders": "",
    "standby_idle": "",
    "idle": "",
    "recover": RECOVERED,
    "deaths": RECOVERED,
    "sweep": "how checkpoint_s replayed_s first_output_s normal_s steady_p99_ms",
    "memory": (
        "limit_mb load state_mb events_per_s cpu_us p50_ms p99_ms resident_mb hot_share read_back_per_s lost "
        "doubled wrong_state"
    ),
    "words": "",
    **dict.fromkeys(("gauges", "offload", "skew", "soak"), ""),
    "mobility": (
        "mode hand_overs interruption_p50_ms interruption_p99_ms floor_p99_ms duration_p50_ms home_p50_ms "
        "ancestor_p50_ms away_p50_ms away_share lost doubled reordered wrong_state"
    ),
    **dict.fromkeys(
        ("mobility_latency", "mobility_edges", "mobility_keys", "mobility_state"),
        "vary value strategy keys interruption_p50_ms interruption_p99_ms floor_p99_ms duration_p50_ms "
        "bytes_moved lost doubled reordered wrong_state",
    ),
    **dict.fromkeys(
        ("elastic", "elastic_wordcount", "elastic_toll"),
        "mode changes instances_max instance_seconds p50_ms p99_ms max_ms seconds_above_5_s "
        "until_first_keys_s until_first_output_s gap_ms gap_floor_ms lost doubled reordered wrong",
    ),
    "policies": (
        "trace policy changes turns load_turns flaps late_s longest_s instance_seconds "
        "oracle_instance_seconds oracle_changes unmoved_late_s"
    ),
    "checkpoint": (
        "hot_keys pair events_per_s without_events_per_s ratio p50_ms without_p50_ms p99_ms without_p99_ms"
    ),
}
APPS = ("traffic", "traffic_closed")
RIOT = tuple(name for name in COMMANDS if name.startswith("riot_"))
PHASES = ("before", "during", "after")
LINES_MAX = 40
LINES_SHOWN = {"mutants": 1, "test": 1, "points": 1, "seeds": 1}  # the last ones; the others are shown whole


def measure(name: str, further: list[str]) -> None:
    shown, command = COMMANDS[name]
    shown, command = " ".join([shown, *further]), [*command, *further]
    begun, begun_at = time.monotonic(), time.time()
    environment = {**os.environ, "COLUMNS": "110", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    took = time.monotonic() - begun
    if done.returncode:
        sys.exit(f"{shown} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    about = (
        f"{shown}: commit {commit.stdout.strip()}, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {took:.0f} s"
    )
    MEASURED.mkdir(exist_ok=True)
    (MEASURED / f"{name}.txt").write_text(f"{about}\n{done.stdout}", encoding="utf-8")
    drawn = sorted(DRAWN.glob("*.png"), key=lambda path: path.stat().st_mtime)
    if drawn and drawn[-1].stat().st_mtime > begun_at:
        shutil.copy(drawn[-1], MEASURED / f"{name}.png")
    print(about)


def block(name: str) -> str:
    """The part of a stored output that the documents show."""
    if name == "headline":
        return headline()
    if name in TABLES:
        return TABLES[name]()
    path = MEASURED / f"{name}.txt"
    if not path.exists():
        return "Not measured yet."
    about, *lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    if name in BENCHES:
        lines = bench_table(json.loads("\n".join(lines)), BENCHES[name].split())
    elif name in APPS:
        lines = app_tables(json.loads("\n".join(lines)))
    elif name == "large":
        lines = large_table(json.loads("\n".join(lines)))
    elif name == "chaos":
        lines = chaos_table(json.loads("\n".join(lines)))
    elif name in LINES_SHOWN:
        lines = [line for line in lines if line.strip()][-LINES_SHOWN[name] :]
    if len(lines) > LINES_MAX:
        sys.exit(f"{name}: {len(lines)} lines are too many; name the ones to show in BENCHES or LINES_SHOWN")
    body = "\n".join(line.rstrip() for line in lines)
    return f"```text\n{body}\n```\n\n<sub>{about}</sub>"


def bench_table(result: Any, columns: list[str]) -> list[str]:
    """One line per row of a benchmark, and the cores that other programs used during it."""
    result = {"rows": result} if isinstance(result, list) else result
    rows = result["rows"]
    assert isinstance(rows, list)
    columns = [name for name in columns if any(name in row for row in rows)] or list(rows[0])
    shown = [[_cell(row.get(column)) for column in columns] for row in rows]
    lines = aligned([columns, *shown])
    cpu = result.get("cpu")
    return (
        [*lines, f"cores used by other programs: {cpu['others_cores']}"] if isinstance(cpu, dict) else lines
    )


def app_tables(result: dict[str, Any]) -> list[str]:
    """The rows of an application, those of the same columns in one table, and its facts."""
    lines: list[str] = []
    for columns in dict.fromkeys(tuple(row) for row in result["rows"]):
        rows = [row for row in result["rows"] if tuple(row) == columns]
        lines += [*aligned([list(columns), *([_cell(row[c]) for c in columns] for row in rows)]), ""]
    facts = f"{result['keys']:,} keys, {result['bytes_per_key']:,} bytes of memory each"
    return [
        *lines,
        f"{result['events']:,} events, {result['events_per_s']:,} a second; {facts}",
        f"cores used by other programs: {result['cpu']['others_cores']}; {result['verdict']}",
    ]


def riot_table() -> str:
    """One line for each dataflow and dataset: the load, latency and jitter around a move, the verdict."""
    phases = [f"{phase}_{what}" for what in ("p50_ms", "p99_ms", "jitter_max") for phase in PHASES]

    def lines(result: dict[str, Any]) -> list[dict[str, Any]]:
        settings = result["settings"]
        facts = {name: settings[name] for name in ("dataflow", "dataset", "rate")}
        move = next(row for row in result["rows"] if row.get("during") == "move" and phases[0] in row)
        return [{**facts, "events_per_s": result["events_per_s"], **move, "faults": faults_of(result)}]

    return merged_table(
        list(RIOT), " ".join(["dataflow dataset rate events_per_s", *phases, "faults"]), lines
    )


def apps_table() -> str:
    """One line for each form of each application: what happened inside the run, and the oracle's verdict."""
    columns = "application options events move_s scale_s kill_s expected found faults"
    return merged_table([f"apps_{name}" for name in APPLICATIONS], columns, lambda result: result["rows"])


def toll_table() -> str:
    """One line for each rate, without and with a change."""

    def lines(result: dict[str, Any]) -> list[dict[str, Any]]:
        during = ", ".join(result["settings"]["during"]) or "none"
        return [{"during": during, **result["rows"][0]}]

    return merged_table(
        [f"toll_{during}_{rate}" for during, rates in TOLL.items() for rate in rates],
        "during rate load_factor cars events_per_s p99_ms max_ms faults holds",
        lines,
    )


def nexmark_table() -> str:
    """One line for each query."""
    return merged_table(
        [f"nexmark_{query}" for query in NEXMARK],
        "query tiercel_events_per_s spark_events_per_s ratio spark_batch spark_batch_s tiercel_other_run "
        "spark_other_run rows tiercel_faults spark_faults",
        lambda result: result["rows"],
    )


def nexmark_scale_table() -> str:
    """For each query a line at rest, of a live scale-out, of one by restart."""

    def lines(result: dict[str, Any]) -> list[dict[str, Any]]:
        judged = {row["during"]: row for row in result["rows"] if "max_ms" in row and "during" in row}
        faults = faults_of(result)
        query = result["settings"]["query"]
        phases = [row for row in result["rows"] if "before_p99_ms" in row]
        return [{"query": query, **judged[row["during"]], **row, "faults": faults} for row in phases]

    return merged_table(
        [f"nexmark_scale_{query}" for query in SCALED],
        "query during seconds before_p99_ms during_p99_ms after_p99_ms max_ms throughput_dip faults",
        lines,
    )


def faults_of(result: dict[str, Any]) -> int:
    kinds = ("lost", "doubled", "invented", "wrong", "reordered")
    return sum(row.get(kind) or 0 for row in result["rows"] for kind in kinds)


def merged_table(
    names: list[str], columns: str, lines: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> str:
    """Rows of several stored benchmarks in one table, and the command of each."""
    rows, commands = [columns.split()], []
    for name in names:
        path = MEASURED / f"{name}.txt"
        if not path.exists():
            continue
        about, text = path.read_text(encoding="utf-8").split("\n", 1)
        result = json.loads(text)
        rows += [[_cell(line.get(column)) for column in columns.split()] for line in lines(result)]
        cpu = result.get("cpu")
        others = f"; cores used by other programs: {cpu['others_cores']}" if cpu else ""
        commands.append(f"<sub>{about}{others}</sub>")
    if not commands:
        return "Not measured yet."
    body = "\n".join(aligned(rows))
    return f"```text\n{body}\n```\n\n" + "<br>\n".join(commands)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in table]


def large_table(result: dict[str, object]) -> list[str]:
    """One line per strategy out of the JSON of the large scenario."""
    rows = result["lines"]
    assert isinstance(rows, list)
    columns = list(rows[0])
    shown = [[f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    facts = (
        f"{result['sites']} sites, {result['keys']} keys, {result['moves']} moves, {result['rows']} rows: "
    )
    took = f"{result['virtual_s']} s of virtual time in {result['elapsed_s']:.0f} s"
    return [facts + took, *aligned([columns, *shown])]


def chaos_table(verdict: dict[str, Any]) -> list[str]:
    """Faults by kind, the number of them during moves, and the counts of the audit."""
    faults, met, audit = verdict["faults"], verdict["during_moves"], verdict["audit"]
    rows = [[kind, str(count), str(met[kind])] for kind, count in faults.items()]
    rows.append(["all", str(sum(faults.values())), str(sum(met.values()))])
    changes = ", ".join(f"{count} {how}" for how, count in sorted(verdict["changes"].items()))
    counted = ", ".join(f"{count:,} {what}" for what, count in audit.items())
    starts = f"{verdict['starts']} starts of the application"
    return [
        *aligned([["kind", "faults", "during a move"], *rows]),
        f"moves and scalings: {changes}; {starts}",
        counted,
    ]


TABLES = {
    "apps": apps_table,
    "toll": toll_table,
    "riot": riot_table,
    "nexmark": nexmark_table,
    "nexmark_scale": nexmark_scale_table,
}


def filled(text: str) -> str:
    measured = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    text = measured.sub(lambda m: f"{m[1]}\n{block(m[2])}\n\n{m[3]}", text)
    files = re.compile(r"(<!-- file: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return files.sub(lambda m: f"{m[1]}\n{source(m[2])}\n\n{m[3]}", text)


def source(path: str) -> str:
    """A Python file as the documents show it: without its docstring."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if text.startswith('"""'):
        text = text[text.index('"""', 3) + 3 :]
    return f"```python\n{text.strip()}\n```"


def measured_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a stored benchmark; none if it was not measured."""
    path = MEASURED / f"{name}.txt"
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8").split("\n", 1)[1])["rows"]
    return rows


def throughput_rows(keys: int) -> list[dict[str, Any]]:
    """The rows of the throughput benchmark with this number of keys."""
    return [row for row in measured_rows("throughput") if row.get("keys", FEW_KEYS) == keys]


def draw_overview() -> None:
    """The picture of README.md: the wait of a moved key, and events a second next to Spark."""
    moves, throughput = measured_rows("reconfigure"), throughput_rows(FEW_KEYS)
    if not throughput or not moves:
        return
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "tiercel", "font.size": 10, "axes.spines.top": False})
    import matplotlib.pyplot as plt

    ours, lighter, spark = "#0b6e4f", "#7fb8a4", "#c9720a"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.6))
    names = [f"{row['strategy']}" for row in moves]
    waits = [row["stoppage_p99_ms"] for row in moves]
    left.barh(names, waits, 0.55, color=[ours if name == "live" else lighter for name in names])
    for place, wait in enumerate(waits):
        left.text(wait * 1.15, place, f"{wait:,.1f} ms", va="center")
    left.set_xscale("log")
    left.set_xlim(0.5, max(waits) * 6)
    left.set_title("How long a key waits while it moves (p99, log scale)", fontsize=10, loc="left")
    bars = [("Spark transformWithState", throughput[-1]["spark_events_per_s"], spark)]
    bars += [(f"Tiercel, as a {row['form']}", row["tiercel_events_per_s"], ours) for row in throughput[-2:]]
    right.barh([bar[0] for bar in bars], [bar[1] for bar in bars], 0.55, color=[bar[2] for bar in bars])
    for place, (_, events, _) in enumerate(bars):
        right.text(events * 1.02, place, f"{events:,.0f}", va="center")
    right.set_xlim(0, max(bar[1] for bar in bars) * 1.25)
    right.set_xticks([])
    right.set_title("Events a second, running average per key", fontsize=10, loc="left")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines["right"].set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False, bottom=False, which="both", labelbottom=False)
    figure.tight_layout(w_pad=3)
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / "overview.svg", metadata={"Date": None})
    plt.close(figure)


def headline() -> str:
    """The table of README.md: five figures, each with a comparison and a case where Tiercel is worse."""
    throughput, many = throughput_rows(FEW_KEYS)[-2], throughput_rows(MANY_KEYS)[-2:-1]
    memory = {(row["limit_mb"] > 0, row["load"]): row for row in measured_rows("memory")}
    latency = {(row["rate"], row["durability"]): row for row in measured_rows("latency")}
    usual, on_disk = latency[10_000, "os"], latency[10_000, "disk"]
    moves = {row["strategy"]: row for row in measured_rows("reconfigure")}
    live, pause, restart = moves["live"], moves["pause"], moves["restart"]
    recover = {(r["size_mb"], r["local_disk"], r["instances"]): r for r in measured_rows("recover")}
    common, large = recover[50, True, 1], recover[500, False, 1]
    idle = measured_rows("idle")[-1]
    limited, unlimited = memory[True, "even"], memory[False, "even"]
    rows = [
        (
            "Throughput, running average per key",
            f"**{throughput['tiercel_events_per_s']:,} events/s**; Spark's own operator "
            f"{throughput['spark_events_per_s']:,}",
            f"with state four times larger than memory: {limited['events_per_s']:,} instead of "
            f"{unlimited['events_per_s']:,}",
        ),
        *[
            (
                f"The same with {MANY_KEYS:,} keys",
                f"**{row['tiercel_events_per_s']:,} events/s**; Spark's own operator "
                f"{row['spark_events_per_s']:,}",
                "rows of many keys in small frames cost more",
            )
            for row in many
        ],
        (
            "Latency at 10,000 rows/s, producer to subscriber",
            f"**p50 {usual['p50_ms']:.2f} ms, p99 {usual['p99_ms']:.2f} ms**; bare echo over the same hops "
            f"{usual['echo_p50_ms']:.2f} and {usual['echo_p99_ms']:.2f}",
            f'`durability="disk"`: p99 {on_disk["p99_ms"]:.1f} ms',
        ),
        (
            "Stoppage of a moved key, p99",
            f"**{live['stoppage_p99_ms']:.2f} ms** `live`; {pause['stoppage_p99_ms']:.0f} ms `pause`, "
            f"{restart['stoppage_p99_ms']:.0f} ms `restart`",
            f"the keys that stay wait too: {live['others_p99_ms']:.1f} ms; the move takes "
            f"{live['duration_ms']:.0f} ms",
        ),
        (
            "First output after `kill -9`, 50 MB of state",
            f"**{common['tiercel_s']:.2f} s**; Spark {common['spark_s']:.2f} s",
            f"500 MB, disk lost, one instance: latency is normal after {large['tiercel_normal_s']:.1f} s, "
            f"Spark's after {large['spark_normal_s']:.1f} s",
        ),
        (
            "Cost of migration support while nothing moves",
            f"**{idle['idle_ratio']:.2f}** of the throughput without it, median of "
            f"{len(measured_rows('idle')) - 1} pairs",
            f"single pairs between {min(r['idle_ratio'] for r in measured_rows('idle')):.2f} and "
            f"{max(r['idle_ratio'] for r in measured_rows('idle')):.2f}: the machine is noisy",
        ),
    ]
    return "\n".join(
        ["| | Tiercel, and the comparison | where it is worse |", "|---|---|---|"]
        + [f"| {what} | {figure} | {worse} |" for what, figure, worse in rows]
    )


def draw_sweep() -> None:
    """Recovery by checkpoint interval, by replay alone, and from the source."""
    rows = measured_rows("sweep")
    if rows:
        sys.path.insert(0, str(ROOT / "src"))
        from tiercel.bench.scenarios import recover_sweep

        recover_sweep.draw(rows, MEASURED / "recover-sweep.png")


def draw_large() -> None:
    """Stoppage by strategy in the large scenario, from the stored result."""
    path = MEASURED / "large.txt"
    if not path.exists():
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = json.loads(path.read_text(encoding="utf-8").split("\n", 1)[1])["lines"]
    figure, axes = plt.subplots(figsize=(7, 3.2))
    names = [row["strategy"] for row in rows]
    for offset, column in enumerate(("stoppage_p50_ms", "stoppage_p99_ms", "stoppage_max_ms")):
        heights = [row[column] or 0.0 for row in rows]
        axes.bar(
            [i + 0.26 * (offset - 1) for i in range(len(rows))],
            heights,
            0.25,
            label=column.removeprefix("stoppage_"),
        )
    axes.set_xticks(range(len(rows)), names)
    axes.set_ylabel("stoppage, ms (virtual clock)")
    axes.set_title("Stoppage of moved keys: 50 sites, 20,000 keys, 200 moves, simulated")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(MEASURED / "large.png", dpi=130)


def main() -> None:
    if "--check" in sys.argv:
        texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
        sys.exit(any(filled(text) != text for text in texts))
    given = sys.argv[1:]
    further = given[given.index("--") + 1 :] if "--" in given else []
    names = [a for a in given[: len(given) - len(further)] if not a.startswith("--")]
    unknown = [n for n in names if n not in COMMANDS]
    if unknown:
        print(f"unknown measurement {unknown[0]!r}; expected one of: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    for name in names:
        measure(name, further)
    if "--fill" in sys.argv:
        draw_large()
        draw_overview()
        draw_sweep()
        for document in DOCUMENTS:
            document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
