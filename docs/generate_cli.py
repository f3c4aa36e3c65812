"""docs/cli.md: every command of `tiercel` with its help text.

Responsible for: the page, as text.
Not responsible for: writing and checking it (generate.py), the help texts themselves (src/tiercel/cli).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from tiercel.cli.main import app

NOTE = "<!-- Written by docs/generate.py. Do not edit: change the help texts in src/tiercel/cli. -->"
WIDTH = 90

INTRODUCTION = """# The command line

`tiercel COMMAND --help` prints the same texts; `python -m tiercel` is the same as `tiercel`. `demo`, `bench`
and `chaos` need the extra `lab`: `pip install 'tiercel[lab]'`.

Exit codes: 0 success; 1 a promise was broken, such as a lost or doubled row; 2 the command could not run as
requested, with a message that says what is wrong, what is expected, and what to do.
"""


def commands(command: Any, parent: Any = None, name: str = "tiercel") -> Iterator[tuple[str, str]]:
    """(name, help text) of a command and of all commands below it, in the order of the help."""
    width = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = command.context_class(
        command, info_name=name, parent=parent, **width, **command.context_settings
    )
    yield context.command_path, command.get_help(context)
    for child in getattr(command, "commands", {}):
        yield from commands(command.commands[child], context, child)


def cli_page() -> str:
    parts = [NOTE, INTRODUCTION]
    for name, text in commands(typer.main.get_command(app)):
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        parts.append(f"## `{name}`\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)
