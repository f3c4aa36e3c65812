"""Runs the commands whose results the documents show, keeps what they print, and puts it into README.md.

    python docs/measure.py core slice        run these and keep their output under docs/measured/
    python docs/measure.py --fill            write what is kept into README.md, draw docs/measured/large.png
    python docs/measure.py --check           fail if README.md shows anything else than what is kept

Nothing in README.md between `<!-- measured: NAME -->` and `<!-- end -->` is typed by hand.
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
    "slice": ("python -m tiercel.bench.slice", [sys.executable, "-m", "tiercel.bench.slice"]),
}
LINES_SHOWN = {"mutants": 1, "test": 1, "points": 1, "seeds": 1}  # the last ones; the others are shown whole


def measure(name: str) -> None:
    shown, command = COMMANDS[name]
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
    if name == "large":
        lines = large_table(json.loads("\n".join(lines)))
    elif name in LINES_SHOWN:
        lines = [line for line in lines if line.strip()][-LINES_SHOWN[name] :]
    body = "\n".join(line.rstrip() for line in lines)
    return f"```text\n{body}\n```\n\n<sub>{about}</sub>"


def large_table(result: dict[str, object]) -> list[str]:
    """One line per strategy out of the JSON of the large scenario."""
    rows = result["lines"]
    assert isinstance(rows, list)
    columns = list(rows[0])
    shown = [[f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    table = [columns, *shown]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    facts = (
        f"{result['sites']} sites, {result['keys']} keys, {result['moves']} moves, {result['rows']} rows: "
    )
    took = f"{result['virtual_s']} s of virtual time in {result['elapsed_s']:.0f} s"
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in table]
    return [facts + took, *lines]


def filled(text: str) -> str:
    pattern = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda m: f"{m[1]}\n{block(m[2])}\n\n{m[3]}", text)


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
    names = [a for a in sys.argv[1:] if not a.startswith("--")]
    unknown = [n for n in names if n not in COMMANDS]
    if unknown:
        print(f"unknown measurement {unknown[0]!r}; expected one of: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    for name in names:
        measure(name)
    if "--fill" in sys.argv:
        draw()
        readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
