"""Export of an operator's state to parquet, and import of an export into a stopped deployment.

Responsible for: `tiercel state export` and `import`, as functions.
Not responsible for: whether an export fits an operator (state/external_state.py), reading state
    (sources/state_source.py), writing it into a deployment (admin/repartition.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from tiercel.admin.repartition import put_keys
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, VariableFacts
from tiercel.spark.cluster.session import open_session
from tiercel.spark.rows.row_codec import decode_payload
from tiercel.spark.sources.state_source import StateQuery, key_codec
from tiercel.spark.sources.stream_source import register
from tiercel.spark.state.declared_state import DeclaredState, Variable
from tiercel.spark.state.external_state import About, read_exported_state, stored_state_codec
from tiercel.spark.state.schema import stored_name, struct_of
from tiercel.spark.state.stored_state_adapter import decode_image

LOCATION_COLUMNS = ("slot", "instance", "epoch", "offset")  # where a key is stored: not part of its state


def export_state(
    storage: str | Path,
    operator: str,
    location: str,
    *,
    as_of: str = "",
    backup: str = "",
    spark: SparkSession | None = None,
) -> About:
    """Write an operator's state as parquet: of its last checkpoints, or with `as_of` of a backup.

    It may run.
    """
    given = {
        "storage": str(storage),
        "operator": operator,
        "layout": "columns",
        "asOf": as_of,
        "backup": backup,
    }
    query = StateQuery.of(given)
    _ = query.schema, query.numbers()  # refuses what is not there before Spark starts
    spark = spark or open_session("tiercel")
    register(spark)
    frame = spark.read.format("tiercel-state").options(**given).load().drop(*LOCATION_COLUMNS)
    location = location.rstrip("/")
    try:
        frame.write.mode("error").parquet(f"{location}/keys")
        keys = spark.read.schema(frame.schema).parquet(f"{location}/keys").count()
    except AnalysisException as error:
        if "PATH_ALREADY_EXISTS" not in str(error):
            raise
        raise UserError(
            f"{location} holds an export already", expected="a new location: nothing is overwritten"
        ) from error
    manifest = query.manifest
    about = About(
        "tiercel-export",
        operator,
        manifest.id,
        frame.schema["key"].dataType.json(),
        dict(query.form.live),
        manifest.topology.operators[operator].time_mode,
        keys,
        as_of,
    )
    line = spark.createDataFrame([(msgspec.json.encode(about).decode(),)], "value string")
    line.coalesce(1).write.mode("error").text(f"{location}/about")
    return about


def import_state(
    location: str, storage: str | Path, operator: str, *, spark: SparkSession | None = None
) -> int:
    """Read an export into a stopped deployment whose operator has no keys yet; returns the number of keys."""
    manifest = DeploymentDir(storage).manifest()
    if operator not in manifest.state:
        names = ", ".join(sorted(manifest.state)) or "(none declares its state)"
        raise UserError(f"no operator {operator!r} in {storage}", expected=f"one of: {names}")
    spark = spark or open_session("tiercel")
    facts = {name: each for name, each in manifest.state[operator].items() if not each.deleted}
    declared = DeclaredState(tuple(_variable(name, each) for name, each in facts.items()))
    columns = stored_state_codec(key_codec(manifest, operator))
    time_mode = manifest.topology.operators[operator].time_mode
    packed = read_exported_state(spark, location).packed(operator, declared, time_mode, columns, {})

    def state() -> Iterator[tuple[bytes, dict[str, Any], list[int]]]:
        for key, _, payload in packed.rows():
            values, timers = decode_image(decode_payload(payload)[-1])
            yield (
                key,
                {stored_name(name, facts[name].version): value for name, value in values.items()},
                timers,
            )

    return put_keys(storage, operator, state())


def _variable(name: str, facts: VariableFacts) -> Variable:
    keys = struct_of(facts.key_schema) if facts.key_schema else None
    return Variable(name, facts.kind, struct_of(facts.schema), keys, 1 if facts.ttl else None)
