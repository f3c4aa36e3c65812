"""Runs the commands whose results the documents show, keeps what they print, and puts it into README.md.

    python docs/measure.py core latency      run these and keep their output under docs/measured/
    python docs/measure.py latency -- --repeats 2    the same with further options, which are kept with it
    python docs/measure.py --fill            write what is kept into README.md, draw the pictures beside it
    python docs/measure.py --check           fail if README.md shows anything else than what is kept

Nothing in README.md between `<!-- measured: NAME -->` or `<!-- file: PATH -->` and `<!-- end -->` is typed
by hand.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "measured"
TIERCEL = [sys.executable, "-m", "tiercel.cli"]
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "demo": ("make demo", [*TIERCEL, "demo"]),
    "test": ("make test", ["make", "--silent", "test"]),
    "seeds": ("tiercel sim --seeds 5000", [*TIERCEL, "sim", "--seeds", "5000"]),
    "points": ("tiercel sim --points", [*TIERCEL, "sim", "--points"]),
    "mutants": ("tiercel sim --mutants", [*TIERCEL, "sim", "--mutants"]),
    "large": ("tiercel sim --large --json", [*TIERCEL, "sim", "--large", "--json"]),
    "core": ("python -m tiercel.bench.core", [sys.executable, "-m", "tiercel.bench.core"]),
    "throughput": ("tiercel bench throughput --json", [*TIERCEL, "bench", "throughput", "--json"]),
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
    "checkpoint": ("tiercel bench checkpoint --json", [*TIERCEL, "bench", "checkpoint", "--json"]),
    "memory": ("tiercel bench memory --json", [*TIERCEL, "bench", "memory", "--json"]),
    "chaos": (
        "tiercel chaos --minutes 20 --seed 1 --durability replica --json",
        [*TIERCEL, "chaos", "--minutes", "20", "--seed", "1", "--durability", "replica", "--json"],
    ),
}
RECOVERED = (
    "size_mb what local_disk instances tiercel_s spark_s ratio tiercel_normal_s spark_normal_s normal_ratio"
)
BENCHES = {  # the columns of their rows that are shown; the kept file has all of them
    "throughput": (
        "processor form durability tiercel_events_per_s spark_events_per_s ratio spark_events_per_s_below_2s "
        "ratio_below_2s faults"
    ),
    "latency": "rate durability p50_ms p99_ms p999_ms max_ms echo_p50_ms echo_p99_ms",
    "reconfigure": (
        "strategy stoppage_p50_ms stoppage_p99_ms stoppage_max_ms floor_p99_ms others_p99_ms peak_ms "
        "duration_ms bytes_moved lost doubled reordered"
    ),
    "idle": "",
    "recover": RECOVERED,
    "deaths": RECOVERED,
    "sweep": "how checkpoint_s replayed_s first_output_s normal_s steady_p99_ms",
    "memory": (
        "limit_mb load state_mb events_per_s cpu_us p50_ms p99_ms resident_mb hot_share read_back_per_s lost "
        "doubled wrong_state"
    ),
    "checkpoint": (
        "hot_keys pair events_per_s without_events_per_s ratio p50_ms without_p50_ms p99_ms without_p99_ms"
    ),
}
LINES_MAX = 40
LINES_SHOWN = {"mutants": 1, "test": 1, "points": 1, "seeds": 1}  # the last ones; the others are shown whole


def measure(name: str, further: list[str]) -> None:
    shown, command = COMMANDS[name]
    shown, command = " ".join([shown, *further]), [*command, *further]
    begun = time.monotonic()
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
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.txt").write_text(f"{about}\n{done.stdout}", encoding="utf-8")
    print(about)


def block(name: str) -> str:
    """What README.md shows of a kept output."""
    path = KEPT / f"{name}.txt"
    if not path.exists():
        return "Not measured yet."
    about, *lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    if name in BENCHES:
        lines = bench_table(json.loads("\n".join(lines)), BENCHES[name].split())
    elif name == "large":
        lines = large_table(json.loads("\n".join(lines)))
    elif name == "chaos":
        lines = chaos_table(json.loads("\n".join(lines)))
    elif name in LINES_SHOWN:
        lines = [line for line in lines if line.strip()][-LINES_SHOWN[name] :]
    if len(lines) > LINES_MAX:
        sys.exit(
            f"{name}: {len(lines)} lines are no figure; say in BENCHES or LINES_SHOWN what is shown of it"
        )
    body = "\n".join(line.rstrip() for line in lines)
    return f"```text\n{body}\n```\n\n<sub>{about}</sub>"


def bench_table(result: dict[str, object], columns: list[str]) -> list[str]:
    """One line per row of a benchmark, and who else used the machine meanwhile."""
    rows = result["rows"]
    assert isinstance(rows, list)
    columns = columns or list(rows[0])
    shown = [[_cell(row.get(column)) for column in columns] for row in rows]
    lines = aligned([columns, *shown])
    cpu = result.get("cpu")
    return (
        [*lines, f"cores used by others meanwhile: {cpu['others_cores']}"] if isinstance(cpu, dict) else lines
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
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
    """Faults by kind, how many of them fell into moves, and what the judge has counted."""
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


def filled(text: str) -> str:
    measured = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    text = measured.sub(lambda m: f"{m[1]}\n{block(m[2])}\n\n{m[3]}", text)
    files = re.compile(r"(<!-- file: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return files.sub(lambda m: f"{m[1]}\n{source(m[2])}\n\n{m[3]}", text)


def source(path: str) -> str:
    """A Python file as README.md shows it: without its docstring."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if text.startswith('"""'):
        text = text[text.index('"""', 3) + 3 :]
    return f"```python\n{text.strip()}\n```"


def kept_rows(name: str) -> list[dict[str, float]]:
    """The rows of a kept benchmark; none if it was not measured."""
    path = KEPT / f"{name}.txt"
    if not path.exists():
        return []
    rows: list[dict[str, float]] = json.loads(path.read_text(encoding="utf-8").split("\n", 1)[1])["rows"]
    return rows


def draw_results() -> None:
    """The picture at the top of README.md: events a second beside Spark's own, stoppage by strategy."""
    throughput, moves = kept_rows("throughput"), kept_rows("reconfigure")
    if not throughput or not moves:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    names = [f"{row['processor']}\nas a {row['form']}" for row in throughput]
    for offset, (column, label, colour) in enumerate(
        (
            ("tiercel_events_per_s", "Tiercel", "#0b6e4f"),
            ("spark_events_per_s", "Spark transformWithState, its best batch size", "#c9720a"),
        )
    ):
        places = [i + 0.38 * offset for i in range(len(names))]
        heights = [row[column] or 0.0 for row in throughput]
        left.bar(places, heights, 0.36, label=label, color=colour)
        for x, height in zip(places, heights, strict=True):
            left.text(x, height, f"{height:,.0f}", ha="center", va="bottom", fontsize=8)
    left.set_xticks([i + 0.19 for i in range(len(names))], names, fontsize=7.5)
    left.set_ylabel("events/s")
    left.set_title("Sustained for 30 s, all on 2 cores", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    left.margins(y=0.25)
    strategies = [str(row["strategy"]) for row in moves]
    for offset, (column, colour) in enumerate(
        (("stoppage_p50_ms", "#7fb8a4"), ("stoppage_p99_ms", "#0b6e4f"))
    ):
        places = [i + 0.38 * offset for i in range(len(strategies))]
        heights = [max(row[column], 0.01) for row in moves]
        right.bar(places, heights, 0.36, label=column.removeprefix("stoppage_"), color=colour)
        for x, height in zip(places, heights, strict=True):
            right.text(x, height, f"{height:,.1f}", ha="center", va="bottom", fontsize=8)
    right.set_yscale("log")
    right.set_xticks([i + 0.19 for i in range(len(strategies))], strategies)
    right.set_ylabel("ms, log scale")
    right.set_title("Stoppage of probe keys while all keys of an instance move", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    right.margins(y=0.25)
    figure.tight_layout()
    figure.savefig(KEPT / "results.png", dpi=130)


def draw_sweep() -> None:
    """Recovery by checkpoint interval, by replay alone, and from the source."""
    rows = kept_rows("sweep")
    if rows:
        sys.path.insert(0, str(ROOT / "src"))
        from tiercel.bench import recover_sweep

        recover_sweep.draw(rows, KEPT / "recover-sweep.png")


def draw() -> None:
    """Stoppage by strategy in the large scenario, from the kept result."""
    path = KEPT / "large.txt"
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
    figure.savefig(KEPT / "large.png", dpi=130)


def main() -> None:
    readme = ROOT / "README.md"
    if "--check" in sys.argv:
        sys.exit(filled(readme.read_text(encoding="utf-8")) != readme.read_text(encoding="utf-8"))
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
        draw()
        draw_results()
        draw_sweep()
        readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
