"""Exit codes, after ``sysexits.h`` and ``flock(1)``, and which error leads to which."""

from __future__ import annotations

import errno

from holdfast.errors import (
    BackendUnavailable,
    HoldfastError,
    InvalidName,
    LockLost,
    LockTimeout,
)

__all__ = [
    "BAD_SETTING",
    "DEFECT",
    "LOST",
    "NOTHING",
    "NOT_ACQUIRED",
    "NO_OUTPUT",
    "UNAVAILABLE",
    "USAGE",
    "BadSetting",
    "Refused",
    "code_for",
]

NOTHING = 1
"""There was nothing to show or to break, or a check found something broken."""
USAGE = 64
"""The command line is wrong."""
UNAVAILABLE = 69
"""The store can't be reached."""
DEFECT = 70
"""Something that should not happen."""
NO_OUTPUT = 74
"""What the command prints could not be written: a full disk."""
NOT_ACQUIRED = 75
"""Another client holds the lock."""
LOST = 76
"""The lock was lost, or about to be, before the command had ended."""
BAD_SETTING = 78
"""The store's URL is wrong, its extra is missing, it refuses us, or can't do what was asked."""


class Refused(Exception):
    """Ends the command with a message and a code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class BadSetting(Refused):
    """The store's URL or settings can't be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, BAD_SETTING)


def code_for(error: Exception) -> int:
    """The exit code for an error that reached the top."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, BackendUnavailable) and error.final:
        return BAD_SETTING
    if type(error) is OSError and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return NO_OUTPUT
    table: tuple[tuple[type[Exception], int], ...] = (
        (LockTimeout, NOT_ACQUIRED),
        (LockLost, LOST),
        (BackendUnavailable, UNAVAILABLE),
        (InvalidName, USAGE),
        (HoldfastError, BAD_SETTING),
        (ValueError, USAGE),
    )
    return next((code for kind, code in table if isinstance(error, kind)), DEFECT)
