"""The ready-made operators as methods of a stream: windows, aggregates, joins and others.

Responsible for: from a call such as `positions.rate("1 minute")` to a declared operator.
Not responsible for: what the operators do (tiercel.operators), declaring one (streams.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from tiercel.errors import UserError
from tiercel.operators.aggregates import Aggregate
from tiercel.operators.deduplicate import plan_deduplicate
from tiercel.operators.durations import Duration, positive_ms
from tiercel.operators.enrichment import AsChange, plan_enrich, sides
from tiercel.operators.joins import Side, plan_join
from tiercel.operators.plan import Plan
from tiercel.operators.running import FoldPlan, plan_aggregate, plan_top_k
from tiercel.operators.splitting import branches
from tiercel.operators.windowed import WindowedStream, plan_rate, plan_windows
from tiercel.operators.windows import Window
from tiercel.spark.rows.row_codec import RowCodec


class OperatorMethods(ABC):
    """What a stream offers ready-made. Options are those of `transform_with_state`, or of `fold`."""

    codec: RowCodec
    filter: Callable[..., Any]
    map: Callable[..., Any]
    transform_with_state: Callable[..., Any]
    fold: Callable[..., Any]

    @property
    @abstractmethod
    def name(self) -> str: ...

    def window(self, window: Window, *, lateness: Duration | None = None) -> WindowedStream[Self]:
        """Rows by key and window; `agg` says what becomes of them.

        With `lateness` a window takes rows for that long behind its end, and emits its result again for them.
        Rows that are too late are dead letters.
        """
        schema, key, event_time = self._shape
        return WindowedStream(
            self._apply,
            lambda aggregates, window_time: plan_windows(
                schema, key, event_time, window, aggregates, lateness=lateness, window_time=window_time
            ),
        )

    def aggregate(self, *aggregates: Aggregate, **options: Any) -> Self:
        """Aggregates of all rows of a key so far, after each row."""
        schema, key, _ = self._shape
        return self._fold(plan_aggregate(schema, key, aggregates), options)

    def top_k(self, k: int, by: str, **options: Any) -> Self:
        """The k rows of a key with the largest values of a column, as an array `top`, when they change."""
        schema, key, _ = self._shape
        return self._fold(plan_top_k(schema, key, k, by), options)

    def rate(
        self,
        over: Duration,
        *,
        every: Duration | None = None,
        per: Duration = "1 second",
        column: str = "",
        **options: Any,
    ) -> Self:
        """Rows of a key, or the sum of a column, per unit of time, in windows of the length `over`."""
        schema, key, event_time = self._shape
        return self._apply(
            plan_rate(schema, key, event_time, over, every=every, per=per, column=column), options
        )

    def deduplicate(self, *columns: str, within: Duration | None = None, **options: Any) -> Self:
        """The first row of each key and value of these columns; with `within` one more after that time."""
        schema, key, event_time = self._shape
        options.setdefault("output_event_time", event_time)
        return self._apply(plan_deduplicate(schema, key, event_time, columns, within), options)

    def join(
        self,
        other: Self,
        *,
        within: Duration | tuple[Duration, Duration] | None = None,
        window: Window | None = None,
        how: str = "inner",
        suffix: str = "_right",
        **options: Any,
    ) -> Self:
        """Rows of both streams with the same key whose event times are close, or in one tumbling window.

        `within="5 minutes"`: at most that far apart; `within=(lower, upper)`: the other's time less ours.
        A column of the other stream whose name is taken gets the suffix.
        """
        made = plan_join(
            Side(*self._shape), Side(*other._shape), within=within, window=window, how=how, suffix=suffix
        )
        left, right = self.map(made.left, made.left.schema), other.map(made.right, made.right.schema)
        both: Self = left.union(right)
        return both._apply(made.plan, {"name": f"{self.name}-join-{other.name}", **options})

    def enrich(
        self,
        table: DataFrame | Callable[[], DataFrame],
        *,
        changes: Self | None = None,
        refresh: Duration | None = None,
        how: str = "left",
        suffix: str = "_table",
        **options: Any,
    ) -> Self:
        """Rows with the columns of the table's row that has the same key.

        The table is read once. `changes` is a stream with its columns: a change counts from then on. With
        `refresh` the driver reads the table again so often, and rows that are new, different or gone count
        from then on. A DataFrame of files lists them once: give a function that reads them.
        """
        schema, key, event_time = self._shape
        frame = table() if callable(table) else table
        changing = changes is not None or refresh is not None
        made = plan_enrich(schema, key, event_time, frame.schema, how=how, suffix=suffix, changes=changing)
        options = {"name": f"{self.name}-enriched", "output_event_time": event_time, **options}
        if changes is not None and refresh is not None:
            raise UserError("enrich with changes= and refresh=", expected="one of them")
        if not changing:
            return self._apply(made, {"initial_state": frame, **options})
        as_row, of_change = sides(key, schema, frame.schema)
        as_change: Any = of_change
        if changes is None:
            assert refresh is not None
            read_again = table if callable(table) else lambda: frame
            every_s = positive_ms(refresh, "refresh") / 1_000
            changes = self._table_changes(options["name"], frame, read_again, every_s)
            as_change = AsChange(key, frame.schema)
        read: Self = self.map(as_row, as_row.schema).union(changes.map(as_change, as_change.schema))
        return read._apply(made, {"initial_state": frame, **options})

    @abstractmethod
    def _table_changes(
        self, operator: str, table: DataFrame, read: Callable[[], DataFrame], every_s: float
    ) -> Self:
        """A stream of the changes of a table with this stream's key."""

    def split(self, **branch: Callable[[Any], bool]) -> dict[str, Self]:
        """A stream per name with the rows for which its function is the first to be true, and `rest`."""
        return {name: self.filter(belongs) for name, belongs in branches(branch).items()}

    @property
    def _shape(self) -> tuple[StructType, tuple[str, ...], str]:
        return self.codec.schema, self.codec.key, self.codec.event_time

    def _apply(self, plan: Plan, options: Mapping[str, Any]) -> Self:
        given = {
            "name": f"{self.name}-{plan.name}",
            "output_event_time": plan.event_time,
            "late_rows": plan.time_mode == "eventTime",
            **options,
        }
        made: Self = self.transform_with_state(plan.processor, plan.schema, time_mode=plan.time_mode, **given)
        return made

    def _fold(self, plan: FoldPlan, options: Mapping[str, Any]) -> Self:
        given = {"name": f"{self.name}-{plan.name}", **options}
        made: Self = self.fold(plan.step, plan.initial, plan.schema, state_schema=plan.state_schema, **given)
        return made
