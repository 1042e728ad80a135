"""The scripts of the Redis backend, built from ``lua/`` and packed ahead.

A command is a constant head (EVALSHA and the digest) and a body (keys and arguments). If a server
does not know the script, because it was restarted or flushed or is another node, the same body is
sent again with a head that has the script's text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.contract import (
    GRACE_SECONDS,
    IDLE_COUNTER_SECONDS,
    QUEUE_CAP,
    STALE_SECONDS,
)
from holdfast.io.resp import bulk

__all__ = ["PROTOCOL", "Script", "Scripts", "read_lua"]

PROTOCOL = "1"
"""The version of the stored format. A client of another version is refused."""
DAY_SECONDS = 86_400.0
REMEMBER_SECONDS = 30.0
"""How long an abandoned owner is remembered: longer than any of its requests can be in flight."""
REMEMBER_BYTES = 10_000
"""Space for abandoned owners: about two hundred, the newest ones."""
PORTION = 256
"""How many fields one command reads or writes."""
LARGEST_NUMBER = 2**53 - 1
"""Above it, not every whole number is a Lua number."""
MOST_SLOTS = 2**20
"""The most slots, or readers, of one name."""
MOST_STEPS = 2 * QUEUE_CAP + 2
"""The most entries and gaps that a queue can have: there is no gap without an entry beside it."""
LABEL_BYTES = 8192
"""Longer labels are not shown: no client writes one, as a note has at most 1024 bytes."""
FOREIGN_SECONDS = 0.1
"""Polling interval while a redis-py Lock holds the name; redis-py uses the same one."""

_FOLDER = Path(__file__).with_name("lua")
_PARTS = {
    "acquire": ("acquire", "state", "mark", "attempt", "return finish(attempt(claim(1)))"),
    "release": (
        "release",
        "state",
        "expire()",
        "local was = drop(ARGV[1])",
        "admit_waiters()",
        "return finish(was and 1 or 0)",
    ),
    "exchange": (
        "clock",
        "state",
        "mark",
        "attempt",
        "expire()",
        "local was = drop(ARGV[1])",
        "admit_waiters()",
        "return finish({was and 1 or 0, attempt(claim(2))})",
    ),
    "take_over": ("clock", "state", "mark", "attempt", "take_over"),
    "renew": ("renew",),
    "refresh": ("clock", "state", "refresh"),
    "abandon": ("clock", "state", "abandon"),
    "revoke": ("clock", "state", "revoke"),
    "look": ("clock", "state", "look"),
    "record": ("clock", "state", "record"),
    "recall": ("recall",),
    "begin": ("mark", "begin"),
}
_CLOCK = """\
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
"""


class Script:
    """One script: the kinds of its keys, in order, and a fixed number of arguments."""

    def __init__(self, text: str, keys: Sequence[str], arguments: int) -> None:
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        words = 3 + len(keys) + arguments
        count = bulk(str(len(keys)))
        self.keys = keys
        self.head = f"*{words}\r\n{bulk('EVALSHA')}{bulk(digest)}{count}"
        self.starts: dict[str, tuple[str, str]] = {}
        """Packed commands up to their arguments, by lock name; see ``Keys.start``."""
        self._in_full = f"*{words}\r\n{bulk('EVAL')}{bulk(text)}{count}".encode()
        self._size = len(self.head)

    def in_full(self, packed: bytes) -> bytes:
        """The same command with the script's text, for a server that does not know the digest."""
        return self._in_full + packed[self._size :]


class Scripts:
    """All scripts of one backend. Their text depends on the options of the store."""

    def __init__(
        self, *, loss_protection: bool, interop: bool, cluster: bool, replicas: bool
    ) -> None:
        # No direct grant where a grant needs more than this hash, or where a script can't see
        # whether the waiter's client is subscribed: on a cluster it may be, at another node.
        self.direct = not (loss_protection or interop or cluster or replicas)
        """Whether a release may grant directly to the waiter that it wakes."""
        flags = (loss_protection, interop, cluster, self.direct)
        values = ", ".join(str(flag).lower() for flag in flags)
        self._flags = f"local LOSS, INTEROP, CLUSTER, DIRECT = {values}\n"
        keys = ["state"] + ["foreign"] * interop
        of_claim = keys + ["loss"] * loss_protection
        self.acquire = self._make("acquire", of_claim, 5)
        self.exchange = self._make("exchange", of_claim, 6)
        self.take_over = self._make("take_over", of_claim, 7)
        self.release = self._make("release", keys, 1)
        self.renew = self._make("renew", keys, 3)
        self.refresh = self._make("refresh", keys, 2)
        self.abandon = self._make("abandon", keys, 2)
        self.revoke = self._make("revoke", keys, 0)
        self.look = self._make("look", keys, 1)
        self.record = self._make("record", keys, 4)
        self.recall = self._make("recall", ["state"], 0)
        self.begin = self._make("begin", ["loss"], 0)

    def _make(self, name: str, keys: Sequence[str], arguments: int) -> Script:
        body = "\n".join(_part(part) for part in _PARTS[name])
        return Script(f"{self._flags}{_CONSTANTS}{_part('reading')}{body}", keys, arguments)


def _part(part: str) -> str:
    if part == "clock":
        return _CLOCK
    return read_lua(part) if part.isidentifier() else part


def read_lua(name: str) -> str:
    """The text of one file of ``lua/``."""
    return (_FOLDER / f"{name}.lua").read_text()


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))


_CONSTANTS = f"""\
local MOST, MOST_SLOTS, MOST_STEPS = {LARGEST_NUMBER}, {MOST_SLOTS}, {MOST_STEPS}
local LABEL_BYTES = {LABEL_BYTES}
local VERSION, QUEUE = '{PROTOCOL}', {QUEUE_CAP}
local KEEP, DAY = {_milliseconds(IDLE_COUNTER_SECONDS)}, {_milliseconds(DAY_SECONDS)}
local STALE, GRACE = {_milliseconds(STALE_SECONDS)}, {_milliseconds(GRACE_SECONDS)}
local FOREIGN, REMEMBER = {_milliseconds(FOREIGN_SECONDS)}, {_milliseconds(REMEMBER_SECONDS)}
local REMEMBER_BYTES, PORTION = {REMEMBER_BYTES}, {PORTION}
"""
