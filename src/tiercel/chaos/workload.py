"""The operator of chaos runs: each output depends on every row of its key so far, and on their order.

Responsible for: the processor, written as for PySpark; the sequential reference; the load.
Not responsible for: recording (recording.py), comparing (verdict.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from tiercel.spark.operators.processor_adapter import Row, StatefulProcessor, StatefulProcessorHandle

OPERATOR = "ledger"
STREAM = "transfers"
SITES = ("cloud", "edge")
INSTANCES = {"cloud": 2, "edge": 1}
TRANSFER = "account bigint, n bigint, amount bigint"
BALANCE = "account bigint, n bigint, count bigint, chain bigint"

ACCOUNTS = 200  # those with even numbers are written at the first site, the others at the second
STATE_BYTES = 1_024  # of each account, so that a move has something to transfer
FRAME_ROWS = 20
CHUNK_FRAMES = 20  # recorded together before the first of them is sent
FRAME_S = 0.05  # between two frames of a producer: a gentle load

_MODULUS = 2**61 - 1

Transfer = tuple[int, int, int]  # account, number, amount


def entered(count: int, chain: int, n: int, amount: int) -> tuple[int, int]:
    """The next state of an account; differs for every order, for a row too many and a row too few."""
    return count + 1, (chain * 1_000_003 + n * 31 + amount + 1) % _MODULUS


class Ledger(StatefulProcessor):
    """Counts an account's transfers, and remembers in which order they came."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("state", "count long, chain long, load binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, chain, load = self._state.get() or (0, 0, bytes(STATE_BYTES))
        for row in rows:
            count, chain = entered(count, chain, row.n, row.amount)
            yield Row(account=key[0], n=row.n, count=count, chain=chain)
        self._state.update((count, chain, load))

    def close(self) -> None:
        """Holds no resources."""


def reference(transfers: Iterable[Transfer]) -> Iterator[tuple[int, int, int, int]]:
    """The expected outputs for the transfers of one account, in order."""
    count = chain = 0
    for account, n, amount in transfers:
        count, chain = entered(count, chain, n, amount)
        yield account, n, count, chain


def frames(seed: int, producer: int, chunk: int) -> list[list[Transfer]]:
    """The frames of one chunk of a producer. Some accounts are much busier than others."""
    random = Random(f"ledger/{seed}/{producer}/{chunk}")
    first = chunk * CHUNK_FRAMES * FRAME_ROWS
    accounts = range(producer, ACCOUNTS, len(SITES))
    rows = [
        (accounts[int(random.random() ** 2 * len(accounts))], first + i, random.randrange(1_000))
        for i in range(CHUNK_FRAMES * FRAME_ROWS)
    ]
    return [rows[begin : begin + FRAME_ROWS] for begin in range(0, len(rows), FRAME_ROWS)]
