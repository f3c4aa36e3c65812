"""Recorded views run through a policy again: what it would have decided.

Responsible for: the decisions of a policy over views in their order, under limits.
Not responsible for: files (cli/policy.py), a model that reacts to the decisions (sim/policies).

The recorded load does not react: a replay shows what a policy wants. Its changes are not carried out, so the
numbers of instances stay those of the recording.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tiercel.control.governor import Governor
from tiercel.control.limits import Limits
from tiercel.control.policies.policy import Decide
from tiercel.control.proposals import Decision
from tiercel.control.view import View
from tiercel.core.errors import InvalidRequest


def replay(views: Iterable[View], name: str, decide: Decide, limits: Limits) -> list[Decision]:
    """The history of a policy over recorded views; nothing is carried out."""
    governor = Governor()
    governor.add(name, decide, msgspec.structs.replace(limits, dry_run=True))
    for view in views:
        governor.decide(view)
    return governor.history


def decode_views(lines: Iterable[bytes]) -> list[View]:
    """Views from lines of JSON. `InvalidRequest` names the first line that is none.

    A view without owners has those of the view before: a record leaves out what is the same.
    """
    decode = msgspec.json.Decoder(View).decode
    found: list[View] = []
    owners: dict[str, dict[int, str]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                view = decode(line)
            except msgspec.DecodeError as error:
                raise InvalidRequest(
                    f"line {number} is no view: {error}",
                    "expected one view as JSON in each line",
                    "a deployment with a policy writes them to policy/views.jsonl in its storage",
                ) from error
            owners |= {name: each.owners for name, each in view.operators.items() if each.owners}
            operators = {
                name: msgspec.structs.replace(each, owners=owners.get(name, {}))
                for name, each in view.operators.items()
            }
            found.append(msgspec.structs.replace(view, operators=operators))
    return found
