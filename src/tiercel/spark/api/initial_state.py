"""The initial state of an operator, sent before the first row.

Responsible for: sending it once in the lifetime of a deployment, in an order that a second try can resume.
Not responsible for: where the state comes from (state/external_state.py), what the instances do with it
    (core/).
"""

from __future__ import annotations

import contextlib

import msgspec
from pyspark.sql import DataFrame

from tiercel.errors import UserError
from tiercel.runtime.backup.deployment_backup import write_backup_manifest
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.api.clients import RowProducer
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.state.external_state import PackedState

INITIAL_ROWS = 500  # in one frame
INITIAL_BYTES = 4 * 1024 * 1024  # in one frame; the whole state of a key may be large


def give_initial_state(
    deployment: DeploymentDir, operator: str, codec: RowCodec, given: DataFrame | PackedState
) -> None:
    """Send an operator's initial state, unless it has it already; sorted, so that a second try resumes."""
    if is_given(deployment, operator):
        return
    with RowProducer(deployment, f"{operator}.initial", name=f"initial-{operator}") as producer:
        if isinstance(given, PackedState):
            _refuse_another_source(deployment, operator, given.source)
            rows = given.rows()
        else:
            frame = given.sort(*codec.key, *[c for c in given.columns if c not in codec.key])
            rows = map(codec.pack, frame.toLocalIterator(prefetchPartitions=True))
        producer.send_initial(rows, INITIAL_ROWS, INITIAL_BYTES)
        producer.flush()
    manifest = deployment.manifest()
    manifest = msgspec.structs.replace(manifest, given=(*manifest.given, operator))
    deployment.write(manifest)
    write_backup_manifest(manifest)  # a deployment that is restored does not need that state again


def is_given(deployment: DeploymentDir, operator: str) -> bool:
    """Whether an operator has all of its initial state."""
    return operator in deployment.manifest().given


def _refuse_another_source(deployment: DeploymentDir, operator: str, source: str) -> None:
    """Refuse another source than an earlier try: frames are identified by their number alone."""
    begun = deployment.directory / f"initial-{operator}.source"
    with contextlib.suppress(FileNotFoundError):
        before = begun.read_text(encoding="utf-8")
        if before != source:
            what = f"the initial state of {operator!r} is {source}"
            raise UserError(what, expected=f"{before}: an earlier start began with it")
    begun.write_text(source, encoding="utf-8")
