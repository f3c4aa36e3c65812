"""The fingerprint of an operator's user code, by which sites notice that they run different programs.

Responsible for: the digest of the source that an operator runs: its processor or fold, and its transforms.
Not responsible for: comparing it (runtime/sites/remote.py); code that the user code calls, which is not seen.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

from tiercel.spark.operators.folds import Fold
from tiercel.spark.operators.plans import OperatorPlan


def code_digest(plan: OperatorPlan) -> str:
    """A digest of the operator's source; empty if some of it has no source, as in a notebook cell."""
    processor = plan.processor
    parts: list[Any] = [processor.step if isinstance(processor, Fold) else type(processor)]
    parts += [each.function for read in plan.inputs for each in read.transforms]
    try:
        sources = [inspect.getsource(inspect.unwrap(part)) for part in parts]
    except (OSError, TypeError):
        return ""
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]
