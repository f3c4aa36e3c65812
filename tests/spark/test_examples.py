"""The examples run as they are, each in a process of its own as a reader would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHOWN = {  # what else an example prints
    "nexmark": "00:00:20 auction 1500: 803 bids",
    "riot": " is next",
    "toll": "direction 0, segment 5: 179 cars at 32 mph",
}


def test_readme_shows_the_quickstart_example() -> None:
    _, shown = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8").split('"""\n\n', 1)
    assert f"```python\n{shown}```" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([line for line in shown.splitlines() if line]) <= 20


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem == "quickstart" else pytest.mark.long) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example_runs_and_its_moves_are_done(path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "(live) done after" in ended.stdout
    assert SHOWN.get(path.stem, "n=30") in ended.stdout
