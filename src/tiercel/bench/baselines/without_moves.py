"""A deployment whose routers and instances are built without their migration component.

Responsible for: the baseline of `tiercel bench idle`.
Not responsible for: the load, or the comparison (idle_overhead.py).
"""

from __future__ import annotations

from functools import partial

from tiercel.core.instance.instance import Instance
from tiercel.core.router.router import Router
from tiercel.spark.cluster.task import Build, build_host

build_without_moves: Build = partial(
    build_host,
    make_router=partial(Router, migration=None),
    make_instance=partial(Instance, with_moves=False),
)
