"""How a session sleeps on the server until another one kills its sleep.

MariaDB has one mutex for all calls of ``SLEEP()``, and whoever leaves one takes it along to where
it waits for its killer. A killer that finds the mutex taken tries again for two seconds, with that
in hand which its own victim waits for: until it gives up, nobody on this server begins or ends a
``SLEEP()``. Two kills at the same time are enough, or one as the sleep begins.

Waits for a named lock have a mutex each. So a session sleeps by waiting for one that another
session of the same client has, and never gives away.
"""

from __future__ import annotations

__all__ = ["sleep", "still_lock"]


def still_lock(subscription: str) -> bytes:
    """The named lock that a subscription sleeps on."""
    return b"'hf:still:%s'" % subscription.encode()


def sleep(lock: bytes, seconds: float) -> bytes:
    """An expression that tells, with 1, if it was cut short. Whoever gets the lock, as the session
    that had it has ended, keeps it and sleeps by itself from then on."""
    alone = b"SLEEP(%.2f)" % seconds
    # A wait tells 1 for a lock that it got, 0 for none in time, and nothing at all if killed.
    wait = b"ELT(2 - GET_LOCK(%s, %.2f), %s, 0)" % (lock, seconds, alone)
    ours = b"IS_USED_LOCK(%s) <=> CONNECTION_ID()" % lock
    return b"IF(%s, %s, IFNULL(%s, 1))" % (ours, alone, wait)
