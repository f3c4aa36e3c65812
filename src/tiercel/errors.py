"""Errors that are meant for the person at the command line.

Responsible for: saying what went wrong in a form that person can act on.
Not responsible for: violations of the protocol and bugs, which keep their traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from tiercel.core.faults import InvalidRequest


class UserError(Exception):
    """An error a user can mend: the command line prints it without a traceback and exits with code 2."""

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, *, expected: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)  # only this: pickling calls the class with `args`, then restores the rest
        self.what = what  # what happened, with the offending value
        self.expected = expected  # what would have been right
        self.hint = hint  # the command to run or the setting to change

    @classmethod
    def of(cls, refusal: InvalidRequest) -> Self:
        """What the core refused, for the person who asked."""
        return cls(
            refusal.what,
            expected=refusal.expected.removeprefix("expected ") or None,
            hint=refusal.hint or None,
        )

    def __str__(self) -> str:
        lines = [self.what]
        if self.expected is not None:
            lines.append(f"expected: {self.expected}")
        if self.hint is not None:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)
