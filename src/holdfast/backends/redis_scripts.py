"""The scripts of the Redis backend, put together from ``lua/`` and packed ahead.

A command is a constant head and a body: keys and arguments. When a server does not know a
script (restarted, flushed, another node), the same body goes behind a head with its text.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from holdfast.core.contract import (
    GRACE_SECONDS,
    IDLE_COUNTER_SECONDS,
    QUEUE_CAP,
    STALE_SECONDS,
)
from holdfast.wires.redis import bulk

__all__ = ["PROTOCOL", "Script", "Scripts"]

PROTOCOL = "1"
"""The version of what is stored; versions that differ refuse each other."""
DAY_SECONDS = 86_400.0
REMEMBER_SECONDS = 30.0
"""How long an abandoned owner is remembered: longer than any request of its can be under way."""
FOREIGN_SECONDS = 0.1
"""How often a hold of redis-py's Lock is looked at, as redis-py does itself."""

_FOLDER = Path(__file__).with_name("lua")
_PARTS = {
    "acquire": ("acquire", "state", "attempt", "return attempt(claim(1))"),
    "release": (
        "release",
        "state",
        "expire()",
        "local was = drop(ARGV[1])",
        "settle()",
        "save()",
        "return was and 1 or 0",
    ),
    "exchange": (
        "exchange",
        "state",
        "attempt",
        "expire()",
        "local was = drop(ARGV[1])",
        "settle()",
        "save()",
        "return {was and 1 or 0, attempt(claim(2))}",
    ),
    "renew": ("renew",),
    "refresh": ("clock", "state", "refresh"),
    "abandon": ("clock", "state", "abandon"),
    "revoke": ("clock", "state", "revoke"),
    "look": ("look",),
    "record": ("record",),
    "recall": ("recall",),
    "begin": ("begin",),
}
_CLOCK = """\
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
"""


class Script:
    """One script with a fixed number of keys and arguments."""

    def __init__(self, text: str, keys: int, arguments: int) -> None:
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        words = 3 + keys + arguments
        count = bulk(str(keys))
        self.head = f"*{words}\r\n{bulk('EVALSHA')}{bulk(digest)}{count}"
        self._in_full = f"*{words}\r\n{bulk('EVAL')}{bulk(text)}{count}".encode()
        self._size = len(self.head)

    def in_full(self, packed: bytes) -> bytes:
        """The same command with the script's text, for a server that does not know it."""
        return self._in_full + packed[self._size :]


class Scripts:
    """All scripts of one backend: their text depends on what the store was asked to do."""

    def __init__(self, *, loss_protection: bool, interop: bool, cluster: bool) -> None:
        flags = ", ".join(
            "true" if flag else "false" for flag in (loss_protection, interop, cluster)
        )
        self._flags = f"local LOSS, INTEROP, CLUSTER = {flags}\n"
        keys = 4 + interop
        claim = 5
        self.acquire = self._make("acquire", keys + loss_protection, claim)
        self.exchange = self._make("exchange", keys + loss_protection, claim + 1)
        self.release = self._make("release", keys, 1)
        self.renew = self._make("renew", keys, 2)
        self.refresh = self._make("refresh", keys, 2)
        self.abandon = self._make("abandon", keys, 2)
        self.revoke = self._make("revoke", keys, 0)
        self.look = self._make("look", keys, 1)
        self.record = self._make("record", 5, 4)
        self.recall = self._make("recall", 1, 0)
        self.begin = self._make("begin", 1, 0)

    def _make(self, name: str, keys: int, arguments: int) -> Script:
        body = "\n".join(_part(part) for part in _PARTS[name])
        return Script(self._flags + _CONSTANTS + body, keys, arguments)


def _part(part: str) -> str:
    if part == "clock":
        return _CLOCK
    file = _FOLDER / f"{part}.lua"
    return file.read_text() if part.isidentifier() else part


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))


_CONSTANTS = f"""\
local VERSION, QUEUE = '{PROTOCOL}', {QUEUE_CAP}
local KEEP, DAY = {_milliseconds(IDLE_COUNTER_SECONDS)}, {_milliseconds(DAY_SECONDS)}
local STALE, GRACE = {_milliseconds(STALE_SECONDS)}, {_milliseconds(GRACE_SECONDS)}
local FOREIGN, REMEMBER = {_milliseconds(FOREIGN_SECONDS)}, {_milliseconds(REMEMBER_SECONDS)}
"""
