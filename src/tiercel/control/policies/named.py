"""The shipped policies by name.

Responsible for: making a policy from a name and options; errors that name what is wrong.
Not responsible for: functions of users, which are policies as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.control.policies.busy import Busy
from tiercel.control.policies.failures import Failures
from tiercel.control.policies.hot_keys import HotKeys
from tiercel.control.policies.offload import Offload
from tiercel.control.policies.policy import Policy
from tiercel.control.policies.rate import Rate
from tiercel.core.errors import InvalidRequest

POLICIES: Mapping[str, type[Any]] = {
    "busy": Busy,
    "rate": Rate,
    "hot_keys": HotKeys,
    "offload": Offload,
    "failures": Failures,
}
LIST_POLICIES = "tiercel policy list"


def make_policy(name: str, operator: str, options: Mapping[str, Any] | None = None) -> Policy:
    """A shipped policy for one operator. `InvalidRequest` names an unknown policy, option or value."""
    kind = POLICIES.get(name)
    if kind is None:
        raise InvalidRequest.unknown("policy", name, sorted(POLICIES), LIST_POLICIES)
    known = [field for field in kind.__struct_fields__ if field != "operator"]
    for option in options or {}:
        if option not in known:
            raise InvalidRequest.unknown(f"option of policy {name}", option, known, LIST_POLICIES)
    try:
        made: Policy = kind(operator=operator, **dict(options or {}))
    except TypeError as error:  # a required option is missing
        raise InvalidRequest(f"policy {name}: {error}", f"options: {', '.join(known)}") from error
    return made
