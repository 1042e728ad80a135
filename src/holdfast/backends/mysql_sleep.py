"""How a session sleeps on the server until another one kills its sleep.

MariaDB has one mutex for all calls of ``SLEEP()``, and whoever leaves one takes it along to where
it waits for its killer. A killer that finds the mutex taken, by any other sleeper, tries again for
two seconds, with that in hand which its own victim waits for: until it gives up, nobody on this
server begins or ends a ``SLEEP()``. Two kills at the same time are enough.

Waits for a named lock have a mutex each. So one session has a lock that all others wait for, for
as long as they mean to sleep, and only that one calls ``SLEEP()``.
"""

from __future__ import annotations

__all__ = ["STILL", "sleep"]

STILL = b"'hf:still'"
"""The lock of the one that sleeps."""


def sleep(seconds: float, killed: bool = True) -> bytes:
    """An expression that tells, with 1, if it was cut short. Who has slept for itself may keep
    the lock, as long as it waits for no other. Where nobody kills it, it sleeps just so."""
    nap = b"SLEEP(%.2f)" % seconds
    if not killed:
        return nap
    # A wait tells 1 for a lock that it got, 0 for none in time, and nothing at all if killed.
    wait = b"ELT(2 - GET_LOCK(%s, %.2f), %s, 0)" % (STILL, seconds, nap)
    ours = b"IS_USED_LOCK(%s) <=> CONNECTION_ID()" % STILL
    return b"IF(%s, %s, IFNULL(%s, 1))" % (ours, nap, wait)
