"""Errors for users: what happened, what was expected, and a hint.

Responsible for: errors in a form that a user can act on.
Not responsible for: violations of the protocol and bugs, which keep their traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from tiercel.core.errors import InvalidRequest


class UserError(Exception):
    """An error that a user can fix. The command line prints it without a traceback and exits with code 2."""

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, *, expected: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)  # only `what`: unpickling calls the class with `args`, then restores the rest
        self.what = what  # what happened, with the offending value
        self.expected = expected  # what would have been right
        self.hint = hint  # the command to run or the setting to change

    @classmethod
    def of(cls, refusal: InvalidRequest) -> Self:
        """The error of a request that the core refused."""
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
