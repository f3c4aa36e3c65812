"""Ready-made operators: windows, aggregates, joins and others, as methods of a stream.

    from tiercel.operators import count, mean, sliding
    positions.window(sliding("5 minutes", "1 minute")).agg(mean("speed"), count())

Each is an ordinary `StatefulProcessor` or fold. `plan_windows` and the other `plan_...` functions give it
with its schema, for Spark's own `transformWithState` and for tests with `tiercel.testing`. This package knows
no deployment: `tiercel.spark` calls it, and it imports nothing of ours but errors.
"""

from tiercel.operators.aggregates import (
    Aggregate,
    approx_count_distinct,
    avg,
    count,
    first,
    fold,
    last,
    max,
    mean,
    min,
    sum,
    top_k,
)
from tiercel.operators.deduplicate import plan_deduplicate
from tiercel.operators.enrichment import plan_enrich
from tiercel.operators.joins import Side, plan_join
from tiercel.operators.plan import Plan
from tiercel.operators.running import FoldPlan, plan_aggregate, plan_top_k
from tiercel.operators.values import LateRow
from tiercel.operators.windowed import WindowedStream, plan_rate, plan_windows
from tiercel.operators.windows import (
    CountWindow,
    SessionWindow,
    TimeWindow,
    session,
    sliding,
    sliding_count,
    tumbling,
    tumbling_count,
)

__all__ = [
    "Aggregate",
    "CountWindow",
    "FoldPlan",
    "LateRow",
    "Plan",
    "SessionWindow",
    "Side",
    "TimeWindow",
    "WindowedStream",
    "approx_count_distinct",
    "avg",
    "count",
    "first",
    "fold",
    "last",
    "max",
    "mean",
    "min",
    "plan_aggregate",
    "plan_deduplicate",
    "plan_enrich",
    "plan_join",
    "plan_rate",
    "plan_top_k",
    "plan_windows",
    "session",
    "sliding",
    "sliding_count",
    "sum",
    "top_k",
    "tumbling",
    "tumbling_count",
]
