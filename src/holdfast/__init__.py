"""Distributed locks for Python that are fast, fenced and honest.

>>> import holdfast
>>> locks = holdfast.connect("memory://")
>>> with locks.lock("order:42", ttl=30, timeout=5) as lease:
...     lease.held
True
>>> locks.close()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import (
    AlreadyHeld,
    BackendUnavailable,
    GuaranteeNotMet,
    HoldfastError,
    Incompatible,
    InvalidName,
    JobFailed,
    LimitMismatch,
    LockLost,
    LockTimeout,
    NotHeld,
    ResultNotKept,
    StaleFence,
    Unsupported,
    UntrustedFence,
)

if TYPE_CHECKING:
    from holdfast.claim import Fence, Holder, LockInfo, Mode, Waiter
    from holdfast.core.contract import Finding, Guarantee
    from holdfast.lease import AsyncLease, Lease
    from holdfast.locks import Locks, connect
    from holdfast.locks_async import AsyncLocks, connect_async
    from holdfast.multilease import AsyncMultiLease, MultiLease
    from holdfast.primitives.lock import Lock
    from holdfast.primitives.lock_async import AsyncLock
    from holdfast.primitives.once_outcome import Outcome

__version__ = "0.1.0"

__all__ = [
    "AlreadyHeld",
    "AsyncLease",
    "AsyncLock",
    "AsyncLocks",
    "AsyncMultiLease",
    "BackendUnavailable",
    "Fence",
    "Finding",
    "Guarantee",
    "GuaranteeNotMet",
    "Holder",
    "HoldfastError",
    "Incompatible",
    "InvalidName",
    "JobFailed",
    "Lease",
    "LimitMismatch",
    "Lock",
    "LockInfo",
    "LockLost",
    "LockTimeout",
    "Locks",
    "Mode",
    "MultiLease",
    "NotHeld",
    "Outcome",
    "ResultNotKept",
    "StaleFence",
    "Unsupported",
    "UntrustedFence",
    "Waiter",
    "connect",
    "connect_async",
]

# The module of each name that is imported at its first use: see holdfast.lazy.
_HOMES = {
    "AsyncLease": "holdfast.lease",
    "AsyncLock": "holdfast.primitives.lock_async",
    "AsyncLocks": "holdfast.locks_async",
    "AsyncMultiLease": "holdfast.multilease",
    "Fence": "holdfast.claim",
    "Finding": "holdfast.core.contract",
    "Guarantee": "holdfast.core.contract",
    "Holder": "holdfast.claim",
    "Lease": "holdfast.lease",
    "Lock": "holdfast.primitives.lock",
    "Locks": "holdfast.locks",
    "Mode": "holdfast.claim",
    "MultiLease": "holdfast.multilease",
    "Outcome": "holdfast.primitives.once_outcome",
    "LockInfo": "holdfast.claim",
    "Waiter": "holdfast.claim",
    "connect": "holdfast.locks",
    "connect_async": "holdfast.locks_async",
}

_MODULES = frozenset({"dashboard", "errors", "fencing", "observe", "sql", "testing"})
"""Public modules: each is an attribute once it is imported."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """The public names, imported yet or not: for completion, and for ``help(holdfast)``."""
    loaded = {name for name in globals() if name.startswith("__") or name in _MODULES}
    return sorted({*__all__, *loaded})
