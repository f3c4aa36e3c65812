"""Checkpoints of a running deployment on request.

Responsible for: requesting one, and waiting until each instance has a newer one than before.
Not responsible for: writing checkpoints (core/instance).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from tiercel.core.machine.stored import CheckpointHeader
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.storage.store import StoreView

WAIT_S_MAX = 30.0
POLL_S = 0.05


def checkpoint(storage: str | Path, wait_s: float = WAIT_S_MAX) -> dict[str, int]:
    """Instance -> the log offset that its new checkpoint covers."""
    deployment = DeploymentDir(storage)
    manifest = deployment.manifest()
    if manifest.local:
        raise UserError(
            "the instances of this deployment store on disks of their executors",
            expected="a deployment whose processes store in its directory",
            hint="they take a checkpoint every second by themselves",
        )
    names = [name for name in deployment.desired_instances() if deployment.registry.find(name) is not None]
    if not names:
        raise UserError(f"no instance of {deployment.directory} runs", expected="a deployment that runs")
    before = {name: cursor.generation if (cursor := _cursor(deployment, name, {})) else 0 for name in names}
    for name in names:
        deployment.registry.request_checkpoint(name)
    found: dict[str, int] = {}
    give_up = time.monotonic() + wait_s
    while len(found) < len(names):
        problems: dict[str, str] = {}
        for name in names:
            cursor = _cursor(deployment, name, problems)
            if cursor is not None and cursor.generation > before[name]:
                found[name] = cursor.applied
        if len(found) < len(names) and time.monotonic() > give_up:
            silent = ", ".join(sorted(set(names) - found.keys()))
            raise UserError(
                f"no checkpoint of {silent} within {wait_s:g} s",
                expected="instances that run, and storage that can be read",
                hint="; ".join(problems.values()) or "see with live.status() whether they run",
            )
        time.sleep(POLL_S)
    return dict(sorted(found.items()))


def _cursor(deployment: DeploymentDir, name: str, problems: dict[str, str]) -> CheckpointHeader | None:
    try:
        with contextlib.closing(StoreView(deployment.process(name), complete=False)) as view:
            found: CheckpointHeader | None = view.get(("checkpoint",))
            return found
    except Exception as error:  # the store is being created, or its files change: try again
        problems[name] = str(error).replace("\n", "; ")
        return None
