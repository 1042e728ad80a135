"""Every error that Holdfast raises, in one tree.

HoldfastError
├── LockTimeout(TimeoutError)            not acquired in time; names the holder
├── LockLost                             the hold ended before the work did
├── NotHeld(RuntimeError)                release or extend of what we do not hold
├── AlreadyHeld                          this thread or task holds it: a self-deadlock
├── StaleFence                           a resource refused an old fence; names both
├── UntrustedFence(ValueError)           a fence without a signature by a known key
├── JobFailed                            another process ran the job, and it failed, as recorded
├── ResultNotKept(TypeError)             a job is done, but JSON can't hold its result
├── BackendUnavailable(ConnectionError)  the store cannot be reached; names it and what was tried
├── GuaranteeNotMet                      connect(require=…) asks for what this store cannot promise
├── Unsupported                          this store cannot do this primitive
├── Incompatible                         stored by a version that we do not understand
├── LimitMismatch(ValueError)            the name is in use with another limit, or as another kind
└── InvalidName(ValueError)

Messages name the lock, the store and the holder, and never a secret: no owner, no password.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.claim import Fence, Holder

__all__ = [
    "AlreadyHeld",
    "BackendUnavailable",
    "GuaranteeNotMet",
    "HoldfastError",
    "Incompatible",
    "InvalidName",
    "JobFailed",
    "LimitMismatch",
    "LockLost",
    "LockTimeout",
    "NotHeld",
    "ResultNotKept",
    "StaleFence",
    "Unsupported",
    "UntrustedFence",
]


class HoldfastError(Exception):
    """The base class of all errors that Holdfast raises on purpose."""


class LockTimeout(HoldfastError, TimeoutError):
    """The lock was not acquired in time; ``.holder`` is its holder, if the store could name it.

    ``.deadlock`` has the names of the circle of waiters that it was in, if one was found: the
    holder of each waits for the next name, that of the last one for the first.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str = "",
        holder: Holder | None = None,
        deadlock: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.name = name
        self.holder = holder
        self.deadlock = deadlock


class LockLost(HoldfastError):
    """The hold ended, or may have ended, before the work did.

    ``.reason`` says why; ``.result`` is what the body returned, if it had finished.
    """

    def __init__(
        self, message: str, *, name: str = "", reason: str = "", result: object = None
    ) -> None:
        super().__init__(message)
        self.name = name
        self.reason = reason
        self.result = result


class NotHeld(HoldfastError, RuntimeError):
    """A release or an extend of a lock that this thread, task or handle does not hold.

    A ``RuntimeError``, as ``threading.Lock.release`` raises it.
    """


class AlreadyHeld(HoldfastError):
    """This thread or task already holds the name: it would wait for itself for ever."""


class StaleFence(HoldfastError):
    """A resource refused a fence because it has seen the fence of a newer holder."""

    def __init__(
        self, message: str, *, fence: Fence | None = None, highest: Fence | None = None
    ) -> None:
        super().__init__(message)
        self.fence = fence
        self.highest = highest


class UntrustedFence(HoldfastError, ValueError):
    """A fence from outside is not signed, or not by one of the known keys (``fence_keys``)."""


class JobFailed(HoldfastError):
    """An earlier run of a job failed; ``.error`` is the type and text of its error."""

    def __init__(self, message: str, *, error: str = "") -> None:
        super().__init__(message)
        self.error = error


class ResultNotKept(HoldfastError, TypeError):
    """A job is done and recorded, but its result is not: ``.result`` is what it returned."""

    def __init__(self, message: str, *, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class BackendUnavailable(HoldfastError, ConnectionError):
    """The store cannot be reached, or did not answer in time: the outcome is unknown.

    ``.final`` is true if trying again can't help: a wrong password, no such database, no rights,
    another kind of server. The request that it answers has changed nothing.
    """

    def __init__(self, *args: object, final: bool = False) -> None:
        super().__init__(*args)
        self.final = final


class GuaranteeNotMet(HoldfastError):
    """The store does not have a required guarantee, or ``check()`` found it broken."""


class Unsupported(HoldfastError):
    """This store does not support the requested operation."""


class Incompatible(HoldfastError):
    """The stored data was written by a version that this one cannot safely share locks with."""


class LimitMismatch(HoldfastError, ValueError):
    """The name is held or waited for with another limit, or as another kind of lock."""


class InvalidName(HoldfastError, ValueError):
    """A name is text of 1 to 512 bytes in UTF-8 without control characters."""
