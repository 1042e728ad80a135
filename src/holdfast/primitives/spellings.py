"""Words of other lock libraries, and ours for them: imported when a caller uses one of them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["missing_attribute", "unknown_argument"]

_NO_POLLING = "waiters are woken and do not poll: leave it out"
_NO_RETRIES = "in Holdfast it is 'timeout', how long to wait in all"
_OWNER = "a hold has a random owner: leave it out, or give a 'note' that others can see"

ARGUMENTS = {
    # how long a hold lasts
    "expire": "in Holdfast it is 'ttl'",
    "expiry": "in Holdfast it is 'ttl'",
    "ex": "in Holdfast it is 'ttl'",
    "px": "in Holdfast it is 'ttl', in seconds",
    "lease": "in Holdfast it is 'ttl'",
    "lease_time": "in Holdfast it is 'ttl'",
    "lease_duration": "in Holdfast it is 'ttl'",
    "lifetime": "in Holdfast it is 'ttl'",
    "auto_release_time": "in Holdfast it is 'ttl'",
    "lock_timeout": "in Holdfast it is 'ttl'",
    # how long a caller waits
    "blocking_timeout": "in Holdfast it is 'timeout'; and what is 'timeout' in redis-py, how long "
    "a hold lasts, is 'ttl'",
    "wait_timeout": "in Holdfast it is 'timeout'",
    "blocking": "it is an argument of acquire(); here timeout=0 tries once",
    "sleep": f"{_NO_POLLING} (and what is 'timeout' in redis-py is 'ttl' in Holdfast)",
    "poll_interval": _NO_POLLING,
    "signal_expire": _NO_POLLING,
    "retry_delay": _NO_POLLING,
    "retry_interval": _NO_POLLING,
    "retry_times": _NO_RETRIES,
    "retry_count": _NO_RETRIES,
    "retries": _NO_RETRIES,
    # the rest
    "auto_renewal": "in Holdfast it is 'renew', and it is on",
    "auto_renew": "in Holdfast it is 'renew', and it is on",
    "identifier": "in Holdfast it is 'note'",
    "id": _OWNER,
    "token": f"{_OWNER}; the fencing token is lease.token",
    "thread_local": "a lease belongs to what acquired it, and any thread may use it: leave it out",
    "raise_on_release_error": "a hold that was lost is raised as LockLost: leave it out",
    "lock_class": "the client makes its own locks: leave it out",
    "strict": "a hold always has a ttl: leave it out",
    "shared": "in Holdfast it is rwlock(name).read()",
    "ephemeral": "every hold ends by itself after its ttl: leave it out",
    "max_leases": "in Holdfast it is semaphore(name, limit)",
}

_EXTEND = "a hold is renewed by itself; lease.extend() renews it now"
_HELD = "in Holdfast it is lease.held"
_HOLDER = "in Holdfast it is locks.inspect(name), which gives holders and waiters"

ATTRIBUTES = {
    "owned": _HELD,
    "is_still_owner": _HELD,
    "acquired": _HELD,
    "is_acquired": _HELD,
    "reacquire": _EXTEND,
    "renew": _EXTEND,
    "heartbeat": _EXTEND,
    "is_locked": "in Holdfast it is lock.locked()",
    "get_owner_id": _HOLDER,
    "contenders": _HOLDER,
    "lease_holders": _HOLDER,
    "reset": "locks.break_lock(name, reason=…) ends the hold of another process",
    "break_": "locks.break_lock(name, reason=…) ends the hold of another process",
    "cancel": "a timeout, or the cancellation of the task, ends a wait",
}


def unknown_argument(word: str, known: Iterable[str]) -> TypeError:
    """The error for an argument that does not exist; names ours for another library's word."""
    hint = ARGUMENTS.get(word) or f"known are {', '.join(known)}"
    return TypeError(f"unknown argument {word!r}: {hint}")


def missing_attribute(lock: object, word: str, of_a_lease: Iterable[str]) -> AttributeError:
    """The error for an attribute that a lock does not have; says where it is."""
    hint = ATTRIBUTES.get(word, "")
    if word in of_a_lease and not word.startswith("_"):
        hint = f"a lock is a description; lease.{word} is on what acquire() and the block give"
    message = f"{type(lock).__name__!r} object has no attribute {word!r}"
    text = f"{message}: {hint}" if hint else message
    return AttributeError(text, name=word, obj=lock)
