"""The rows of a chaos run and their reference."""

from __future__ import annotations

from tiercel.chaos.workload import ACCOUNTS, CHUNK_FRAMES, FRAME_ROWS, entered, frames, reference


def test_the_accounts_of_two_producers_are_different_and_numbers_grow_over_all_chunks() -> None:
    rows = [[row for chunk in range(5) for frame in frames(1, n, chunk) for row in frame] for n in (0, 1)]
    assert not {account for account, _, _ in rows[0]} & {account for account, _, _ in rows[1]}
    for mine in rows:
        assert [n for _, n, _ in mine] == list(range(5 * CHUNK_FRAMES * FRAME_ROWS))
        assert all(0 <= account < ACCOUNTS for account, _, _ in mine)


def test_outputs_differ_after_a_lost_doubled_or_reordered_row() -> None:
    rows = [(1, n, 10 * n) for n in range(4)]
    last = list(reference(rows))[-1]
    a, b, c, d = rows
    for wrong in ([a, b, d], [a, b, b, c, d], [b, a, c, d]):
        assert list(reference(wrong))[-1] != last
    assert entered(0, 0, 0, 0) == (1, 1)
