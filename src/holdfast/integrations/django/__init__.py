"""Locks in Django: named by model instances, held until a transaction has ended, fenced in it.

    INSTALLED_APPS = [..., "holdfast.integrations.django"]
    HOLDFAST = {"URL": "redis://cache", "TIMEOUT": 5}

    from holdfast.integrations.django import guard, locks

    with locks.lock(order) as lease, transaction.atomic():
        guard(lease)                              # StaleFence if a newer holder was here
        order.refresh_from_db()                   # it was read before the lock was held
        ...

The client has connections of its own; none of Django's is used for a lock.
"""

from __future__ import annotations

from holdfast.integrations import missing_extra

try:
    from holdfast.integrations.django.commands import LockedCommand
    from holdfast.integrations.django.locks import ProjectLocks, locks
    from holdfast.integrations.django.middleware import LockErrors
    from holdfast.integrations.django.names import name_of
    from holdfast.integrations.django.transactions import ReleasedBeforeCommit, guard
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "django":
        raise
    raise missing_extra(error, "django") from None

__all__ = [
    "LockErrors",
    "LockedCommand",
    "ProjectLocks",
    "ReleasedBeforeCommit",
    "guard",
    "locks",
    "name_of",
]
