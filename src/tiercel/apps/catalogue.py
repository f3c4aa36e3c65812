"""All applications by name.

Responsible for: from a name to an application, which is imported when it is asked for.
Not responsible for: what an application is (app.py).
"""

from __future__ import annotations

import importlib
from typing import Any

from tiercel import UserError
from tiercel.apps.app import App

APPS = {  # name -> module, class
    "keycount": ("tiercel.apps.keycount", "KeyCount"),
    "nexmark": ("tiercel.apps.nexmark.app", "NexmarkApp"),
    "riot": ("tiercel.apps.riot.app", "RiotApp"),
    "toll": ("tiercel.apps.toll.app", "TollApp"),
    "traffic": ("tiercel.apps.traffic", "Traffic"),
    "wordcount": ("tiercel.apps.wordcount", "WordCount"),
}


def find_app(name: str) -> App[Any]:
    """The application of this name; UserError if there is none."""
    if name not in APPS:
        raise UserError(
            f"unknown application {name!r}",
            expected=f"one of: {', '.join(sorted(APPS))}",
            hint="tiercel app list",
        )
    module, attribute = APPS[name]
    app: App[Any] = getattr(importlib.import_module(module), attribute)()
    return app


def all_apps() -> list[App[Any]]:
    return [find_app(name) for name in sorted(APPS)]
